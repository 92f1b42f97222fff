"""`tfdist doctor`: reports what this host has, how TF_CONFIG is parsed, and any problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tfdist.launch.argument_types import OneLineParser, seconds
from tfdist.launch.commands.doctor import (
    devices,
    host,
    metrics,
    native,
    settings,
    tls,
    versions,
    workers,
)
from tfdist.launch.commands.doctor.section import Context, Section

# Title -> check, in the order shown; the slowest is last.
CHECKS: dict[str, Callable[[Context], Section]] = {
    "versions": versions.check,
    "host": host.check,
    "settings": settings.check,
    "collectives": native.check,
    "TLS": tls.check,
    "metrics": metrics.check,
    "workers": workers.check,
    "devices": devices.check,
}


def main(arguments: Sequence[str]) -> int:
    """Runs every check and prints the results.

    Args:
        arguments: the command line, without `tfdist doctor`.

    Returns:
        0 if there are no problems, else 1.

    Raises:
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    context = Context(os.environ, _parse(arguments))
    problems = []
    for title, check in CHECKS.items():
        section = check(context)
        print(section.text(title), end="\n\n", flush=True)
        problems += section.problems
    if not problems:
        print("No problems found.")
        return 0
    print("Problems:")
    for number, problem in enumerate(problems, start=1):
        print(f"  {number}. {problem}")
    return 1


def _parse(arguments: Sequence[str]) -> float | None:
    parser = OneLineParser(
        prog="tfdist doctor",
        description="Checks this host, its settings, TF_CONFIG and the connections to the other "
        "workers; exits with code 1 if there are problems.",
        epilog="docs/settings.md lists all environment variables that tfdist reads.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timeout",
        type=seconds(zero=False),
        metavar="SECONDS",
        help="time limit of each probe (default: 5 for a worker, 60 for TensorFlow's devices)",
    )
    timeout: float | None = parser.parse_args(list(arguments)).timeout
    return timeout
