"""Measures training with gradient compression between hosts on slow links, codec by codec.

    python -m benchmarks.compression --rate=100mbit,1gbit --codecs=none,int8,onebit --json=FILE

Hosts are network namespaces on one bridge, which takes root and iproute2, and each may send so much
a second. Each has one worker, with a thread and, where there are enough, a core for itself. All
codecs start from the same weights, see the same batches, which can be learnt, and take the same
number of steps. Their processes sleep and take some steps in turns. So a disturbance of the machine
hits all alike, and what counts is the ratio in the same round.

For each rate and codec there are the time of a step (the median of the rounds, and the best one);
the time without compression over this one's in the same round; the megabytes that a worker sends in
a step, as the core counts them; how many gigabytes of float32 a core encodes and decodes in a
second; the loss in the end, on rows that are not trained on; and the codec that was chosen, where
the name leaves it open.
"""

from __future__ import annotations

import itertools
import signal
import sys
from typing import Any

from absl import app, flags

from benchmarks.all_reduce.hosts import Hosts, make_hosts
from benchmarks.all_reduce.plot import INSTALL, can_plot
from benchmarks.compression.codecs import KNOWN, NONE, USUAL, codec_of
from benchmarks.compression.figures import format_table, make_row
from benchmarks.compression.files import has_folder, write_rows
from benchmarks.compression.groups import fitting, make_groups
from benchmarks.compression.plan import Plan, make_plan
from benchmarks.compression.plot import plot
from benchmarks.compression.rates import is_rate, limit_of
from benchmarks.compression.rounds import take_rounds
from benchmarks.compression.speed import Speed, measure_speed
from benchmarks.compression.tasks import TASKS
from benchmarks.compression.team import Team

FIRST_PORT = 2222  # Nobody else is on hosts that were made for the run.

FLAGS = flags.FLAGS
flags.DEFINE_integer("hosts", 2, "hosts, with a worker each", lower_bound=2, upper_bound=200)
flags.DEFINE_list(
    "rate", ["1gbit"], "what each host may send, as tc writes it: 1gbit; none for no limit"
)
flags.DEFINE_list("codecs", list(USUAL), f"any of {', '.join(KNOWN)}")
flags.DEFINE_enum("model", "mlp", list(TASKS), "what is trained; tiny is for tests")
flags.DEFINE_integer(
    "steps",
    None,
    "steps in a round; by default so many that one without compression lasts a second or two, and "
    "2 or more",
    lower_bound=1,
)
flags.DEFINE_integer(
    "rounds",
    None,
    "rounds; by default 10, or more until 60 steps are taken, but no more than half a minute takes "
    "without compression, and 5 or more",
    lower_bound=1,
)
flags.DEFINE_integer(
    "together",
    None,
    "codecs whose processes are alive at once, with none among them each time; by default as many "
    "as there is memory for, at a gigabyte a process",
    lower_bound=2,
)
flags.DEFINE_float("timeout", 300.0, "seconds to wait for a worker's answer", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
flags.DEFINE_string("plot", None, "picture to draw: a .png file; takes matplotlib")


flags.register_validator(
    "codecs", lambda names: names and set(names) <= set(KNOWN), f"any of {', '.join(KNOWN)}"
)
flags.register_validator(
    "rate",
    lambda rates: rates and all(map(is_rate, rates)),
    "each is such as 100mbit or 1gbit, or none for no limit",
)
flags.register_validator("json", has_folder, "its folder does not exist")
flags.register_validator("plot", has_folder, "its folder does not exist")
flags.register_validator(
    "plot", lambda file: file is None or file.endswith(".png"), "a file that ends in .png"
)


def main(_: list[str]) -> int:
    """Measures, prints a table for each rate, and writes rows and picture.

    Returns:
        1 where nothing could be measured.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that everything is cleaned up.
    if FLAGS.plot and not can_plot():
        report(INSTALL)
    codecs = list(dict.fromkeys(FLAGS.codecs))
    rows: list[dict[str, Any]] = []
    try:
        speeds = {codec: measure_speed(codec_of(codec)) for codec in codecs}
        for rate in dict.fromkeys(FLAGS.rate):
            with make_hosts(FLAGS.hosts, limit_of(rate)) as hosts:
                group = measure(rate, hosts, speeds)
            print(format_table(group), end="\n\n", flush=True)
            rows += group
            if FLAGS.json:
                write_rows(rows, FLAGS.json)
    except RuntimeError as error:  # Hosts cannot be made, or the core is not there.
        report(" ".join(str(error).split()))
        return 1
    if FLAGS.plot and can_plot():
        plot(rows, FLAGS.plot)
    return int(all("missing" in row for row in rows))


def measure(rate: str, hosts: Hosts, speeds: dict[str, Speed]) -> list[dict[str, Any]]:
    """Rows of all codecs at one rate, in their order.

    Args:
        rate: what each host may send.
        hosts: where the workers run.
        speeds: by codec.
    """
    ports = itertools.count(FIRST_PORT)
    plans: list[Plan] = []

    def start(codec: str) -> Team:
        return Team(codec, FLAGS.model, hosts, next(ports), FLAGS.timeout)

    def plan(step_seconds: float) -> Plan:
        if not plans:  # Later groups take as many steps.
            plans.append(make_plan(step_seconds, FLAGS.steps, FLAGS.rounds))
        return plans[0]

    rows: dict[str, dict[str, Any]] = {}
    for group in make_groups(list(speeds), FLAGS.together or fitting(hosts.count)):
        courses = take_rounds(start, group, plan, lambda line: report(f"{rate}, {line}"))
        for codec, course in courses.items():
            names = {"codec": codec, "rate": rate, "hosts": hosts.count, "model": FLAGS.model}
            steps = plans[0].steps if plans else 1
            row = make_row(course, courses.get(NONE), steps, speeds[codec], names)
            rows.setdefault(codec, row)
    return [rows[codec] for codec in speeds]


def report(line: str) -> None:
    """Tells how it goes."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
