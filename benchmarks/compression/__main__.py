"""Compares gradient compression codecs in training between hosts with slow links.

    python -m benchmarks.compression --rate=100mbit,1gbit --codecs=none,int8,onebit --json=FILE

Each host is a network namespace that sends at a limited rate; a bridge connects the namespaces.
This requires root and iproute2. Each host has one worker. The worker has one thread, and a separate
core if there are enough cores.

With every codec, training starts from the same weights, takes the same number of steps, and uses
the same batches. A model can learn the labels, so the losses of two codecs can be compared. In each
round, each codec takes some steps while the processes of the other codecs sleep. If the machine is
busy with other work for a while, all codecs become slower by about the same factor. Therefore,
compare two codecs by the ratio of their times in the same round.

The table has one line for each rate and codec:

  median ms  the time of a step: the median over the rounds
  best ms    the time of a step in the fastest round
  none/step  the time without compression divided by the codec's time in the same round
  wire MB    the megabytes that a worker sends per step, as counted by the core
  encode     the gigabytes of float32 gradients that one CPU core encodes per second
  decode     the gigabytes of float32 gradients that one CPU core decodes per second
  loss       the loss on held-out rows after all steps
  chosen     the codec in use; for `auto`, the codec that `auto` has chosen
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
flags.DEFINE_integer(
    "hosts", 2, "number of hosts; each has one worker", lower_bound=2, upper_bound=200
)
flags.DEFINE_list(
    "rate",
    ["1gbit"],
    "maximum send rates of each host, in the notation of tc: 1gbit; none for no limit",
)
flags.DEFINE_list("codecs", list(USUAL), f"any of {', '.join(KNOWN)}")
flags.DEFINE_enum("model", "mlp", list(TASKS), "the model to train; tiny is for tests")
flags.DEFINE_integer(
    "steps",
    None,
    "steps in a round; by default at least 2, and as many as take a second or two without "
    "compression",
    lower_bound=1,
)
flags.DEFINE_integer(
    "rounds",
    None,
    "rounds; by default 10, or more to reach 60 steps, but at most as many as take half a minute "
    "without compression, and at least 5",
    lower_bound=1,
)
flags.DEFINE_integer(
    "together",
    None,
    "maximum number of codecs with running processes at the same time, including none; by default "
    "as many as fit into memory, at one gigabyte for each process",
    lower_bound=2,
)
flags.DEFINE_float("timeout", 300.0, "seconds to wait for a worker's answer", lower_bound=1)
flags.DEFINE_string("json", None, "file to write the rows to")
flags.DEFINE_string("plot", None, "picture to draw: a .png file; requires matplotlib")


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
    """Measures all codecs, prints a table for each rate, and writes the files.

    Returns:
        The exit code: 1 if nothing could be measured, else 0.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Runs the cleanups.
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
    except RuntimeError as error:  # The network namespaces or the core are not available.
        report(" ".join(str(error).split()))
        return 1
    if FLAGS.plot and can_plot():
        plot(rows, FLAGS.plot)
    return int(all("missing" in row for row in rows))


def measure(rate: str, hosts: Hosts, speeds: dict[str, Speed]) -> list[dict[str, Any]]:
    """Measures all codecs at one rate, and returns a row for each codec.

    Args:
        rate: the value of the flag `--rate`, for the rows.
        hosts: the hosts of the workers.
        speeds: the codecs to measure, and for each codec its encoding speed. The rows have the same
            order.
    """
    ports = itertools.count(FIRST_PORT)
    plans: list[Plan] = []

    def start(codec: str) -> Team:
        return Team(codec, FLAGS.model, hosts, next(ports), FLAGS.timeout)

    def plan(step_seconds: float) -> Plan:
        if not plans:  # All groups of codecs use the plan of the first group.
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
    """Prints a progress message."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        app.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
