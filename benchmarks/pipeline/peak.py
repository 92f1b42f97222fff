"""The program of a worker of `pipeline_memory`: takes a few steps, and sends its peak memory."""

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
    """Trains on each request of the driver, and sends the needed memory and the peak.

    Args:
        pipe: the pipe to the driver.
        rank: the rank of this worker.
        addresses: the addresses of all workers; empty for training in one process.
        size: the argument `size` of `train`.
        order: the other arguments of `train`.
    """
    take_place(rank, addresses)
    while True:
        pipe.recv()
        # Training a small model first allocates the memory that a process needs for any model.
        train({**size, "width": TINY}, **order)
        gc.collect()
        before = resident("VmRSS")
        model = train(size, **order)
        peak = resident("VmHWM") - before
        weights = sum(v.value.numpy().nbytes for v in model.trainable_variables)
        slots = sum(v.value.numpy().nbytes for v in model.optimizer.variables)
        pipe.send({"needed_mib": (2 * weights + slots) / MIB, "peak_mib": peak / MIB})


def train(size: dict[str, int], schedule: str, optimizer: str) -> Any:
    """Creates a model, and takes some steps.

    Args:
        size: the values of the flags `stages`, `layers`, `width`, `rows` and `microbatches`.
        schedule: the name of a schedule, or `single` for training in one process.
        optimizer: the name of a Keras optimizer.

    Returns:
        The model. In a pipeline, it contains only the variables of this worker's stages.
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
    """Returns a model that is a chain of dense layers with equal sizes and without biases."""
    import keras

    dense = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    return keras.Sequential([keras.Input([width]), *dense])


def resident(name: str) -> int:
    """Returns the size of this process's resident memory in bytes.

    Args:
        name: `VmRSS` for the current size, or `VmHWM` for the maximum size so far.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    return kib * 2**10


if __name__ == "__main__":
    serve(work)
