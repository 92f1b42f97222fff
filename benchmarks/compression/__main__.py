"""Measures training with gradient compression between hosts on slow links, for each codec.

    python -m benchmarks.compression --rate=100mbit,1gbit --codecs=none,int8,onebit --json=FILE

Hosts are network namespaces that a bridge connects, which requires root and iproute2. Each host
sends at a limited rate, and has one worker with one thread and, if there are enough cores, its own
core. All codecs start from the same weights, train on the same batches with learnable labels, and
take the same number of steps. Their processes take some steps in turns, and sleep in between. So a
disturbance of the machine affects all codecs alike, and the meaningful figure is the ratio within
the same round.

The table shows for each rate and codec the time of a step (the median of the rounds, and the best
round); the time without compression divided by the codec's time in the same round; the megabytes
that a worker sends per step, as counted by the core; the gigabytes of float32 that one processor
core encodes and decodes per second; the final loss on rows that are not trained on; and the chosen
codec, if the codec is chosen by measurement.
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

FIRST_PORT = 2222  # All ports of new network namespaces are free.

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
        1 if nothing could be measured, else 0.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # With all cleanups.
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
    except RuntimeError as error:  # Hosts cannot be created, or the core is missing.
        report(" ".join(str(error).split()))
        return 1
    if FLAGS.plot and can_plot():
        plot(rows, FLAGS.plot)
    return int(all("missing" in row for row in rows))


def measure(rate: str, hosts: Hosts, speeds: dict[str, Speed]) -> list[dict[str, Any]]:
    """Returns the rows of all codecs at one rate, in the codecs' order.

    Args:
        rate: the rate at which each host may send.
        hosts: the hosts of the workers.
        speeds: the encoding speeds by codec.
    """
    ports = itertools.count(FIRST_PORT)
    plans: list[Plan] = []

    def start(codec: str) -> Team:
        return Team(codec, FLAGS.model, hosts, next(ports), FLAGS.timeout)

    def plan(step_seconds: float) -> Plan:
        if not plans:  # Later groups use the same plan.
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
    """Prints a line about the progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
