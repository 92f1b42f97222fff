"""A worker of the memory benchmark: takes a few steps, and answers with its peak memory."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.step_time.place import take_place
from benchmarks.step_time.serving import serve

STEPS = 3
TINY = 8
MIB = 2**20


def work(
    pipe: Connection, rank: int, addresses: list[str], size: dict[str, int], **order: Any
) -> None:
    """Measures on each request.

    Args:
        pipe: the pipe to the driver.
        rank: the rank of this worker.
        addresses: the addresses of all workers; empty for one process with the layers of one
            worker.
        size: the number of layers, their width, and so on.
        order: further arguments of `train`.
    """
    take_place(rank, addresses)
    while True:
        pipe.recv()
        # A small model first allocates the memory that a process needs once.
        train({**size, "width": TINY}, **order)
        gc.collect()
        before = resident("VmRSS")
        model = train(size, **order)
        peak = resident("VmHWM") - before
        weights = sum(v.value.numpy().nbytes for v in model.trainable_variables)
        slots = sum(v.value.numpy().nbytes for v in model.optimizer.variables)
        pipe.send({"needed_mib": (2 * weights + slots) / MIB, "peak_mib": peak / MIB})


def train(size: dict[str, int], schedule: str, optimizer: str) -> Any:
    """Takes some steps.

    Args:
        size: the number of layers, their width, and so on.
        schedule: the name of a schedule, or `single` for one process without a pipeline.
        optimizer: the name of a Keras optimizer.

    Returns:
        The model. Its variables are those that this process holds.
    """
    import numpy as np
    import tensorflow as tf

    width, layers = size["width"], size["layers"]
    x = np.ones([size["rows"], width], "float32")
    if schedule == "single":
        model = chain(width, layers // size["stages"])
        model.compile(optimizer, "mse", jit_compile=False)
    else:
        import tfdist

        with tfdist.PipelineStrategy(microbatches=size["microbatches"], schedule=schedule).scope():
            model = tfdist.PipelineModel(lambda: chain(width, layers), balance="parameters")
            model.compile(optimizer, "mse")
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    return model


def chain(width: int, layers: int) -> Any:
    """Returns a model of equal layers; almost all of its memory is weights."""
    import keras

    dense = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    return keras.Sequential([keras.Input([width]), *dense])


def resident(name: str) -> int:
    """Returns this process's resident bytes, currently (`VmRSS`) or at the peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib * 2**10


if __name__ == "__main__":
    serve(work)
