"""Runs programs, and prints how each differs from one process.

python -m tests.enumeration "layers:Dense" "losses:*/compile*"
python -m tests.enumeration --covering losses optimizers
python -m tests.enumeration --simulated losses
python -m tests.enumeration --random 500 --seed 7 --workers 3
python -m tests.enumeration --workers 1x2 patterns
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterable

from tests.enumeration.expected import pattern_of
from tests.enumeration.programs import PARTS, RUN, check_sound, covering_names, difference, names
from tests.harness.references import reference


def main() -> int:
    """Returns 1 if a program differs."""
    arguments = _parser().parse_args()
    count = different = 0
    started = time.monotonic()
    for name in _chosen(arguments):
        count += 1
        before = time.monotonic()
        if arguments.simulated:
            differs = _simulated(name, int(arguments.workers))
        else:
            differs = _outcome(name, arguments.workers)
        seconds = time.monotonic() - before
        found = "skipped" if differs is None else "DIFFERS" if differs else "same"
        if differs and pattern_of(name):
            found, differs = "documented", ""
        different += bool(differs)
        print(f"{found} {name} ({seconds:.1f} s)", flush=True)
        if differs:
            print(_indented(differs if arguments.full else _brief(differs)), flush=True)
    seconds = time.monotonic() - started
    print(f"{count} programs, of which {different} differ, in {seconds:.0f} s")
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.enumeration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("programs", nargs="*", help="names or patterns; all if there are none")
    parser.add_argument("--random", type=int, metavar="N", help="N random programs instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first random program")
    parser.add_argument("--covering", action="store_true", help="each symbol and each option once")
    parser.add_argument("--default", action="store_true", help="those of the default tests")
    parser.add_argument(
        "--workers",
        default="2",
        help='or a group of harness/groups.py; "0": in one process only',
    )
    parser.add_argument(
        "--simulated", action="store_true", help="training steps on workers of one process"
    )
    parser.add_argument("--full", action="store_true", help="all of each difference")
    return parser


def _chosen(arguments: argparse.Namespace) -> Iterable[str]:
    if arguments.random:
        seeds = range(arguments.seed, arguments.seed + arguments.random)
        return [f"random_programs:{seed}" for seed in seeds]
    known = [name for part in PARTS for name in _names(part, arguments)]
    if not arguments.programs:
        return known
    # A part's name stands for all of its programs.
    patterns = [f"{p}:*" if p in PARTS else p for p in arguments.programs]
    return [n for n in known if any(n == p or fnmatch.fnmatchcase(n, p) for p in patterns)]


def _names(part: str, arguments: argparse.Namespace) -> list[str]:
    return covering_names(part) if arguments.covering else names(part, arguments.default)


def _outcome(name: str, group: str) -> str:
    try:
        if group != "0":
            return difference(name, group)
        check_sound(reference(RUN, name), name)
    except (AssertionError, ValueError) as error:
        return f"In one process: {error}"
    return ""


def _simulated(name: str, workers: int) -> str | None:
    from tests.enumeration.simulated import simulated_difference

    try:
        return simulated_difference(name, workers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _brief(difference: str) -> str:
    lines = [line for line in difference.splitlines() if line.strip()]
    return "\n".join(lines[-1:] if "Traceback" in difference else lines[:6])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
