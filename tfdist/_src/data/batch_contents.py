"""What of a batch is the same on all workers, and is compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._src.data.fingerprint import fingerprint, matches, spec_of
from tfdist._src.internals.datasets import dataset_operations

# Operations that draw random numbers while data is read. If batches are produced in parallel, the
# order of their draws is not deterministic.
_RANDOM_OPS = ("Random", "Multinomial", "TruncatedNormal", "SampleDistorted", "StatefulUniform")
# Used by Keras to shuffle arrays, in a deterministic order.
_SHUFFLES_IN_ORDER = "RandomShuffle"
_PYTHON = "PyFunc"

_NAMES = ("x", "y", "sample_weight")


def draws_numbers(dataset: Any) -> bool:
    """Whether a dataset's functions draw random numbers, as data augmentation does."""
    operations = dataset_operations(dataset)
    return any(name in op for op in operations for name in _RANDOM_OPS)


def values_of(element: Any) -> list[Any]:
    """The tensors of an element that are compared, in the order of `leaves_of`."""
    return [v for v in tf.nest.flatten(element, expand_composites=True) if _is_data(v)]


def _is_data(leaf: Any) -> bool:
    # Not the optionals that represent None.
    return isinstance(leaf, (tf.Tensor, tf.TensorSpec)) and leaf.dtype != tf.variant


@dataclass(frozen=True)
class Leaf:
    """A tensor of an element.

    Attributes:
        name: the name of its part of the batch.
        same_rows: whether it has the same number of rows on all workers.
        same_values: whether it is identical on all workers.
        component: the number of the component of the batch that it is or is a part of.
        is_dense: whether its first dimension is the rows, rather than that of a part of a ragged or
            sparse tensor.
    """

    name: str
    same_rows: bool
    same_values: bool
    component: int = 0
    is_dense: bool = True

    def seen(self, values: np.ndarray) -> list[Any]:
        """Its name, spec and fingerprint, as far as they are the same on all workers."""
        if self.same_values:
            return [self.name, spec_of(values), fingerprint(values)]
        return [self.name, f"{len(values)} rows" if self.same_rows else "", []]


def leaves_of(dataset: Any) -> list[Leaf]:
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
    """What differs on two workers, as text; None if nothing does.

    Args:
        chiefs: what `Leaf.seen` returns there, for each leaf.
        others: the same of another worker.
        which: which batch it is.
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
