"""Measures tfdist's native collectives on GPUs.

    python -m benchmarks.gpu --json=gpu.json
    python -m benchmarks.gpu --gpus=8 --json=gpus.json

The benchmark requires NVIDIA's driver, a C++ compiler and NVRTC. It does not require TensorFlow.

With one GPU, all ranks are streams of one process and share the GPU. So the figures show how fast
the kernels read and write memory, and how long they wait for each other. They show nothing about
links between GPUs. The column `GB/s` counts all bytes that a kernel reads and writes. The column
`ratio` compares this bandwidth to another figure of the same rounds, usually a copy on the same
GPU. The figure `product` is the time of a kernel that stands in for a matrix product: only the
speed of fused multiply-adds limits it. If torch can use the GPU, the benchmark also measures how
fast torch encodes gradients in one bit per value; see onebit.py.

With several GPUs of this host, each GPU has a process with communicators of its own. In each round,
the processes run all-reduces with tfdist's kernels, with NCCL, and through the host's memory. The
benchmark also measures copies between each pair of GPUs, NCCL's collectives without tfdist, and a
product that runs concurrently with all-reduces. Times are those of the slowest rank, as medians
over the rounds. Bandwidths are defined as in nccl-tests; see bandwidth.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import app, flags

from benchmarks.gpu import alone, several
from benchmarks.gpu.parts import PARTS

FLAGS = flags.FLAGS
flags.DEFINE_string("json", None, "file to write the figures to")
flags.DEFINE_integer("gpus", 1, "number of GPUs of this host", lower_bound=1, upper_bound=16)
flags.DEFINE_integer("rounds", 15, "number of measurements of each figure", lower_bound=1)
flags.DEFINE_integer("mib", 64, "for one GPU: size of a large tensor in MiB", lower_bound=1)
flags.DEFINE_multi_enum(
    "part",
    list(PARTS),
    list(PARTS),
    "for one GPU: part to measure; repeat the flag for several parts; "
    + "; ".join(f"{name}: {what}" for name, what in PARTS.items()),
)
flags.DEFINE_list(
    "sizes",
    [str(4096 << shift) for shift in range(0, 17, 2)],
    "for several GPUs: numbers of bytes to reduce",
)


@flags.validator(
    "sizes", "--sizes: whole numbers of bytes, at least 4 for each of 16 GPUs, divisible by 4"
)
def _are_sizes(sizes: list[str]) -> bool:
    return all(size.isdecimal() and int(size) % 4 == 0 and int(size) >= 64 for size in sizes)


def main(_: list[str]) -> None:
    """Measures one or several GPUs, prints a table, and writes the figures."""
    if FLAGS.gpus == 1:
        figures = alone.measure(FLAGS.rounds, FLAGS.mib << 20, FLAGS.part)
    else:
        figures = several.measure(FLAGS.gpus, FLAGS.rounds, [int(size) for size in FLAGS.sizes])
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
