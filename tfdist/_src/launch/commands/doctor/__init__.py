"""`tfdist doctor`: checks this host, its settings, and its connections to the workers of a job.

With `--flight`, the command explains a job's flight logs instead. With `--job`, it shows the
current activity of a running job.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tfdist._src.launch.commands.doctor import hardware, software, workers
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.launch.console import OneLineParser, seconds

_INTERVAL = 1.0
# Maps the title of each section to its check, in the order of output. The slowest check is last.
CHECKS: dict[str, Callable[[Context], Section]] = {
    "versions": software.check_versions,
    "host": hardware.check_host,
    "settings": software.check_settings,
    "collectives": software.check_native,
    "TLS": workers.check_tls,
    "metrics": workers.check_metrics,
    "workers": workers.check_workers,
    "GPUs": hardware.check_gpus,
    "devices": hardware.check_devices,
}


def main(arguments: Sequence[str]) -> int:
    """Runs every check and prints the results, or explains flight logs, or queries a running job.

    Args:
        arguments: the command line, without `tfdist doctor`.

    Returns:
        The exit code: 1 if a check has found a problem, otherwise 0. With `--flight` or `--job`,
        the exit code is always 0.

    Raises:
        LaunchError: the folder of `--flight` contains no flight log that can be read.
        TfdistError: the job of `--job` cannot be queried.
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    values = _parse(arguments)
    if values.flight is not None:
        print(workers.report_flight(values.flight, as_json=values.json))
        return 0
    if values.job is not None:
        shown = workers.report_job(
            values.job, interval=values.interval, as_json=values.json, all_ranks=values.all
        )
        print(shown)
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
        "failed or hangs; with --job, shows what a running job is doing.",
        epilog="docs/guide/settings.md lists all environment variables that tfdist reads, "
        "docs/guide/monitoring.md describes flight logs and the reports of running jobs.",
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
    either.add_argument(
        "--job",
        metavar="PID|HOST:PORT",
        help="query a running job instead: pass the ID of a process on this host, a worker or "
        "tfdist run; or the address of rank 0 in TF_CONFIG, which requires the job's secret in "
        "TFDIST_SECRET, or its TLS files",
    )
    parser.add_argument(
        "--interval",
        type=seconds(zero=False),
        default=None,
        metavar="SECONDS",
        help=f"time over which a job is observed (default: {_INTERVAL:g})",
    )
    parser.add_argument("--all", action="store_true", help="show all ranks of a job")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    values = parser.parse_args(list(arguments))
    if values.json and values.flight is None and values.job is None:
        parser.error("--json is for flight logs and jobs: add --flight DIR or --job PID")
    if values.job is None and (values.all or values.interval is not None):
        parser.error("--interval and --all are for running jobs: add --job PID")
    values.interval = values.interval or _INTERVAL
    return values
