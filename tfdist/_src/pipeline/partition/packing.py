"""How values are passed from one stage to another: tensors, then their masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.internals.keras import get_keras_mask, set_keras_mask
from tfdist._src.pipeline.partition.cut import Edge, Partition
from tfdist._src.pipeline.partition.graph import Key
from tfdist.errors import PartitionError


def pack(partition: Partition, edge: Edge, values: Mapping[Key, Any]) -> list[tf.Tensor]:
    """The tensors that the source of an edge sends.

    Args:
        partition: the stages.
        edge: one of its edges.
        values: at least the edge's values.

    Returns:
        The values in the order of `edge.keys`, then the masks in that of `edge.masked`.

    Raises:
        PartitionError: a value lacks a mask that it has in the model's graph.
    """
    return [values[key] for key in edge.keys] + masks_of(partition, edge.masked, values)


def masks_of(
    partition: Partition, keys: Sequence[Key], values: Mapping[Key, Any]
) -> list[tf.Tensor]:
    """The Keras masks of values.

    Args:
        partition: the stages.
        keys: those that have a mask in the model's graph.
        values: at least these.

    Raises:
        PartitionError: a value lacks its mask.
    """
    masks = [get_keras_mask(values[key]) for key in keys]
    for key, mask in zip(keys, masks, strict=True):
        if mask is None:
            maker = next(c for c in partition.graph.calls if key in c.outputs)
            raise PartitionError(
                "A layer that sets masks must do so in training, evaluation and prediction. "
                f"Received: no mask from '{maker.name}'. Set it in every call, or cut the model "
                "elsewhere."
            )
    return masks


def unpack(edge: Edge, tensors: Sequence[tf.Tensor]) -> dict[Key, tf.Tensor]:
    """The values that the target of an edge has received, by key, with their masks.

    Args:
        edge: the edge.
        tensors: as returned by `pack`.
    """
    # Copies: the same tensor may be passed to several stages of this process.
    values = {key: tf.identity(t) for key, t in zip(edge.keys, tensors, strict=False)}
    for key, mask in zip(edge.masked, tensors[len(edge.keys) :], strict=True):
        set_keras_mask(values[key], mask)
    return values


def specs(partition: Partition, edge: Edge, rows: int | None = None) -> list[tf.TensorSpec]:
    """The specs of the tensors that `pack` returns, for a number of rows; None for any number."""
    graph = partition.graph
    begin = (0, *partition.boundaries)[edge.target]
    masks = [graph.mask_before(key, begin) for key in edge.masked]
    known = [graph.specs[key] for key in edge.keys]
    known += [mask for mask in masks if mask is not None]
    return [tf.TensorSpec(spec.with_rows(rows).shape, spec.dtype) for spec in known]
