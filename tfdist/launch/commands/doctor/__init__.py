"""`tfdist doctor`: says what this machine has, how TF_CONFIG is understood, and what to mend."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from tfdist.launch.argument_types import OneLineParser, seconds
from tfdist.launch.commands.doctor import devices, machine, native, settings, tls, versions, workers
from tfdist.launch.commands.doctor.section import Question, Section

# Title -> check, in the order in which they are shown; the slowest comes last.
CHECKS: dict[str, Callable[[Question], Section]] = {
    "versions": versions.check,
    "machine": machine.check,
    "settings": settings.check,
    "collectives": native.check,
    "TLS": tls.check,
    "workers": workers.check,
    "devices": devices.check,
}


def main(arguments: Sequence[str]) -> int:
    """Runs every check and prints what it finds.

    Args:
        arguments: the command line, without `tfdist doctor`.

    Returns:
        0 if there is nothing to mend, else 1.

    Raises:
        SystemExit: the command line is wrong (code 2), or asks for help (code 0).
    """
    question = Question(os.environ, _parse(arguments))
    problems = []
    for title, check in CHECKS.items():
        section = check(question)
        print(section.text(title), end="\n\n", flush=True)
        problems += section.problems
    if not problems:
        print("Nothing to mend.")
        return 0
    print("To mend:")
    for number, problem in enumerate(problems, start=1):
        print(f"  {number}. {problem}")
    return 1


def _parse(arguments: Sequence[str]) -> float | None:
    parser = OneLineParser(
        prog="tfdist doctor",
        description="Checks this machine, its settings, TF_CONFIG and the way to the other "
        "workers; the exit code is 1 if there is something to mend.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--timeout",
        type=seconds(zero=False),
        metavar="SECONDS",
        help="limit for each probe (default: 5 for another worker, 60 for TensorFlow's devices)",
    )
    timeout: float | None = parser.parse_args(list(arguments)).timeout
    return timeout
