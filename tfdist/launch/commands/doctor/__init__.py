"""`tfdist doctor`: reports what this host has, how TF_CONFIG is parsed, and any problems.

With `--flight`, it explains a job's flight logs instead.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist.launch.argument_types import OneLineParser, seconds
from tfdist.launch.commands.doctor import (
    devices,
    flight,
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
    """Runs every check and prints the results, or explains flight logs.

    Args:
        arguments: the command line, without `tfdist doctor`.

    Returns:
        0 if there are no problems, else 1; for flight logs 0, whatever they tell.

    Raises:
        LaunchError: there are no flight logs to read.
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    values = _parse(arguments)
    if values.flight is not None:
        print(flight.report(values.flight, as_json=values.json))
        return 0
    context = Context(os.environ, values.timeout)
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


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="tfdist doctor",
        description="Checks this host, its settings, TF_CONFIG and the connections to the other "
        "workers; exits with code 1 if there are problems. With --flight, explains why a job "
        "failed or stands.",
        epilog="docs/settings.md lists all environment variables that tfdist reads, "
        "docs/monitoring.md describes flight logs.",
        allow_abbrev=False,
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--timeout",
        type=seconds(zero=False),
        metavar="SECONDS",
        help="time limit of each probe (default: 5 for a worker, 60 for TensorFlow's devices)",
    )
    either.add_argument(
        "--flight",
        type=Path,
        metavar="DIR",
        help="explain the flight logs in this folder instead",
    )
    parser.add_argument("--json", action="store_true", help="print that as JSON")
    values = parser.parse_args(list(arguments))
    if values.json and values.flight is None:
        parser.error("--json is for flight logs: add --flight DIR")
    return values
