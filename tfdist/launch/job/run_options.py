"""The command line of `tfdist run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.cluster.spec.host_port import split
from tfdist.launch.argument_types import OneLineParser, count, port, seconds, typed

OUTPUTS = ("chief", "all", "none")
# Replacements of each worker with --elastic, unless --max-restarts says otherwise.
_REPLACEMENTS = 3


@dataclass(frozen=True)
class RunOptions:
    """The options of `tfdist run`; see the help text for their meaning.

    Attributes:
        command: the command that each worker runs, starting with the Python interpreter.
        workers: the number of workers to start on this host; None for one per GPU.
        nnodes: the number of hosts.
        node_rank: this host's number.
        rendezvous: host and port that host 0 listens on; None for a job on one host.
        host: the address of this host for the other workers; None to detect it.
        output: a member of `OUTPUTS`.
        log_dir: the directory for the log files; None for a temporary one.
        cores_per_worker: None to divide the cores evenly, 0 to leave threads unconfigured.
        gpus_per_worker: None to divide the GPUs evenly.
        grace: seconds from one signal to the next, harder one; None for the defaults.
        max_restarts: how often a job that has failed is started again; with `elastic`, how many
            replacements each worker may have.
        elastic: whether a worker that fails is replaced while the others go on.
        spares: the number of processes that wait to become a replacement.
        metrics_port: the port of this host's first worker for metrics; None for the environment's.
        dry_run: whether to only print the workers.
    """

    command: tuple[str, ...]
    workers: int | None = None
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: tuple[str, int] | None = None
    host: str | None = None
    output: str = "chief"
    log_dir: str | None = None
    cores_per_worker: int | None = None
    gpus_per_worker: int | None = None
    grace: float | None = None
    max_restarts: int = 0
    elastic: bool = False
    spares: int = 0
    metrics_port: int | None = None
    dry_run: bool = False


def parse(arguments: Sequence[str]) -> RunOptions:
    """Parses the command line of `tfdist run`.

    The first argument that is not an option of `tfdist run`, or the module after `-m`, is the
    program; all arguments after it are passed to the program.

    Args:
        arguments: the command line, without `tfdist run`.

    Raises:
        SystemExit: on a usage error (code 2, with one line on stderr), or after printing the help
            (code 0).

    Example:
        >>> options = parse(["-n", "2", "-m", "train", "--epochs", "3", "-n", "5"])
        >>> options.workers, options.command[-4:]
        (2, ('--epochs', '3', '-n', '5'))
    """
    parser, takes_value = _parser()
    options, program, unknown = _split_arguments(arguments, takes_value)
    if unknown:
        parser.error(f"unknown option {unknown}; pass the script's options after its name")
    values = parser.parse_args(options)
    if not program:
        parser.error("no script given; for example: tfdist run -n 4 train.py")
    if program == ["-m"]:
        parser.error("-m requires a module name")
    if not program[0].startswith("-m") and not os.path.exists(program[0]):
        parser.error(f"no such file: {program[0]!r}")
    if values.nnodes > 1 and values.rendezvous is None:
        parser.error("--nnodes requires --rendezvous HOST:PORT, the same on all hosts")
    if values.node_rank >= values.nnodes:
        parser.error(
            f"--node-rank must be < --nnodes ({values.nnodes}). Received: {values.node_rank}"
        )
    if values.spares and not values.elastic:
        parser.error("--spares requires --elastic: without it, all workers start again")
    if values.max_restarts is None:
        values.max_restarts = _REPLACEMENTS if values.elastic else 0
    if values.spares is None:
        values.spares = 1 if values.elastic else 0
    fields = {**vars(values), "command": (sys.executable, "-u", *program)}
    return RunOptions(**fields)


def _split_arguments(
    arguments: Sequence[str], takes_value: Mapping[str, bool]
) -> tuple[list[str], list[str], str]:
    """Separates the launcher's options from the program.

    Returns:
        The launcher's arguments, the program and its arguments, and an unknown option ("" if none).
    """
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return list(arguments[:position]), list(arguments[position + 1 :]), ""
        if argument.startswith("-m") or not argument.startswith("-"):
            return list(arguments[:position]), list(arguments[position:]), ""
        if argument.startswith("--"):
            name, attached = argument.partition("=")[0], "=" in argument
        else:
            name, attached = argument[:2], len(argument) > 2
        if name not in takes_value:
            return [], [], name
        position += 2 if takes_value[name] and not attached else 1
    return list(arguments), [], ""


def _parser() -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """The parser, and whether each option takes a value."""
    parser = OneLineParser(
        prog="tfdist run",
        usage="%(prog)s [-n N] [options] script.py [arguments]\n"
        "       %(prog)s [-n N] [options] -m module [arguments]",
        description="Runs a script as several workers, on this host or on several, and sets the "
        "TF_CONFIG\nof each worker.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    takes_value = {"-h": False, "--help": False}

    def add(*names: str, **settings: Any) -> None:
        takes_value.update(dict.fromkeys(names, "action" not in settings))
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


_EPILOG = """\
examples:
  tfdist run -n 4 train.py --epochs 10        4 workers here; --epochs goes to train.py
  tfdist run -n 4 -m project.train            the same for a module
  tfdist run -n 2 --output all train.py       lines of worker 1 are prefixed with "[1] "
  tfdist run -n 8 --dry-run train.py          only show what would be started

  two hosts with 8 workers each, one command per host:
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


def _workers(text: str) -> int | None:
    return None if text == "auto" else count(1)(text)
