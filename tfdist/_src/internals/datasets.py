"""Private APIs of tf.data: datasets of tfdist's operations, and the parts of a pipeline."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryDataset
from tensorflow.python.data.util import structure
from tensorflow.python.distribute.input_lib import (
    _should_use_multi_device_iterator,
    _SingleWorkerDatasetIteratorBase,
)
from tensorflow.python.framework.none_tensor import NoneTensorSpec


@functools.cache
def plain_input() -> tf.distribute.InputOptions:
    """The options for a plain iterator, from which a worker's devices take elements in order.

    By default, TensorFlow creates an iterator that reads ahead for each device. With these options,
    it creates a plain iterator, but takes an element from it for one device only. So the first call
    of this function also replaces methods of TensorFlow, to take an element for each device.
    """
    base = _SingleWorkerDatasetIteratorBase
    base.get_next_as_list = _one_per_device(base.get_next_as_list)
    base.get_next_as_optional_list = _one_per_device(base.get_next_as_optional_list)
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )


def _one_per_device(next_elements: Any) -> Any:
    """Makes a plain iterator yield an element for each device, in the order of the devices."""

    @functools.wraps(next_elements)
    def elements(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        reads = 1 if _should_use_multi_device_iterator(self._options) else len(self._devices)
        return [
            element for _ in range(reads) for element in next_elements(self, *arguments, **named)
        ]

    return elements


def is_for_none(spec: Any) -> bool:
    """Whether a spec describes None, or an optional, which Keras uses in place of None."""
    return isinstance(spec, (NoneTensorSpec, tf.OptionalSpec))


def derived_dataset(
    dataset: Any, operation: Callable[..., Any], element_spec: Any, **attributes: Any
) -> Any:
    """Returns a dataset that an operation derives from another one.

    Args:
        dataset: the other dataset.
        operation: a function of the other dataset's variant tensor, `output_types`,
            `output_shapes` and `attributes`; it returns the new dataset's variant tensor.
        element_spec: the structure of an element.
        attributes: additional attributes of the operation.
    """
    variant = operation(
        dataset._variant_tensor,
        output_types=structure.get_flat_tensor_types(element_spec),
        output_shapes=structure.get_flat_tensor_shapes(element_spec),
        **attributes,
    )
    return _Derived(dataset, variant, element_spec)


class _Derived(UnaryDataset):  # type: ignore[misc]
    def __init__(self, dataset: Any, variant: Any, element_spec: Any) -> None:
        self._element_spec = element_spec
        super().__init__(dataset, variant)

    @property
    def element_spec(self) -> Any:
        return self._element_spec


def dataset_operations(dataset: Any) -> set[str]:
    """The names of a pipeline's dataset classes and operations."""
    names: set[str] = set()
    pending = [dataset]
    while pending:
        part = pending.pop()
        names.add(type(part).__name__)
        pending.extend(_inputs_of(part))
        for function in getattr(part, "_functions", list)():
            graph = function.function.graph.as_graph_def()
            nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
            names.update(node.op for node in nodes)
    return names


def shuffles(dataset: Any) -> bool:
    """Whether iterators over a dataset may differ in the order of their elements."""
    return any("ShuffleDataset" in name for name in dataset_operations(dataset))


def caches(dataset: Any) -> bool:
    """Whether a part of a dataset is read once and cached."""
    return any("CacheDataset" in name for name in dataset_operations(dataset))


def shuffle_buffers(dataset: Any) -> list[int]:
    """The buffer size of each shuffle of a dataset."""
    return [int(part._buffer_size) for part, _ in _shuffles_of(dataset)]


def shuffle_passes(dataset: Any) -> int:
    """The number of orders that a shuffle draws in one pass over the dataset.

    A shuffle draws an order for each repetition by a later `repeat`.
    """
    return max((passes for _, passes in _shuffles_of(dataset)), default=1)


def common_shuffles(one: Any, other: Any) -> bool:
    """Whether two datasets contain the same shuffle, so that iterators over both draw from it."""
    ones, others = ({id(part) for part, _ in _shuffles_of(data)} for data in (one, other))
    return bool(ones & others)


def _shuffles_of(dataset: Any) -> list[tuple[Any, int]]:
    """The shuffles in a dataset, each with its number of passes in one pass over the dataset."""
    parts = [(dataset, 1)]
    for part, passes in parts:
        repeats = int(part._count) if "RepeatDataset" in type(part).__name__ else 1
        parts.extend((source, passes * max(repeats, 1)) for source in _inputs_of(part))
    return [(part, passes) for part, passes in parts if "ShuffleDataset" in type(part).__name__]


def _inputs_of(dataset: Any) -> list[Any]:
    """The direct inputs of a dataset; for a distributed dataset, the original dataset."""
    if hasattr(dataset, "_inputs"):
        return list(dataset._inputs())
    original = getattr(dataset, "_original_dataset", None)
    return [] if original is None else [original]


def dataset_sources(dataset: Any) -> list[Any]:
    """The strings in a pipeline's sources, such as file names, and the indices of its shards.

    Returns:
        A list of strings for each source, and the index of each `Dataset.shard`; the last parts of
        the pipeline are first.
    """
    found: list[Any] = []
    pending = [dataset]
    while pending:
        part = pending.pop()
        pending.extend(_inputs_of(part))
        files = getattr(part, "_filenames", None)
        if hasattr(files, "_inputs"):
            pending.append(files)
        for tensor in (files, *getattr(part, "_tensors", ())):
            if getattr(tensor, "dtype", None) == "string" and hasattr(tensor, "numpy"):
                names = np.ravel(tensor.numpy()).tolist()
                found.append([str(name, errors="replace") for name in names])
        if hasattr(part, "_num_shards") and hasattr(index := part._index, "numpy"):
            found.append(index.numpy().item())
    return found
