"""`tfdist pipeline`: simulates pipeline schedules, to compare them without training a model."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfdist._src.launch.console import OneLineParser, count, seconds, typed
from tfdist._src.pipeline.plan.schedule import Costs
from tfdist._src.pipeline.schedules import SCHEDULES, make_schedule
from tfdist._src.pipeline.simulation import Timeline, draw, simulate, text
from tfdist.errors import LaunchError


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist pipeline`.

    Returns:
        0.

    Raises:
        LaunchError: the schedule cannot be created or drawn.
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    values = _parse(arguments)
    forward, inputs, weights = values.costs
    costs = Costs(forward, inputs, weights, transfer=values.transfer)
    if values.schedule is None:
        print("\n".join(_table(values.ranks, values.microbatches, values.virtual_stages, costs)))
        return 0
    try:
        schedule = make_schedule(
            values.schedule, values.ranks, values.microbatches, values.virtual_stages, costs
        )
        timeline = simulate(schedule, costs)
        print(text(timeline))
        if values.png is not None:
            draw(timeline, values.png)
    except (ValueError, ImportError, OSError) as error:
        raise LaunchError(str(error)) from error
    return 0


def _table(
    ranks: int, microbatches: int, virtual_stages: int | None, costs: Costs
) -> Iterator[str]:
    yield f"{ranks} ranks, {microbatches} microbatches"
    yield "schedule        stages/rank  seconds  bubble  speed-up  peak activations"
    for name in SCHEDULES:
        timeline = _simulated(name, ranks, microbatches, virtual_stages, costs)
        stages = timeline.schedule.stages // ranks
        kept = max(timeline.peak_activations) / stages
        yield (
            f"{name:<14}  {stages:>11}  {timeline.makespan:>7.4g}  {timeline.bubble:>6.1%}  "
            f"{ranks * (1 - timeline.bubble):>8.2f}  {kept:>16.4g}"
        )
    yield (
        "speed-up: over one process; peak activations: of the fullest rank, in microbatches of "
        "all its stages"
    )


def _simulated(
    name: str, ranks: int, microbatches: int, virtual_stages: int | None, costs: Costs
) -> Timeline:
    try:
        schedule = make_schedule(name, ranks, microbatches, virtual_stages, costs)
    except ValueError:
        # The schedule does not support `virtual_stages`, so use its own number of stages.
        schedule = make_schedule(name, ranks, microbatches, costs=costs)
    return simulate(schedule, costs)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="tfdist pipeline",
        description="Simulates schedules of pipeline parallelism. With --schedule, shows what\n"
        "each rank runs when; without, compares all schedules.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedule", choices=SCHEDULES, metavar="NAME", help=", ".join(SCHEDULES))
    parser.add_argument(
        "--ranks",
        type=count(1),
        required=True,
        metavar="N",
        help="processes in the pipeline, each holding one or more stages",
    )
    parser.add_argument(
        "--microbatches", type=count(1), required=True, metavar="M", help="microbatches per batch"
    )
    parser.add_argument(
        "--virtual-stages",
        type=count(1),
        metavar="V",
        help="stages per rank, for schedules that support any number",
    )
    parser.add_argument(
        "--costs",
        type=typed(_costs),
        default=(1.0, 1.0, 1.0),
        metavar="F,I,W",
        help="seconds per microbatch and rank of the forward pass, the input gradients and the "
        "weight gradients; a full backward pass takes I + W (default: 1,1,1)",
    )
    parser.add_argument(
        "--transfer",
        type=seconds(zero=True),
        default=0.0,
        metavar="SECONDS",
        help="seconds per transfer between two ranks (default: 0)",
    )
    parser.add_argument(
        "--png",
        type=Path,
        metavar="FILE",
        help="also draw the schedule; the extension sets the format; requires matplotlib",
    )
    values = parser.parse_args(list(arguments))
    if values.png is not None and values.schedule is None:
        parser.error("--png requires --schedule")
    return values


def _costs(given: str) -> tuple[float, ...]:
    read = seconds(zero=True)
    try:
        numbers = tuple(read(number) for number in given.split(","))
    except argparse.ArgumentTypeError:
        numbers = ()
    if len(numbers) != 3 or not any(numbers):
        raise ValueError(f"must be three numbers F,I,W, not all 0. Received: {given!r}")
    return numbers


_EPILOG = """\
output: one line per rank, one cell per unit of time; F3 is the forward pass of microbatch 3, B a
full backward pass, I and W its input- and weight-gradient parts; lower-case letters are the rank's
other stages, - is a continued pass, . is idle

examples:
  tfdist pipeline --ranks 4 --microbatches 8
  tfdist pipeline --ranks 4 --microbatches 8 --schedule zbv --png zbv.png
  tfdist pipeline --ranks 4 --microbatches 8 --costs 1,1.1,0.9 --transfer 0.1"""
