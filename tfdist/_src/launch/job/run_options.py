"""The command line of `tfdist run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfdist._src.launch.job.host_list import ListedHost
from tfdist._src.launch.job.run_parser import run_parser

# Replacements of each worker with --elastic, unless --max-restarts says otherwise.
_REPLACEMENTS = 3
# What `--hosts` replaces, as it is when it is not given.
_EACH_HOSTS_OWN = {"workers": None, "nnodes": 1, "node_rank": 0, "host": None}
# What the launchers of the hosts are told in another way, or need not know.
_OF_THE_COMMAND = frozenset({"--hosts", "--hostfile", "-x", "--ssh", "--rendezvous", "--dry-run"})


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
        hosts: the hosts whose launchers are started by ssh; empty to start workers on this one.
        forward: the variables that they are sent, `"NAME"` or `"NAME=VALUE"`.
        ssh: the command that reaches them.
        launcher_arguments: what their launchers are passed, but for their own places.
        output: a member of `run_parser.OUTPUTS`.
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
    hosts: tuple[ListedHost, ...] = ()
    forward: tuple[str, ...] = ()
    ssh: str = "ssh"
    launcher_arguments: tuple[str, ...] = ()
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
    parser, takes_value = run_parser()
    options, program, unknown = _split_arguments(arguments, takes_value)
    if unknown:
        parser.error(f"unknown option {unknown}; pass the script's options after its name")
    values = parser.parse_args(options)
    if not program:
        parser.error("no script given; for example: tfdist run -n 4 train.py")
    if program == ["-m"]:
        parser.error("-m requires a module name")
    if values.hosts and values.hostfile:
        parser.error("--hosts and --hostfile exclude each other")
    values.hosts = values.hosts or values.hostfile or ()
    if values.hosts:
        for name, given in _EACH_HOSTS_OWN.items():
            if getattr(values, name) != given:
                option = "-n" if name == "workers" else f"--{name.replace('_', '-')}"
                parser.error(
                    f"{option} is for one host and cannot be combined with --hosts, which gives "
                    f"each host's number of workers: --hosts a:2,b:2"
                )
    elif values.forward:
        parser.error("-x requires --hosts or --hostfile: here, workers inherit the environment")
    del values.hostfile
    if not program[0].startswith("-m") and not values.hosts and not os.path.exists(program[0]):
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
    values.forward = tuple(values.forward)
    passed_on: tuple[str, ...] = ()
    if values.hosts:
        passed_on = (*_without(options, takes_value, _OF_THE_COMMAND), *program)
    command = (sys.executable, "-u", *program)
    return RunOptions(**vars(values), command=command, launcher_arguments=passed_on)


def _without(
    options: Sequence[str], takes_value: Mapping[str, bool], names: frozenset[str]
) -> Iterator[str]:
    """The options but for those of these names, and their values."""
    rest = iter(options)
    for option in rest:
        name = option.partition("=")[0] if option.startswith("--") else option[:2]
        attached = option != name
        words = [option]
        if takes_value.get(name) and not attached:
            words.append(next(rest))
        if name not in names:
            yield from words


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
