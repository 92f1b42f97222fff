"""Compares the first batch of each epoch, to check that all workers read the same batches.

If workers join in the middle of an epoch, their next batch is compared as well.

Each worker takes its rows of every batch. If the user has already sharded the data by hand, rows
would silently be lost without this check. The check does not run the input pipeline a second time.
Instead, the first element of the dataset is duplicated, and the check takes one of the two copies
before the epoch begins.
"""

import contextlib
import json
import math
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.data.division import Division, Report
from tfdist._src.data.shares import Replay, components_apart, with_rows
from tfdist._src.group import Group
from tfdist._src.internals.datasets import dataset_operations
from tfdist._src.internals.tensorflow import discard_next, take_next
from tfdist._src.log import logger
from tfdist.errors import ProgramMismatchError, UnsupportedError

# If an array has more bytes, only a sample of its rows is compared.
_COMPARED_BYTES = 2**20

# The relative difference that is allowed between floats, which may be computed on different kinds
# of CPUs.
_TOLERANCE = 1e-5


def spec_of(values: np.ndarray) -> str:
    """Describes the type and shape of an array as text."""
    name = "string" if values.dtype.hasobject else values.dtype.name
    return f"{name}{list(values.shape)}"


def checksum(values: np.ndarray, before: int = 0) -> int:
    """Computes a checksum of the exact bits of an array.

    Args:
        values: the array.
        before: the checksum of preceding data, which is continued.
    """
    values = _some(values)
    # Arrays of strings have the dtype object, so their bytes would be pointers.
    words = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
    return zlib.crc32(words, before)


def fingerprint(values: np.ndarray) -> list[float]:
    """Summarizes an array as numbers that `matches` can compare and JSON can represent."""
    if values.dtype.kind not in "fV":  # The kind V is bfloat16 and float8.
        return [checksum(values)]
    flat = _some(values).reshape(-1).astype(np.float64)
    places = np.arange(1, flat.size + 1)
    with np.errstate(all="ignore"):  # Non-finite values are allowed here.
        # The first two numbers are sums with a different weight for each position. The last number
        # is the scale of their rounding errors.
        sums = [float(flat @ np.sin(step * places)) for step in (1, 2)]
        return [*sums, float(np.abs(flat).sum())]


def matches(one: list[float], other: list[float]) -> bool:
    """Whether two fingerprints belong to equal arrays, or to floats that differ by rounding."""
    if len(one) < 2 or len(other) < 2:
        return one == other
    bound = _TOLERANCE * max(one[-1], other[-1])
    pairs = zip(one, other, strict=True)
    return all(a == b or abs(a - b) <= bound or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def _some(values: np.ndarray) -> np.ndarray:
    return values[:: values.nbytes // _COMPARED_BYTES + 1] if values.ndim else values


# Operations that draw random numbers while data is read. If batches are produced in parallel, the
# order in which they draw is not deterministic.
_RANDOM_OPS = ("Random", "Multinomial", "TruncatedNormal", "SampleDistorted", "StatefulUniform")
# Keras shuffles arrays with this operation. The resulting order is deterministic.
_SHUFFLES_IN_ORDER = "RandomShuffle"
_PYTHON = "PyFunc"

_NAMES = ("x", "y", "sample_weight")


def draws_numbers(dataset: Any) -> bool:
    """Whether a dataset's functions draw random numbers, for example for data augmentation."""
    operations = dataset_operations(dataset)
    return any(name in op for op in operations for name in _RANDOM_OPS)


def values_of(element: Any) -> list[Any]:
    """Returns the tensors of an element that can be compared, in the order of `leaves_of`."""
    return [v for v in tf.nest.flatten(element, expand_composites=True) if _is_data(v)]


def _is_data(leaf: Any) -> bool:
    # Optionals that represent None are excluded.
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.variant


@dataclass(frozen=True)
class Leaf:
    """A tensor of a dataset element.

    Attributes:
        name: the name of the part of the batch that contains the tensor, such as "x".
        same_rows: whether the tensor must have the same number of rows on all workers.
        same_values: whether the tensor must be identical on all workers.
        component: the index of the batch component that contains the tensor.
        is_dense: whether the first dimension of the tensor is the rows. False for the parts of
            ragged and sparse tensors.
    """

    name: str
    same_rows: bool
    same_values: bool
    component: int = 0
    is_dense: bool = True

    def seen(self, values: np.ndarray) -> list[Any]:
        """Returns the tensor's name, and the properties that must be equal on all workers.

        Args:
            values: the tensor's values.
        """
        if self.same_values:
            return [self.name, spec_of(values), fingerprint(values)]
        return [self.name, f"{len(values)} rows" if self.same_rows else "", []]


def leaves_of(dataset: Any) -> list[Leaf]:
    """Returns the tensors of a dataset's elements, and which of their properties are compared.

    All values are compared if the dataset uses neither Python functions nor random operations.
    Otherwise, random augmentation may have changed the values. It usually changes the inputs only,
    so the targets are still compared. With TensorFlow's random operations, floating-point targets
    may have been mixed, as in MixUp, so only targets of other types are compared.
    """
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    operations = dataset_operations(dataset) - {_SHUFFLES_IN_ORDER}
    draws = any(name in op for op in operations for name in _RANDOM_OPS)
    by_python = any(_PYTHON in op for op in operations)
    leaves = []
    number = -1
    for i, part in enumerate(parts):
        name = _NAMES[i] if i < len(_NAMES) else f"component {i}"
        for component in tf.nest.flatten(part):
            number += 1
            for leaf in filter(_is_data, tf.nest.flatten(component, expand_composites=True)):
                same = True
                if draws:
                    same = i == 1 and not leaf.dtype.is_floating
                elif by_python:
                    same = i == 1 or len(parts) == 1
                is_dense = component is leaf
                leaves.append(Leaf(name, same or is_dense, same, number, is_dense))
    return leaves


def difference(chiefs: list[Any], others: list[Any], which: str) -> tuple[str, str] | None:
    """Describes the first difference between two workers' batches; None if they match.

    Args:
        chiefs: the results of `Leaf.seen` on the chief, one for each leaf.
        others: the same results on another worker.
        which: which batch is compared, such as "first".
    """
    if len(chiefs) != len(others):
        return _described(chiefs, which), _described(others, which)
    for (name, spec, values), (_, other_spec, other_values) in zip(chiefs, others, strict=True):
        if spec != other_spec:
            return f"{name} of {spec} in the {which} batch", f"{name} of {other_spec}"
        if not matches(values, other_values):
            return f"{name} of {spec} in the {which} batch", "other values"
    return None


def _described(batch: list[Any], which: str) -> str:
    specs = ", ".join(f"{name} of {spec}" for name, spec, _ in batch)
    return f"a {which} batch of {specs}" if batch else "no batch"


class FirstBatch:
    """Compares the first batch of each pass through a dataset among the workers.

    Args:
        group: the workers.
        tells_rows: whether to combine each batch with its number of rows; see `WithRows`.

    Attributes:
        whole: the indices of the components that have another number of rows than the batch; see
            `BatchForm`.
    """

    def __init__(self, group: Group, *, tells_rows: bool = False) -> None:
        self._group, self._tells_rows = group, tells_rows
        self._watches = False
        self._per_worker_hint = True
        # The iterator is held by a weak reference, because its dataset refers to this object.
        self._begun: Callable[[], Any] = lambda: None
        self._leaves: list[Leaf] = []
        self._seen: list[Any] = []
        self._rows: dict[int, tuple[str, int, int]] = {}
        self._division: Division | None = None
        self._told_whole = False
        self.whole: tuple[int, ...] = ()

    @property
    def watches(self) -> bool:
        """Whether `watch` has been called, so that all workers must read the same batches."""
        return self._watches

    def watch(self, dataset: Any, replicas: int | None, *, per_worker_hint: bool) -> Any:
        """Returns the dataset with its first element duplicated, as `compare` expects.

        Args:
            dataset: a dataset of global batches.
            replicas: the number of replicas; None if it may change.
            per_worker_hint: whether an error message suggests how to read separate data on each
                worker.
        """
        self._watches, self._per_worker_hint = True, per_worker_hint
        self._leaves = leaves_of(dataset)

        def note(*values: np.ndarray) -> np.int64:
            self._see(values)
            return np.int64(2)

        def copies(number: tf.Tensor, element: Any) -> tf.data.Dataset:
            values = values_of(element)
            count = tf.cond(
                tf.equal(number, 0),
                lambda: tf.ensure_shape(tf.numpy_function(note, values, tf.int64), []),
                lambda: tf.constant(1, tf.int64),
            )
            if replicas is not None and self._tells_rows:
                element = with_rows(element, replicas)
            return tf.data.Dataset.from_tensors(element).repeat(count)

        return dataset.enumerate().flat_map(tf.autograph.experimental.do_not_convert(copies))

    def watch_divided(
        self, dataset: Any, division: Division, replicas: int | None, *, per_worker_hint: bool
    ) -> bool:
        """Prepares to compare the batches of a dataset whose preprocessing is divided.

        The divided dataset must yield its first batch twice.

        Args:
            dataset: a dataset of global batches.
            division: the division of the dataset.
            replicas: as for `watch`.
            per_worker_hint: as for `watch`.

        Returns:
            Whether each batch must be combined with its number of rows.
        """
        self._watches, self._per_worker_hint = True, per_worker_hint
        self._leaves, self._division = leaves_of(dataset), division
        self._leaves = [  # The workers draw different numbers.
            replace(leaf, same_values=False) if leaf.component in division.drawn else leaf
            for leaf in self._leaves
        ]
        return replicas is not None and self._tells_rows

    def compare(self, iterator: Any, *, is_new: bool = False) -> None:
        """Compares the first batch of a new iterator. All workers must call this method.

        Args:
            iterator: an iterator over a dataset that `watch` has returned and that was then
                distributed. If its first batch has already been compared, nothing happens.
            is_new: whether this worker joined while the other workers were training. If its batch
                differs, only this worker fails.

        Raises:
            ProgramMismatchError: the workers read different data.
        """
        if not self._watches or iterator is self._begun():
            return
        self._begun, self._seen, self._rows = weakref.ref(iterator), [], {}
        discard_next(iterator)
        if self._division is not None:
            self._see_first_of(self._division)
        self._compare("first", is_new=is_new)

    def compare_next(self, iterator: Any, replay: Replay, *, is_new: bool) -> None:
        """Compares the next batch after workers have joined. All workers must call this method.

        Args:
            iterator: as for `compare`, but at any position; None if this worker has no batch left.
            replay: the `Replay` that controls the dataset.
            is_new: whether this worker has just joined.

        Raises:
            ProgramMismatchError: as for `compare`.
        """
        self._seen, self._rows = [], {}
        if self._watches and iterator is not None and replay.has_whole:
            parts = [values_of(part) for part in replay.show_next(lambda: take_next(iterator))]
            if parts:
                self._see([_joined(values) for values in zip(*parts, strict=True)])
        self._compare("next", is_new=is_new)

    def _see_first_of(self, division: Division) -> None:
        # A dataset without batches has no first batch.
        with contextlib.suppress(tf.errors.FailedPreconditionError):
            self._see([part.numpy() for part in division.take_first_batch()])

    def _see(self, values: Sequence[np.ndarray]) -> None:
        pairs = list(zip(self._leaves, values, strict=True))
        self._seen = [leaf.seen(v) for leaf, v in pairs]
        self._rows = {
            leaf.component: (leaf.name, len(v), v.nbytes)
            for leaf, v in pairs
            if leaf.is_dense and np.ndim(v)
        }

    def _compare(self, which: str, *, is_new: bool) -> None:
        """Compares the last batch seen on this worker, and on all workers that are not new.

        The reference is the batch of the first worker that is not new.
        """
        report = None if self._division is None else self._division.report()
        is_whole = report is not None and report.is_whole
        texts = self._group.exchange(f"{which} batch", json.dumps([self._seen, is_new, is_whole]))
        batches, new, whole = zip(*map(json.loads, texts), strict=True)
        there = [rank for rank, came in enumerate(new) if not came] or list(range(len(new)))
        for rank in [*there, self._group.topology.rank]:
            found = difference(batches[there[0]], batches[rank], which)
            if found:
                raise different_data(
                    self._group,
                    rank,
                    *found,
                    reference=there[0],
                    per_worker_hint=self._per_worker_hint and not is_new,
                    is_new=is_new,
                )
        if report is not None and any(whole):
            self._process_whole(report)
        if self._rows:
            sizes = {number: (rows, size) for number, (_, rows, size) in self._rows.items()}
            self.whole = components_apart(sizes)

    def _process_whole(self, report: Report) -> None:
        """Makes this worker preprocess all rows, because a worker's own rows had other values.

        Raises:
            UnsupportedError: a Python function has the other values. It has been called for
                different rows on each worker, so its state would differ from now on.
        """
        assert self._division is not None
        named = _differing(self._leaves, report.differing)
        if self._division.calls_python:
            raise UnsupportedError(
                "A Python function in a `map` of the dataset gives other results if it processes "
                f"only some rows of a batch{named}, so the preprocessing cannot be divided among "
                'the workers. Pass input_division="auto" or "never" to the strategy.'
            )
        self._division.process_whole()
        if self._group.topology.is_chief and not self._told_whole:
            logger.warning(
                "A `map` of the dataset gives other results if it processes only some rows of a "
                f"batch{named}, so each worker preprocesses all rows from now on. To avoid the "
                'comparison, pass input_division="never" to the strategy.'
            )
        self._told_whole = True

    def refuse_unlike_rows(self) -> None:
        """Rejects batches with different row counts, such as the nodes and edges of a graph.

        Raises:
            UnsupportedError: the components of the last compared batch have different numbers of
                rows.
        """
        if self.whole:
            found = ", ".join(f"{name} of {rows} rows" for name, rows, _ in self._rows.values())
            raise UnsupportedError(
                'All components of a batch for Elastic(batch="per_worker") must have the same '
                f"number of rows. Received: a batch of {found}. Pad them, or use "
                'Elastic(batch="global").'
            )

    def skip(self, iterator: Any) -> None:
        """Skips the comparison for a new iterator, because the other workers have already done it.

        Args:
            iterator: as for `compare`.
        """
        if self._watches and iterator is not self._begun():
            self._begun = weakref.ref(iterator)
            discard_next(iterator)
            if self._division is not None:
                self._see_first_of(self._division)


def _differing(leaves: Sequence[Leaf], component: int) -> str:
    name = next((leaf.name for leaf in leaves if leaf.component == component), "")
    return f" (the values of {name} differ)" if name else ""


def different_data(
    group: Group,
    rank: int,
    chiefs: str,
    others: str,
    *,
    reference: int = 0,
    per_worker_hint: bool,
    is_new: bool = False,
) -> ProgramMismatchError:
    """Returns the error for a worker that reads different data than the chief.

    Args:
        group: the workers.
        rank: the rank of the worker with different data.
        chiefs: a description of the chief's data.
        others: a description of the other worker's data.
        reference: the rank of the worker with the data of `chiefs`; by default, the chief.
        per_worker_hint: whether to suggest how to read separate data on each worker.
        is_new: whether the worker with different data joined while the others were training.
    """
    chief, other = (group.topology.workers[one] for one in (reference, rank))
    return ProgramMismatchError(
        f"The workers read different data: {chief} has {chiefs} where {other} has "
        f"{others}. Every worker must read the same global batches, from which tfdist selects its "
        "rows: don't shard the data by hand, use the same batch size on all workers, and shuffle "
        "with a seed, or create the data after the strategy."
        + (_PER_WORKER_HINT if per_worker_hint else "")
        + (_NEW_HINT if is_new else "")
    )


def unlike_rows(group: Group, own: int, whole: int = 0) -> ProgramMismatchError:
    """Returns the error for a step in which the workers have shares of different batches.

    All workers must call this function.

    Args:
        group: the workers.
        own: the number of rows that this worker has in the batches of the step.
        whole: the number of rows of the whole batch; 0 if unknown.
    """
    texts = group.exchange("rows of a step", json.dumps([own, whole]))
    shares, batches = zip(*map(json.loads, texts), strict=True)
    known = len(set(batches)) > 1
    rows = batches if known else shares
    rank = max(range(1, len(rows)), key=lambda one: abs(rows[one] - rows[0]))
    chiefs, others = f"{rows[0]} rows of the last batch", f"{rows[rank]}"
    if known:
        chiefs, others = (
            f"a batch of {count} rows" if count else "no batch" for count in (rows[0], rows[rank])
        )
    return different_data(group, rank, chiefs, others, per_worker_hint=not known)


_PER_WORKER_HINT = (
    " To read separate batches on each worker, pass a tf.data.Dataset whose options set the "
    "auto_shard_policy to OFF, or use strategy.distribute_datasets_from_function."
)

_NEW_HINT = (
    " This worker joined while the others were training. If the program itself draws random "
    "numbers for the data, as in the `on_epoch_end` of a PyDataset, it must use a separate seeded "
    "generator for them."
)


def _joined(parts: Sequence[tf.Tensor]) -> np.ndarray:
    """Concatenates the rows of all devices."""
    return np.concatenate([part.numpy() for part in parts])
