"""Private APIs of tf.data, to create datasets from operations and to inspect input pipelines."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.dataset_ops import UnaryDataset
from tensorflow.python.data.util import structure
from tensorflow.python.distribute.input_lib import (
    _should_use_multi_device_iterator,
    _SingleWorkerDatasetIteratorBase,
)
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.none_tensor import NoneTensorSpec


@functools.cache
def plain_input() -> tf.distribute.InputOptions:
    """Returns options with which the devices of a worker share a single plain iterator.

    By default, TensorFlow creates an iterator that prefetches elements for each device. With these
    options, it creates a plain iterator without prefetching, but takes only one element from it,
    for a single device. Therefore the first call of this function also replaces methods of
    TensorFlow, so that they take one element for each device, in the order of the devices.
    """
    base = _SingleWorkerDatasetIteratorBase
    base.get_next_as_list = _one_per_device(base.get_next_as_list)
    base.get_next_as_optional_list = _one_per_device(base.get_next_as_optional_list)
    return tf.distribute.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
    )


def _one_per_device(next_elements: Any) -> Any:
    """Wraps a method of TensorFlow's iterator, so that it returns an element for each device."""

    @functools.wraps(next_elements)
    def elements(self: Any, *arguments: Any, **named: Any) -> list[Any]:
        reads = 1 if _should_use_multi_device_iterator(self._options) else len(self._devices)
        return [
            element for _ in range(reads) for element in next_elements(self, *arguments, **named)
        ]

    return elements


def is_for_none(spec: Any) -> bool:
    """Whether a spec describes None, or the optional value that Keras uses instead of None."""
    return isinstance(spec, (NoneTensorSpec, tf.OptionalSpec))


def derived_dataset(
    dataset: Any, operation: Callable[..., Any], element_spec: Any, **attributes: Any
) -> Any:
    """Creates a dataset with an operation that has another dataset as its input.

    Args:
        dataset: the dataset that is the input of the operation.
        operation: a function that creates the operation. It is called with the variant tensor of
            `dataset`, and with `output_types`, `output_shapes` and `attributes` as keyword
            arguments. It returns the variant tensor of the new dataset.
        element_spec: the structure of an element of the new dataset.
        attributes: additional attributes of the operation.
    """
    variant = operation(
        dataset._variant_tensor,
        output_types=structure.get_flat_tensor_types(element_spec),
        output_shapes=structure.get_flat_tensor_shapes(element_spec),
        **attributes,
    )
    return _Derived(dataset, variant, element_spec)


def dataset_with_graph(dataset: Any, variant: Any, element_spec: Any) -> Any:
    """Wraps the variant tensor of a dataset that was created from another dataset's graph.

    Args:
        dataset: the original dataset. The new dataset has its options.
        variant: the variant tensor of the new dataset.
        element_spec: the structure of an element of the new dataset.
    """
    return _Derived(dataset, variant, element_spec)


def variant_of(dataset: Any) -> Any:
    """Returns the variant tensor that represents a dataset."""
    return dataset._variant_tensor


def flat_types(element_spec: Any) -> list[Any]:
    """Returns the types of the tensors that represent an element of a dataset."""
    return list(structure.get_flat_tensor_types(element_spec))


def flat_shapes(element_spec: Any) -> list[Any]:
    """Returns the shapes of the tensors that represent an element of a dataset."""
    return list(structure.get_flat_tensor_shapes(element_spec))


def is_stateful(operation: str) -> bool:
    """Whether an operation has state, or depends on anything except its inputs.

    Args:
        operation: the name of the operation's type. If it is unknown, the result is True.
    """
    definition = op_def_registry.get(operation)
    return definition is None or bool(definition.is_stateful)


class _Derived(UnaryDataset):  # type: ignore[misc]
    def __init__(self, dataset: Any, variant: Any, element_spec: Any) -> None:
        self._element_spec = element_spec
        super().__init__(dataset, variant)

    @property
    def element_spec(self) -> Any:
        return self._element_spec


def dataset_operations(dataset: Any) -> set[str]:
    """Returns the names of all dataset classes and of all operations in an input pipeline."""
    names: set[str] = set()
    for part in _stages_of(dataset):
        names.add(type(part).__name__)
        names.update(node.op for node in _operations_of(part))
    return names


def _stages_of(dataset: Any) -> Iterator[Any]:
    """Yields all stages of an input pipeline; the last stage is first."""
    pending = [dataset]
    while pending:
        part = pending.pop()
        yield part
        pending.extend(_inputs_of(part))


def _operations_of(part: Any) -> Iterator[Any]:
    """Yields the operations in the functions of a stage."""
    for function in getattr(part, "_functions", list)():
        graph = function.function.graph.as_graph_def()
        yield from graph.node
        for inner in graph.library.function:
            yield from inner.node_def


def may_reorder(dataset: Any) -> bool | None:
    """Whether a stage of an input pipeline has the argument `deterministic=False`.

    Returns:
        None if it is unknown, because only the graph shows the argument of a parallel `interleave`.
    """
    found: bool | None = False
    for part in _stages_of(dataset):
        if getattr(part, "_deterministic", "") == "false":
            return True
        if "ParallelInterleave" in type(part).__name__:
            found = None
        for node in _operations_of(part):
            if node.attr["deterministic"].s == b"false" or node.attr["sloppy"].b:
                return True
    return found


def serialized_graph(dataset: Any) -> bytes | None:
    """Returns TensorFlow's description of a dataset's graph; None if it cannot be described."""
    try:
        policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        return bytes(dataset._as_serialized_graph(external_state_policy=policy).numpy())
    except tf.errors.OpError:
        return None


def shuffles(dataset: Any) -> bool:
    """Whether the order of the elements may differ between iterators over a dataset."""
    return any("ShuffleDataset" in name for name in dataset_operations(dataset))


def caches(dataset: Any) -> bool:
    """Whether a dataset caches elements the first time that it is read."""
    return any("CacheDataset" in name for name in dataset_operations(dataset))


def shuffle_buffers(dataset: Any) -> list[int]:
    """Returns the buffer size of each shuffle in a dataset's pipeline."""
    return [int(part._buffer_size) for part, _ in _shuffles_of(dataset)]


def shuffle_passes(dataset: Any) -> int:
    """Returns how often a shuffle draws a new order in one pass over the dataset.

    If `repeat` is applied after `shuffle`, the shuffle draws a new order for each repetition.
    """
    return max((passes for _, passes in _shuffles_of(dataset)), default=1)


def common_shuffles(one: Any, other: Any) -> bool:
    """Whether two datasets have a shuffle in common.

    Reading one of the datasets then affects the order of the other one.
    """
    ones, others = ({id(part) for part, _ in _shuffles_of(data)} for data in (one, other))
    return bool(ones & others)


def _shuffles_of(dataset: Any) -> list[tuple[Any, int]]:
    """Returns the shuffles in a dataset, and how often a pass over the dataset reads each one."""
    parts = [(dataset, 1)]
    for part, passes in parts:
        repeats = int(part._count) if "RepeatDataset" in type(part).__name__ else 1
        parts.extend((source, passes * max(repeats, 1)) for source in _inputs_of(part))
    return [(part, passes) for part, passes in parts if "ShuffleDataset" in type(part).__name__]


def _inputs_of(dataset: Any) -> list[Any]:
    """Returns the direct inputs of a dataset.

    The input of a distributed dataset is the original dataset.
    """
    if hasattr(dataset, "_inputs"):
        return list(dataset._inputs())
    original = getattr(dataset, "_original_dataset", None)
    return [] if original is None else [original]


def dataset_sources(dataset: Any) -> list[Any]:
    """Returns the strings in the sources of an input pipeline, and the indices of its shards.

    Returns:
        A list that starts with the last stage of the pipeline. It contains a list of strings, such
        as file names, for each source, and an integer for each `Dataset.shard`.
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
