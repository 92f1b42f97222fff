"""One process of the measurement of memory: trains a few steps and prints its peak, as JSON.

python -m piping.peak '{"schedule": "1f1b", "microbatches": 4, "layers": 32, ...}'

The schedule `single` trains the whole model in this process, which then has the layers of one
worker alone.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

STEPS = 3
MIB = 2**20


def main(order: dict[str, Any]) -> None:
    """Trains a small model first, so that what a process needs once is there already."""
    train(order, {**order, "layers": 4 * order["stages"], "width": 8})
    gc.collect()
    before = resident("VmRSS")
    model = train(order, order)
    peak = resident("VmHWM") - before
    weights = sum(np.asarray(v).nbytes for v in model.trainable_variables)
    slots = sum(np.asarray(v).nbytes for v in model.optimizer.variables)
    print(json.dumps({"needed_mib": (2 * weights + slots) / MIB, "peak_mib": peak / 2**10}))


def train(order: dict[str, Any], size: dict[str, Any]) -> Any:
    """Takes some steps with a model; the values of those it returns are this process's alone."""
    rows, width, layers = size["rows"], size["width"], size["layers"]
    x = np.ones([rows, width], "float32")
    if order["schedule"] == "single":
        model = chain(width, layers // order["stages"])
        model.compile(size["optimizer"], "mse", jit_compile=False)
    else:
        import tfdist

        strategy = tfdist.PipelineStrategy(order["microbatches"], order["schedule"])
        with strategy.scope():
            model = tfdist.PipelineModel(lambda: chain(width, layers), by="parameters")
            model.compile(size["optimizer"], "mse")
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    return model


def chain(width: int, layers: int) -> keras.Model:
    """Equal layers, which are nearly all weights."""
    dense = [keras.layers.Dense(width, use_bias=False) for _ in range(layers)]
    return keras.Sequential([keras.Input([width]), *dense])


def resident(name: str) -> int:
    """KiB of this process in memory, now (`VmRSS`) or at most so far (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
