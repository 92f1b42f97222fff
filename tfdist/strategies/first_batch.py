"""Checks that all workers read the same global batches, by comparing the first of each epoch.

Each worker takes its rows of every batch, so data sharded by hand would silently lose rows. The
check does not run the input pipeline a second time: the first element is duplicated, and the
worker takes one copy before the epoch begins.
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
from tfdist.internals.datasets import dataset_operations
from tfdist.internals.tensorflow import discard_next
from tfdist.strategies.fingerprint import fingerprint, matches, spec_of
from tfdist.strategies.group import Group

# Operations that draw random numbers while data is read. If batches are produced in parallel, the
# order of their draws is not deterministic.
_RANDOM_OPS = ("Random", "Multinomial", "TruncatedNormal", "SampleDistorted", "StatefulUniform")
# Used by Keras to shuffle arrays, in a deterministic order.
_SHUFFLES_IN_ORDER = "RandomShuffle"
_PYTHON = "PyFunc"

_NAMES = ("x", "y", "sample_weight")


class FirstBatch:
    """Compares the first batch of each pass through a dataset among the workers.

    Args:
        group: the workers.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._watches = False
        self._per_worker_hint = True
        # A weak reference, since the iterator's dataset refers to this object.
        self._begun: Callable[[], Any] = lambda: None
        self._seen: list[Any] = []

    @property
    def watches(self) -> bool:
        """Whether there is a dataset of which all workers read the same batches."""
        return self._watches

    def watch(self, dataset: Any, *, per_worker_hint: bool) -> Any:
        """Returns the dataset with its first element duplicated, as `compare` expects.

        Args:
            dataset: yields global batches.
            per_worker_hint: whether an error suggests how to read separate data on each worker.
        """
        self._watches, self._per_worker_hint = True, per_worker_hint
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
        """Compares the first batch of a new iterator; called by all workers.

        Args:
            iterator: over the distributed form of a dataset from `watch`; one that was already
                compared is left unchanged.

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
                raise different_data(
                    self._group, rank, *difference, per_worker_hint=self._per_worker_hint
                )

    def skip(self, iterator: Any) -> None:
        """Leaves out the comparison of a new iterator, which the other workers have begun before.

        Args:
            iterator: as for `compare`.
        """
        if self._watches and iterator is not self._begun():
            self._begun = weakref.ref(iterator)
            discard_next(iterator)


def different_data(
    group: Group, rank: int, chiefs: str, others: str, *, per_worker_hint: bool
) -> ProgramMismatchError:
    """The error for a worker that reads different data than the chief.

    Args:
        group: the workers.
        rank: the worker's rank.
        chiefs: what the chief reads.
        others: what the worker reads.
        per_worker_hint: whether to suggest how to read separate data on each worker.
    """
    workers = group.topology.workers
    return ProgramMismatchError(
        f"The workers read different data: {workers[0]} has {chiefs} where {workers[rank]} has "
        f"{others}. Every worker must read the same global batches, from which tfdist selects its "
        "rows: don't shard the data by hand, use the same batch size on all workers, and shuffle "
        "with a seed, or create the data after the strategy."
        + (_PER_WORKER_HINT if per_worker_hint else "")
    )


_PER_WORKER_HINT = (
    " To read separate batches on each worker, pass a tf.data.Dataset whose options set the "
    "auto_shard_policy to OFF, or use strategy.distribute_datasets_from_function."
)


@contextlib.contextmanager
def first_batch_watched(group: Group) -> Iterator[FirstBatch]:
    """Watches the datasets that are distributed in this thread."""
    _local.watcher = FirstBatch(group)
    try:
        yield _local.watcher
    finally:
        _local.watcher = None


def current_watcher() -> FirstBatch | None:
    """The watcher of datasets distributed in this thread, if any."""
    return getattr(_local, "watcher", None)


_local = threading.local()


def draws_numbers(dataset: Any) -> bool:
    """Whether a dataset's functions draw random numbers, as data augmentation does."""
    operations = dataset_operations(dataset)
    return any(name in op for op in operations for name in _RANDOM_OPS)


def _is_data(leaf: Any) -> bool:
    # Not the optionals that represent None.
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.variant


@dataclass(frozen=True)
class _Leaf:
    """A tensor of an element.

    Attributes:
        name: the name of its part of the batch.
        same_rows: whether it has the same number of rows on all workers.
        same_values: whether it is identical on all workers.
    """

    name: str
    same_rows: bool
    same_values: bool

    def seen(self, values: np.ndarray) -> list[Any]:
        """Its name, spec and fingerprint, as far as they are the same on all workers."""
        if self.same_values:
            return [self.name, spec_of(values), fingerprint(values)]
        return [self.name, f"{len(values)} rows" if self.same_rows else "", []]


def _leaves(dataset: Any) -> list[_Leaf]:
    """The tensors of an element, and which of their properties are the same on all workers.

    If inputs are randomly augmented, the targets are still the same. With TensorFlow's random
    operations, floating-point targets may have been mixed as well, but not integers.
    """
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    operations = dataset_operations(dataset) - {_SHUFFLES_IN_ORDER}
    draws = any(name in op for op in operations for name in _RANDOM_OPS)
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
    for (name, spec, values), (_, other_spec, other_values) in zip(chiefs, others, strict=True):
        if spec != other_spec:
            return f"{name} of {spec} in the first batch", f"{name} of {other_spec}"
        if not matches(values, other_values):
            return f"{name} of {spec} in the first batch", "other values"
    return None


def _described(batch: list[Any]) -> str:
    specs = ", ".join(f"{name} of {spec}" for name, spec, _ in batch)
    return f"a first batch of {specs}" if batch else "no batch"
