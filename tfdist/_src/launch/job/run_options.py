"""Parses the command line of `tfdist run`."""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tfdist._src.cluster.cluster_spec import split
from tfdist._src.launch.console import OneLineParser, count, port, seconds, typed
from tfdist.errors import LaunchError


def check_syntax(command: Sequence[str]) -> None:
    """Checks the syntax of the workers' program, if the program is a Python source file.

    Args:
        command: the workers' command: the interpreter, `-u`, then either a script or `-m` and a
            module, and finally the arguments of the script or module.

    Raises:
        LaunchError: the program does not compile. The message contains the line number, if known.
    """
    path = _source(command[2:])
    if path is None:
        return
    try:
        source = path.read_bytes()
    except OSError:
        return  # The worker will report why it cannot read the program.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise LaunchError(f"{path}{line}: {type(error).__name__}: {reason}") from None


def _source(program: Sequence[str]) -> Path | None:
    """Returns the source file of a program; None if there is none, or it cannot be found.

    Args:
        program: a script, or `-m` and a module, followed by arguments.
    """
    if not program[0].startswith("-m"):
        path = Path(program[0])
        return path if path.suffix == ".py" else None
    name = program[1] if program[0] == "-m" else program[0][2:]
    # Find the module in the same places as `python -m`, but do not import its parent packages.
    folders: Sequence[str] | None = [os.getcwd(), *sys.path[1:]]
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None and length < len(parts):
            return None
    if folders is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", folders)
    origin = spec.origin if spec is not None else None
    return Path(origin) if origin and origin.endswith(".py") else None


_SLOTS = re.compile(r"(?<![-_\w])slots\s*=\s*(\S+)", re.IGNORECASE)


@dataclass(frozen=True)
class ListedHost:
    """A host in the list of `--hosts` or `--hostfile`.

    Attributes:
        name: the host as it is passed to ssh: a name, an address, `user@host`, or an alias from
            ssh's configuration.
        workers: the number of workers on the host. None means one worker per GPU, or one worker if
            the host has no GPUs.
    """

    name: str
    workers: int | None = None

    @property
    def address(self) -> str:
        """The host's name without the user name."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[ListedHost, ...]:
    """Parses a list of hosts.

    Args:
        text: the hosts, separated by commas. Each host is `"host:workers"` or `"host"`. An IPv6
            address must be in brackets if a number of workers follows it.

    Raises:
        ValueError: the list is empty or malformed, or contains a host twice.

    Example:
        >>> [(host.name, host.workers) for host in parse_hosts("gpu1:2,[fd00::2]:4,gpu3")]
        [('gpu1', 2), ('fd00::2', 4), ('gpu3', None)]
    """
    return _checked(_parse_host(part.strip()) for part in text.split(",") if part.strip())


def read_hostfile(path: str) -> tuple[ListedHost, ...]:
    """Reads a file with one host per line.

    Args:
        path: the path of the file. Each line is `host`, `host slots=4` or `host:4`, where 4 is the
            number of workers. `#` begins a comment.

    Raises:
        ValueError: the file cannot be read, has a malformed line, contains no host, or contains a
            host twice.

    Example:
        >>> Path("hosts").write_text("gpu1 slots=2\\ngpu2:4  # the new one\\n")  # doctest: +SKIP
        >>> read_hostfile("hosts")  # doctest: +SKIP
        (ListedHost(name='gpu1', workers=2), ListedHost(name='gpu2', workers=4))
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    stripped = (line.partition("#")[0].strip() for line in lines)
    try:
        return _checked(_parse_line(line) for line in stripped if line)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse_line(line: str) -> ListedHost:
    name, *rest = line.split(maxsplit=1)
    if not rest:
        return _parse_host(name)
    slots, host = _SLOTS.search(rest[0]), _parse_host(name)
    if slots is None or host.workers is not None:
        raise ValueError(f"a line must be HOST, HOST:N or HOST slots=N. Received: {line!r}")
    return ListedHost(host.name, _worker_count(slots.group(1), line))


def _parse_host(text: str) -> ListedHost:
    user, at, host = text.rpartition("@")
    if host.startswith("["):
        address, _, rest = host[1:].partition("]")
        colon, workers = rest[:1], rest[1:]
        if rest and colon != ":":
            raise ValueError(f"must be HOST or HOST:N. Received: {text!r}")
    elif host.count(":") > 1:
        address, colon, workers = host, "", ""
    else:
        address, colon, workers = host.partition(":")
    name = _name(f"{user}{at}{address}")
    return ListedHost(name, _worker_count(workers, text) if colon else None)


def _name(name: str) -> str:
    # ssh would take a name such as -oProxyCommand=… for an option, so do not accept it as a host.
    if not name or name.startswith("-") or not name.isprintable() or " " in name:
        raise ValueError(f"must name a host. Received: {name!r}")
    return name


def _worker_count(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ValueError(f"the number of workers must be an integer >= 1. Received: {whole!r}")
    return int(text)


def _checked(hosts: Iterable[ListedHost]) -> tuple[ListedHost, ...]:
    listed = tuple(hosts)
    if not listed:
        raise ValueError("must name at least one host")
    names = [host.name for host in listed]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"names {name} twice: give the number of all its workers once")
    return listed


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
callback such as BackupAndRestore continues the training. With --elastic, the others are not
stopped: only the failed worker is replaced, and the job succeeds if the remaining workers do.
SIGTERM is forwarded to the workers; if all of them save their state and exit with code 75, so does
this command; with --elastic, other hosts continue. Ctrl-C interrupts all workers; a second Ctrl-C
kills them. No worker, nor any process in a worker's process group, outlives this command, even if
it is killed.

Environment variables, such as TFDIST_START_TIMEOUT, are listed in docs/guide/settings.md; `tfdist
doctor` shows those that are set."""


def run_parser() -> tuple[argparse.ArgumentParser, dict[str, bool]]:
    """Returns the parser of the options, and a dict that tells which options take a value.

    The parser does not know the script and its arguments. `parse` separates them from the options.
    """
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
        "seconds; not after a failure that is certain to recur, nor after the same one at the same "
        "step (default: 0; with several hosts, the value of host 0 applies); with --elastic, the "
        "number of replacements of each worker (default: 3)",
    )
    add(
        "--elastic",
        action="store_true",
        help="after a failure of a worker, let the others continue, and start a replacement that "
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
        "for secrets: a VALUE given here is visible in this machine's process list",
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


# The default of --max-restarts with --elastic: the maximum number of replacements of each worker.
_REPLACEMENTS = 3
# The options that describe a single host, and their defaults. They cannot be combined with
# `--hosts`, because `tfdist run --hosts` sets them for each host.
_EACH_HOSTS_OWN = {"workers": None, "nnodes": 1, "node_rank": 0, "host": None}
# The options that `tfdist run --hosts` does not pass on to the launchers of the hosts. They receive
# the same information in another form, or do not need it.
_OF_THE_COMMAND = frozenset({"--hosts", "--hostfile", "-x", "--ssh", "--rendezvous", "--dry-run"})


@dataclass(frozen=True)
class RunOptions:
    """The options of `tfdist run`; see the help text for their meaning.

    Attributes:
        command: the command that each worker runs, starting with the Python interpreter.
        workers: the number of workers to start on this host. None means one worker per GPU, or one
            worker if there are no GPUs.
        nnodes: the number of hosts.
        node_rank: this host's number.
        rendezvous: the host name and the port on which host 0 listens; None for a job on one host.
        host: the address at which other hosts reach this host's workers; None to detect it.
        hosts: the hosts on which this command starts launchers by ssh; empty to start workers on
            this host.
        forward: the environment variables to send to `hosts`, each `"NAME"` or `"NAME=VALUE"`.
        ssh: the ssh command that connects to `hosts`.
        launcher_arguments: the arguments that the launchers of all `hosts` have in common.
        output: which output is shown, a member of `OUTPUTS`.
        log_dir: the directory of the log files; None for a temporary directory.
        cores_per_worker: the number of cores of each worker. None to divide the cores evenly, 0 to
            leave the numbers of threads unconfigured.
        gpus_per_worker: the number of GPUs of each worker; None to divide the GPUs evenly.
        grace: the number of seconds between two signals when the launcher stops a worker with
            SIGINT, SIGTERM and SIGKILL; None for the defaults.
        max_restarts: the maximum number of restarts after failures; with `elastic`, the maximum
            number of replacements of each worker.
        elastic: whether a failed worker is replaced while the others continue.
        spares: the number of warm spares: processes that wait to become a replacement.
        metrics_port: the port at which this host's first worker serves its metrics; None to use the
            environment variable `TFDIST_METRICS_PORT`.
        dry_run: whether to print the workers' commands without starting the workers.
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

    The program is the first argument that is neither an option of `tfdist run` nor the value of an
    option, or else the module after `-m`. All arguments after it are passed to the program.

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
    """Yields the words of `options`, except for the options in `names` and their values."""
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
    """Separates the options of `tfdist run` from the program and the program's arguments.

    Returns:
        The options of `tfdist run` with their values; the program with its arguments; and the first
        unknown option, or "" if all options are known.
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
