"""Checks that all workers read the same global batches, by the first one of each epoch.

Each worker takes its rows of every batch, so data that a user has sharded by hand would lose rows
without a word. The batch is looked at on its way through the input pipeline, which runs once: its
first element is made twice, and the worker takes one of them before the epoch begins.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.errors import ProgramMismatchError
from tfdist.internals.tensorflow import dataset_operations, discard_next
from tfdist.strategies.fingerprint import alike, fingerprint, form_of
from tfdist.strategies.group import Group

# What draws random numbers while the data is read. Where batches are made in parallel, it is
# chance which of them gets which numbers.
_DRAWING = ("Random", "Multinomial", "TruncatedNormal", "SampleDistorted", "StatefulUniform")
# Keras shuffles arrays by it, in order.
_SHUFFLES_IN_ORDER = "RandomShuffle"
_PYTHON = "PyFunc"

_NAMES = ("x", "y", "sample_weight")


class FirstBatch:
    """The first batch of each pass through a dataset, compared among the workers.

    Args:
        group: the workers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._watches = False
        self._own_data = True
        # Not the iterator itself, whose dataset holds this one.
        self._begun: Callable[[], Any] = lambda: None
        self._seen: list[Any] = []

    def watch(self, dataset: Any, *, own_data: bool) -> Any:
        """The dataset, whose first element comes twice, as `compare` expects.

        Args:
            dataset: of global batches.
            own_data: whether the workers may be told to read data of their own.
        """
        self._watches, self._own_data = True, own_data
        leaves = _leaves(dataset)

        def note(*values: np.ndarray) -> np.int64:
            self._seen = [leaf.seen(v) for leaf, v in zip(leaves, values, strict=True)]
            return np.int64(2)

        def copies(number: tf.Tensor, element: Any) -> tf.data.Dataset:
            values = [v for v in tf.nest.flatten(element, expand_composites=True) if _is_data(v)]
            count = tf.cond(
                tf.equal(number, 0),
                lambda: tf.ensure_shape(tf.numpy_function(note, values, tf.int64), []),
                lambda: tf.constant(1, tf.int64),
            )
            return tf.data.Dataset.from_tensors(element).repeat(count)

        return dataset.enumerate().flat_map(tf.autograph.experimental.do_not_convert(copies))

    def compare(self, iterator: Any) -> None:
        """Compares the first batch of an iterator that has not been used yet; all call it.

        Args:
            iterator: over the distributed form of what `watch` has given; one that has begun is
                left as it is.

        Raises:
            ProgramMismatchError: the workers read different data.
        """
        if not self._watches or iterator is self._begun():
            return
        self._begun, self._seen = weakref.ref(iterator), []
        discard_next(iterator)
        batches = [
            json.loads(t) for t in self._group.exchange("first batch", json.dumps(self._seen))
        ]
        for rank, batch in enumerate(batches):
            difference = _difference(batches[0], batch)
            if difference:
                raise different_data(self._group, rank, *difference, own_data=self._own_data)


def different_data(
    group: Group, rank: int, chiefs: str, others: str, *, own_data: bool
) -> ProgramMismatchError:
    """What to raise where a worker reads other data than the chief.

    Args:
        group: the workers.
        rank: of the worker.
        chiefs: what the chief reads.
        others: what the worker reads.
        own_data: whether the workers may be told to read data of their own.
    """
    workers = group.topology.workers
    return ProgramMismatchError(
        f"The workers read different data: {workers[0]} has {chiefs} where {workers[rank]} has "
        f"{others}. Every worker must read the same global batches, of which tfdist gives it its "
        "rows: don't shard the data by hand, give all workers the same batch size, and shuffle "
        "with a seed, or make the data after the strategy." + (_OWN_DATA if own_data else "")
    )


_OWN_DATA = (
    " Where each worker is to read batches of its own, pass a tf.data.Dataset whose options set "
    "the auto_shard_policy to OFF, or use strategy.distribute_datasets_from_function."
)


@contextlib.contextmanager
def first_batch_watched(group: Group) -> Iterator[FirstBatch]:
    """While it lasts, datasets that are distributed in this thread are watched."""
    _local.watching = FirstBatch(group)
    try:
        yield _local.watching
    finally:
        _local.watching = None


def watching() -> FirstBatch | None:
    """What watches over the datasets that are distributed in this thread, if anything."""
    return getattr(_local, "watching", None)


_local = threading.local()


def _is_data(leaf: Any) -> bool:
    # Not the optionals that stand for None.
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.variant


@dataclass(frozen=True)
class _Leaf:
    """A tensor of an element.

    Attributes:
        name: of the part of the batch that it belongs to.
        same_rows: whether there are as many rows of it on all workers.
        same_values: whether it is the same altogether.
    """

    name: str
    same_rows: bool
    same_values: bool

    def seen(self, values: np.ndarray) -> list[Any]:
        """Its name, its form and its fingerprint, as far as these are the same on all workers."""
        if self.same_values:
            return [self.name, form_of(values), fingerprint(values)]
        return [self.name, f"{len(values)} rows" if self.same_rows else "", []]


def _leaves(dataset: Any) -> list[_Leaf]:
    """The tensors of an element, and what of them is the same on all workers.

    Where inputs are augmented at random, the targets are the same still. Where TensorFlow draws
    the numbers, they may have been mixed too, but not if they are integers.
    """
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    operations = dataset_operations(dataset) - {_SHUFFLES_IN_ORDER}
    draws = any(name in op for op in operations for name in _DRAWING)
    by_python = any(_PYTHON in op for op in operations)
    leaves = []
    for i, part in enumerate(parts):
        name = _NAMES[i] if i < len(_NAMES) else f"component {i}"
        for component in tf.nest.flatten(part):
            for leaf in filter(_is_data, tf.nest.flatten(component, expand_composites=True)):
                same = True
                if draws:
                    same = i == 1 and not leaf.dtype.is_floating
                elif by_python:
                    same = i == 1 or len(parts) == 1
                leaves.append(_Leaf(name, same or component is leaf, same))
    return leaves


def _difference(chiefs: list[Any], others: list[Any]) -> tuple[str, str] | None:
    if len(chiefs) != len(others):
        return _described(chiefs), _described(others)
    for (name, form, values), (_, other_form, other_values) in zip(chiefs, others, strict=True):
        if form != other_form:
            return f"{name} of {form} in the first batch", f"{name} of {other_form}"
        if not alike(values, other_values):
            return f"{name} of {form} in the first batch", "other values"
    return None


def _described(batch: list[Any]) -> str:
    forms = ", ".join(f"{name} of {form}" for name, form, _ in batch)
    return f"a first batch of {forms}" if batch else "no batch"
