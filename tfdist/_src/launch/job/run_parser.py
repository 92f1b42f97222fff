"""The parser of the options of `tfdist run`, and their help texts."""

from __future__ import annotations

import argparse
from typing import Any

from tfdist._src.cluster.cluster_spec import split
from tfdist._src.launch.argument_types import OneLineParser, count, port, seconds, typed
from tfdist._src.launch.job.host_list import parse_hosts, read_hostfile

OUTPUTS = ("chief", "all", "none")
_EPILOG = """\
examples:
  tfdist run -n 4 train.py --epochs 10        4 workers here; --epochs goes to train.py
  tfdist run -n 4 -m project.train            the same for a module
  tfdist run -n 2 --output all train.py       lines of worker 1 are prefixed with "[1] "
  tfdist run -n 8 --dry-run train.py          only show what would be started

  tfdist run --hosts gpu1:8,gpu2:8 train.py   two hosts with 8 workers each, reached by ssh

  the same without ssh, one command per host:
  tfdist run -n 8 --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 train.py
  tfdist run -n 8 --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:29400 train.py

The first worker that fails ends the job: the others are stopped, its last lines of output are
shown, and this command exits with its exit code (128 + the signal number if it was killed). With
--max-restarts, all workers on all hosts then start again, with the same ranks and addresses; a
callback such as BackupAndRestore continues the training. With --elastic, nobody is stopped: the
failed worker alone is replaced, and the job succeeds if the workers that remain do.
SIGTERM is forwarded to the workers; if all of them save their state and exit with code 75, so does
this command; with --elastic, other hosts go on. Ctrl-C interrupts all workers; a second Ctrl-C
kills them. No worker, nor any process in a worker's process group, outlives this command, even if
it is killed.

Environment variables, such as TFDIST_START_TIMEOUT, are listed in docs/settings.md; `tfdist doctor`
shows those that are set."""


def run_parser() -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """The parser, and whether each option takes a value."""
    parser = OneLineParser(
        prog="tfdist run",
        usage="%(prog)s [-n N] [options] script.py [arguments]\n"
        "       %(prog)s --hosts a:2,b:2 [options] script.py [arguments]\n"
        "       %(prog)s [-n N] [options] -m module [arguments]",
        description="Runs a script as several workers, on this host or on several, and sets the "
        "TF_CONFIG\nof each worker.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    takes_value = {"-h": False, "--help": False}

    def add(*names: str, **settings: Any) -> None:
        takes_value.update(dict.fromkeys(names, settings.get("action") != "store_true"))
        group.add_argument(*names, **settings)

    group: argparse._ActionsContainer = parser
    add(
        "-n",
        "--workers",
        type=_workers,
        metavar="N",
        help="workers on this host, or auto: one per GPU, or one without GPUs (default: auto)",
    )
    add("-m", metavar="MODULE", default=argparse.SUPPRESS, help="run a module, like python -m")
    add(
        "--output",
        choices=OUTPUTS,
        default="chief",
        help="which workers' output to show: chief (only rank 0, unmodified), all (also the "
        "others, each line prefixed with the rank), or none (default: chief)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="write each worker's output to DIR/worker-RANK.log (the chief's only with --output "
        "none), after restart N to DIR/restart-N, overwriting old files (default: a temporary "
        "directory, kept only if the job fails or was restarted)",
    )
    add(
        "--cores-per-worker",
        type=count(0),
        metavar="K",
        help="threads per worker; 0 leaves threads unconfigured (default: this host's cores "
        "divided evenly, except for thread variables that are already set)",
    )
    add(
        "--gpus-per-worker",
        type=count(0),
        metavar="K",
        help="GPUs per worker; 0 for the CPU (default: divided evenly, or the CPU for all workers "
        "if there are fewer GPUs than workers)",
    )
    add(
        "--grace",
        type=seconds(zero=True),
        metavar="SECONDS",
        help="seconds between SIGTERM and SIGKILL, and after Ctrl-C between SIGINT and SIGTERM "
        "(default: 5; 25 if this command gets SIGTERM, so that workers can save their state)",
    )
    add(
        "--max-restarts",
        type=count(0),
        metavar="N",
        help="after a failure, start all workers again, at most N times, waiting 1, 2, 4 ... 60 "
        "seconds; not after a failure that must come again, nor after the same one at the same "
        "step (default: 0; with several hosts, that of host 0 counts); with --elastic, the number "
        "of replacements of each worker (default: 3)",
    )
    add(
        "--elastic",
        action="store_true",
        help="after a failure of a worker, let the others go on, and start a replacement that "
        "joins them; needs the callback tfdist.callbacks.Elastic",
    )
    add(
        "--spares",
        type=count(0),
        metavar="N",
        help="with --elastic, processes on this host that have imported TensorFlow already and "
        "wait to become a replacement (default: 1; none with GPUs)",
    )
    add(
        "--metrics-port",
        type=port,
        metavar="PORT",
        help="serve Prometheus metrics: a host's first worker on PORT, the next on PORT + 1, and "
        "so on (default: TFDIST_METRICS_PORT, or none; needs the package prometheus_client)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print each worker's command and settings without starting it",
    )
    group = parser.add_argument_group("several hosts, started by ssh from here")
    add(
        "--hosts",
        type=typed(parse_hosts),
        metavar="A:2,B:2",
        help="the hosts, and how many workers each runs (default: one per GPU, or one without "
        "GPUs); every host has this folder and this Python, and ssh needs no password",
    )
    add(
        "--hostfile",
        type=typed(read_hostfile),
        metavar="FILE",
        help="a file with the hosts, one per line: HOST, HOST:2 or HOST slots=2",
    )
    add(
        "-x",
        action="append",
        dest="forward",
        default=[],
        metavar="NAME[=VALUE]",
        help="send a variable to the hosts; may be repeated (TFDIST_* are sent anyway). Use NAME "
        "for secrets: what stands here is in this machine's list of processes",
    )
    add(
        "--ssh",
        default="ssh",
        metavar="COMMAND",
        help='how to reach a host, such as "ssh -p 2222 -i key" (default: ssh)',
    )
    group = parser.add_argument_group("several hosts (same command on each, except --node-rank)")
    add("--nnodes", type=count(1), default=1, metavar="N", help="number of hosts (default: 1)")
    add(
        "--node-rank",
        type=count(0),
        default=0,
        metavar="R",
        help="this host's number, from 0 to N-1 (default: 0)",
    )
    add(
        "--rendezvous",
        type=typed(split),
        metavar="HOST:PORT",
        help="an address of host 0 and a free port on it, where the hosts connect within "
        "TFDIST_START_TIMEOUT seconds (default: 300)",
    )
    add(
        "--host",
        metavar="ADDRESS",
        help="this host's address for the other workers (default: the one its connection to the "
        "rendezvous uses)",
    )
    return parser, takes_value


def _workers(text: str) -> int | None:
    return None if text == "auto" else count(1)(text)
