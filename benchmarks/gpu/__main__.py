"""Measures the native collectives on GPUs.

    python -m benchmarks.gpu --json=gpu.json
    python -m benchmarks.gpu --gpus=8 --json=gpus.json

Requires NVIDIA's driver, a C++ compiler and NVRTC, but not TensorFlow.

With one GPU, all ranks are streams of one process and share the GPU. So the figures show how fast
kernels read and write memory, and how long they wait for each other, but nothing about links
between GPUs. `GB/s` counts the bytes that are read and written; `ratio` compares it with another
figure of the same rounds, usually a copy on the same GPU. `product` is a kernel limited by fused
multiply-adds, in place of a matrix product. If torch can use the GPU, torch also encodes one bit
per value, for comparison (onebit.py).

With several GPUs of this host, each has its own process and communicator. They run the all-reduces
of a job by tfdist's kernels, by NCCL, and through the host's memory, in turns. The benchmark also
measures copies between each pair of GPUs, NCCL's collectives alone, and a product that runs
concurrently with all-reduces. Times are medians over the rounds, on the slowest rank; bandwidths
are defined as in nccl-tests (bandwidth.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from absl import app, flags

from benchmarks.gpu import alone, several
from benchmarks.gpu.parts import PARTS

FLAGS = flags.FLAGS
flags.DEFINE_string("json", None, "a file to write the figures to")
flags.DEFINE_integer("gpus", 1, "how many GPUs of this host", lower_bound=1, upper_bound=16)
flags.DEFINE_integer("rounds", 15, "how often all is measured", lower_bound=1)
flags.DEFINE_integer("mib", 64, "of one GPU: how large a large tensor is", lower_bound=1)
flags.DEFINE_multi_enum(
    "part",
    list(PARTS),
    list(PARTS),
    "of one GPU, again for each: " + "; ".join(f"{name}: {what}" for name, what in PARTS.items()),
)
flags.DEFINE_list(
    "sizes",
    [str(4096 << shift) for shift in range(0, 17, 2)],
    "of several GPUs: the bytes to reduce",
)


@flags.validator(
    "sizes", "--sizes: whole numbers of bytes, at least 4 for each of 16 GPUs, divisible by 4"
)
def _are_sizes(sizes: list[str]) -> bool:
    return all(size.isdecimal() and int(size) % 4 == 0 and int(size) >= 64 for size in sizes)


def main(_: list[str]) -> None:
    """Measures, prints a table, and writes the figures."""
    if FLAGS.gpus == 1:
        figures = alone.measure(FLAGS.rounds, FLAGS.mib << 20, FLAGS.part)
    else:
        figures = several.measure(FLAGS.gpus, FLAGS.rounds, [int(size) for size in FLAGS.sizes])
    if FLAGS.json:
        Path(FLAGS.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
