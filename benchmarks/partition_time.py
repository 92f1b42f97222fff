"""Measures the time to trace, analyze and partition the graph of a training step.

    python -m benchmarks.partition_time --blocks=9

tfdist does this each time that it traces a training step. The benchmark runs in one process. It
traces Keras's `train_step` of a GPT with Adam, analyzes the graph, and then partitions the graph
for a worker that does not communicate. Each round repeats these three phases. The table shows the
CPU time of each phase in the fastest round, and this time per 10,000 operations of the graph.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers

from tfdist._src.global_view.analysis import Analysis
from tfdist._src.global_view.decision import Value, dims_of
from tfdist._src.global_view.layout import WHOLE, ZEROED_SUM, Dim, Symbol, rows
from tfdist._src.global_view.partition import Partition, RowShare, WorkerEmitter
from tfdist._src.internals.graphs import trace_into_graph

_BLOCKS = flags.DEFINE_integer("blocks", 9, "blocks of the transformer", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "number of measurements of each phase", lower_bound=1)

_WIDTH, _TIMES, _CLASSES = 16, 8, 32
_BATCH = tuple([tf.TensorSpec([None, _TIMES], tf.int32)] * 2)


class Silent:
    """Replaces the communication of a worker: each collective returns the worker's own values."""

    scatters = True

    def scatter(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the worker's own values. A real worker returns a part of the sums."""
        return [tf.identity(tensor) for tensor in tensors]

    def reduce(self, tensors: Sequence[Any], reductions: Sequence[str]) -> list[Any]:
        """Returns the worker's own values. A real worker returns the reduced values."""
        return [tf.identity(tensor) for tensor in tensors]

    def gather(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the worker's own rows. A real worker returns the rows of all workers."""
        return [tf.identity(tensor) for tensor in tensors]

    def awaits_rows(self, values: Sequence[tf.Tensor]) -> None:
        """Does nothing."""

    def begin(self) -> None:
        """Does nothing."""


def transformer(blocks: int) -> keras.Model:
    """Returns a causal transformer with small tensors, because their sizes do not matter here."""
    tokens = keras.Input([_TIMES], dtype="int32")
    x = layers.Embedding(_CLASSES, _WIDTH)(tokens)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(2, 8)(y, y, use_causal_mask=True)
        y = layers.Dense(4 * _WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(_WIDTH)(y)
    model = keras.Model(tokens, layers.Dense(_CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=True)
    return model


def trace(model: keras.Model) -> Any:
    """Traces a training step for a batch of any size, and returns the graph."""

    def step(*given: Any) -> list[Any]:
        return [tf.convert_to_tensor(v) for v in tf.nest.flatten(model.train_step(given))]

    return trace_into_graph("step", step, _BATCH)


def analyze(model: keras.Model, graph: Any) -> Analysis:
    """Determines the layout of each value in the graph of a training step."""
    batch = Symbol()
    held = {id(v.value.handle) for m in model.metrics for v in m.variables}
    values = [Value(rows(), (Dim(1, (batch,)), Dim(_TIMES)))] * len(_BATCH)
    values += [
        Value(ZEROED_SUM if id(outer) in held else WHOLE, dims_of(inner))
        for outer, inner in graph.captures
    ]
    return Analysis(graph, values, batch)


def partition(analysis: Analysis) -> None:
    """Adds the part of one worker to a new graph."""
    graph = analysis.graph
    outer = [value for value, _ in graph.captures]

    def part(*given: Any) -> list[Any]:
        share = RowShare(
            rows=tf.shape(given[0])[0],
            total=tf.constant(2),
            first=tf.constant(0),
            has_rows=tf.constant(True),
            has_first_row=tf.constant(True),
            is_first=tf.constant(True),
        )
        added = Partition(analysis, WorkerEmitter(share, Silent()))
        return added.add([*given, *outer], [WHOLE] * len(graph.outputs))

    trace_into_graph("part", part, _BATCH)


def _seconds(function: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    function()
    return time.process_time() - start


def main(_: Sequence[str]) -> None:
    """Measures the three phases, and prints their times."""
    model = transformer(_BLOCKS.value)
    model.train_on_batch(*[np.zeros([2, _TIMES], "int32")] * 2)  # Creates all variables.
    graph = trace(model)
    analysis = analyze(model, graph)
    count = len(analysis.operations)
    phases = {
        "trace": lambda: trace(model),
        "analyze": lambda: analyze(model, graph),
        "partition": lambda: partition(analysis),
    }
    found: dict[str, list[float]] = {name: [] for name in phases}
    for _ in range(_ROUNDS.value):
        for name, run in phases.items():
            found[name].append(_seconds(run))
    print(f"{_BLOCKS.value} blocks, {count} operations")
    for name, times in found.items():
        seconds = min(times)
        print(f"{name:10} {seconds:6.2f} s {seconds / count * 1e4:6.2f} s for 10,000 operations")


if __name__ == "__main__":
    app.run(main)
