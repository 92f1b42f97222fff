"""The command line of `tfdist run`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdist.cluster.spec.host_port import split
from tfdist.launch.argument_types import OneLineParser, count, seconds, typed

OUTPUTS = ("chief", "all", "none")


@dataclass(frozen=True)
class RunOptions:
    """What `tfdist run` was asked to do; the help text says what each option means.

    Attributes:
        command: what each worker runs, from the Python interpreter on.
        workers: workers to start on this machine; None for one per GPU.
        nnodes: machines of the job.
        node_rank: this machine's number among them.
        rendezvous: host and port where node 0 listens; None on a job of one machine.
        host: the address of this machine for the other workers; None to find it out.
        output: a member of `OUTPUTS`.
        log_dir: the folder for the workers' output; None for a temporary one.
        cores_per_worker: None to share the cores evenly, 0 to leave threads alone.
        gpus_per_worker: None to share the GPUs evenly.
        grace: seconds between two ever harder signals.
        dry_run: whether to print the workers only.
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
    grace: float = 5.0
    dry_run: bool = False


def parse(arguments: Sequence[str]) -> RunOptions:
    """Reads the command line that follows `tfdist run`.

    The first argument that is no option of `tfdist run`, or what follows `-m`, is the program;
    everything after it belongs to the program, whatever it looks like.

    Args:
        arguments: the command line, without `tfdist run`.

    Raises:
        SystemExit: with code 2 after one line on stderr for a wrong command line, with code 0
            after the help text.

    Example:
        >>> options = parse(["-n", "2", "-m", "train", "--epochs", "3", "-n", "5"])
        >>> options.workers, options.command[-4:]
        (2, ('--epochs', '3', '-n', '5'))
    """
    parser, takes_value = _parser()
    own, program, unknown = _part(arguments, takes_value)
    if unknown:
        parser.error(f"there is no option {unknown}; the script's own options come after its name")
    values = parser.parse_args(own)
    if not program:
        parser.error("no script given; for example: tfdist run -n 4 train.py")
    if program == ["-m"]:
        parser.error("-m needs the name of a module")
    if not program[0].startswith("-m") and not os.path.exists(program[0]):
        parser.error(f"there is no file {program[0]!r}")
    if values.nnodes > 1 and values.rendezvous is None:
        parser.error("--nnodes needs --rendezvous host:port, the same on all nodes")
    if values.node_rank >= values.nnodes:
        parser.error(f"--node-rank must be below --nnodes {values.nnodes}: {values.node_rank}")
    fields = {**vars(values), "command": (sys.executable, "-u", *program)}
    return RunOptions(**fields)


def _part(
    arguments: Sequence[str], takes_value: Mapping[str, bool]
) -> tuple[list[str], list[str], str]:
    """Parts the launcher's own options from the program.

    Returns:
        The launcher's arguments, the program's, and an option that is none ("" for none).
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
    """The parser, and for each option whether it takes a value."""
    parser = OneLineParser(
        prog="tfdist run",
        usage="%(prog)s [-n N] [options] script.py [arguments]\n"
        "       %(prog)s [-n N] [options] -m module [arguments]",
        description="Starts a script as several workers, on this machine or on several, and tells "
        "each one\nthe others by TF_CONFIG.",
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
        help="workers on this machine; auto, the default, is one per GPU, or one without GPUs",
    )
    add("-m", metavar="MODULE", default=argparse.SUPPRESS, help="run a module, as python -m does")
    add(
        "--output",
        choices=OUTPUTS,
        default="chief",
        help="whose output comes to the terminal: chief (rank 0, unchanged; the default), all "
        "(the others too, each line after its rank), or none",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="write what the workers print to DIR/worker-RANK.log, over older files; by default "
        "a temporary folder that is kept only if the job fails (the chief's output is written "
        "there with --output none alone)",
    )
    add(
        "--cores-per-worker",
        type=count(0),
        metavar="K",
        help="threads of each worker; default: this machine's cores shared evenly, but for the "
        "variables that you have set yourself; 0 leaves threads alone",
    )
    add(
        "--gpus-per-worker",
        type=count(0),
        metavar="K",
        help="GPUs of each worker; default: shared evenly, or the CPU for all workers where "
        "there are fewer GPUs than workers; 0 is the CPU",
    )
    add(
        "--grace",
        type=seconds(zero=True),
        default=5.0,
        metavar="SECONDS",
        help="time a worker has to end when it is asked to, before it is killed (default: 5)",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print each worker's command and settings, and start nothing",
    )
    group = parser.add_argument_group("several machines, the same command on each but --node-rank")
    add("--nnodes", type=count(1), default=1, metavar="N", help="machines (default: 1)")
    add("--node-rank", type=count(0), default=0, metavar="R", help="this machine's number, from 0")
    add(
        "--rendezvous",
        type=typed(split),
        metavar="HOST:PORT",
        help="an address of node 0 and a free port there, where the nodes find one another "
        "within TFDIST_START_TIMEOUT seconds (default: 300)",
    )
    add(
        "--host",
        metavar="ADDRESS",
        help="this machine's address for the other workers; default: the one that its "
        "connection to the rendezvous uses",
    )
    return parser, takes_value


_EPILOG = """\
examples:
  tfdist run -n 4 train.py --epochs 10        4 workers here; --epochs goes to train.py
  tfdist run -n 4 -m project.train            the same with a module
  tfdist run -n 2 --output all train.py       what worker 1 prints comes after "[1] "
  tfdist run -n 8 --dry-run train.py          only show what would be started

  two machines with 8 workers each, one command on each:
  tfdist run -n 8 --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29400 train.py
  tfdist run -n 8 --nnodes 2 --node-rank 1 --rendezvous 10.0.0.1:29400 train.py

The first worker that fails ends the job: the others are stopped, its last lines are shown, and
its exit code (128 + the number of a signal) is this command's. Ctrl-C asks all workers to end; a
second Ctrl-C kills them. No worker, and no process that a worker started in its own process
group, outlives this command, even when it is killed."""


def _workers(text: str) -> int | None:
    return None if text == "auto" else count(1)(text)
