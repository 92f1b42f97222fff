"""The command line of `tfdist manifest`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfdist._src.launch.argument_types import OneLineParser, count, typed

# Pods are named after the job, and a label has at most 63 characters.
_LONGEST_NAME = 45
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_CLAIM = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Volume:
    """A persistent volume claim, and where the pods see it."""

    claim: str
    path: str


@dataclass(frozen=True)
class ManifestOptions:
    """The options of `tfdist manifest`; see the help text for their meaning.

    Attributes:
        name: of the job, its service and its Secret.
        image: the container image.
        command: the command that each worker runs.
        workers: their number, one per pod.
        kind: one of the kinds of `commands/manifest.py`.
        namespace: the namespace; "" for that of the context.
        gpus: GPUs of each worker.
        cpus: processors of each worker, as a quantity of Kubernetes; "" to not ask for any.
        memory: likewise.
        max_restarts: how often each worker, or with a JobSet the job, is started again.
        grace: seconds between SIGTERM and SIGKILL.
        start_timeout: seconds in which all pods have to start.
        elastic: whether workers may come and go.
        probes: whether Kubernetes checks that the workers respond.
        volumes: what the pods mount.
        variables: more variables, name and value.
    """

    name: str
    image: str
    command: tuple[str, ...]
    workers: int = 2
    kind: str = "job"
    namespace: str = ""
    gpus: int = 0
    cpus: str = ""
    memory: str = ""
    max_restarts: int = 3
    grace: int = 60
    start_timeout: int = 1800
    elastic: bool = False
    probes: bool = True
    volumes: tuple[Volume, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


def parse(arguments: Sequence[str], kinds: Sequence[str]) -> ManifestOptions:
    """Parses the command line.

    Args:
        arguments: the command line, without `tfdist manifest`.
        kinds: what `--kind` may be; the first one by default.

    Raises:
        SystemExit: on a usage error (code 2), or after printing the help (code 0).

    Example:
        >>> parse(["--name", "a", "--image", "a:1", "train.py", "-n", "3"], ["job"]).command
        ('python', '-u', 'train.py', '-n', '3')
    """
    parser = _parser(kinds)
    values = parser.parse_args(arguments)
    if values.elastic and values.kind != "job":
        parser.error("--elastic requires --kind job: the other kinds restart all workers")
    if values.elastic and values.workers == 1:
        parser.error("--elastic requires --workers 2 or more: one that trains alone admits nobody")
    program = [word for i, word in enumerate(values.program) if (i, word) != (0, "--")]
    if not program:
        parser.error("no script given; for example: tfdist manifest --name a --image b train.py")
    fields = {name: value for name, value in vars(values).items() if value is not None}
    del fields["program"]
    for name in ("volumes", "variables"):
        fields[name] = tuple(fields[name])
    return ManifestOptions(**fields, command=("python", "-u", *program))


def _parser(kinds: Sequence[str]) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="tfdist manifest",
        usage="%(prog)s --name NAME --image IMAGE [options] script.py [arguments]",
        description="Prints what Kubernetes needs to run a script as several workers, one per pod: "
        "a headless\nservice, a Secret with the job's own secret, and the job.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--name",
        type=_matching(_NAME, "lower-case letters, digits and '-'", _LONGEST_NAME),
        required=True,
        help="the job's name",
    )
    add(
        "--image",
        required=True,
        type=_matching(re.compile(r"\S+"), "an image"),
        help="the container image, with Python, tfdist and the script",
    )
    add("--workers", type=count(1), default=2, metavar="N", help="pods (default: 2)")
    add(
        "--kind",
        choices=kinds,
        default=kinds[0],
        help="an Indexed Job, which needs nothing but Kubernetes 1.29; a JobSet, whose workers all "
        "start again when one fails; or Kubeflow's TFJob (default: job)",
    )
    add(
        "--namespace",
        type=_matching(_LABEL, "lower-case letters, digits and '-'", 63),
        metavar="NS",
        help="the namespace (default: that of kubectl)",
    )
    add("--gpus", type=count(0), default=0, metavar="N", help="GPUs of each worker (default: 0)")
    add(
        "--cpus",
        metavar="N",
        type=_matching(_QUANTITY, "a quantity such as 4 or 500m"),
        help="processors of each worker (default: the cluster's)",
    )
    add(
        "--memory",
        type=_matching(_QUANTITY, "a quantity such as 16Gi"),
        metavar="N",
        help="memory of each worker (default: the cluster's)",
    )
    add(
        "--max-restarts",
        type=count(0),
        default=3,
        metavar="N",
        help="how often each worker (with a JobSet, the whole job) is restarted after a failure; a "
        "preemption after which all workers have saved does not count (default: 3)",
    )
    add(
        "--grace",
        type=count(0),
        default=60,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL, for a last snapshot (default: 60)",
    )
    add(
        "--start-timeout",
        type=count(1),
        default=1800,
        metavar="SECONDS",
        help="in which all pods have to start, once one has made its strategy (default: 1800)",
    )
    add(
        "--elastic",
        action="store_true",
        help="let the workers that remain go on when one fails, and take in new ones; needs the "
        "callback tfdist.callbacks.Elastic",
    )
    add(
        "--no-probes",
        action="store_false",
        dest="probes",
        help="do not ask each worker for its metrics, which needs prometheus_client in the image, "
        "to see whether it responds",
    )
    add(
        "--volume",
        type=typed(_volume),
        action="append",
        default=[],
        dest="volumes",
        metavar="CLAIM:/PATH",
        help="mount a persistent volume claim; may be repeated",
    )
    add(
        "--env",
        type=typed(_variable),
        action="append",
        default=[],
        dest="variables",
        metavar="NAME=VALUE",
        help="set a variable; may be repeated",
    )
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


_EPILOG = """\
examples:
  tfdist manifest --name train --image repo/train:1 --workers 4 train.py | kubectl apply -f -
  tfdist manifest --name train --image repo/train:1 --gpus 8 --memory 64Gi \\
      --volume data:/data -- -m project.train --epochs 10

Every call generates a new secret; keep the output to apply it again to a running job.
docs/clusters.md tells what happens when a worker fails or is preempted."""


def _matching(pattern: re.Pattern[str], what: str, longest: int = 253) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text) or len(text) > longest:
            raise ValueError(f"must be {what}, up to {longest} characters. Received: {text!r}")
        return text

    return typed(read)


def _volume(text: str) -> Volume:
    claim, _, path = text.partition(":")
    if not _CLAIM.fullmatch(claim) or not path.startswith("/") or ":" in path:
        raise ValueError(f"must be CLAIM:/PATH. Received: {text!r}")
    return Volume(claim, path)


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not _VARIABLE.fullmatch(name):
        raise ValueError(f"must be NAME=VALUE. Received: {text!r}")
    return name, value
