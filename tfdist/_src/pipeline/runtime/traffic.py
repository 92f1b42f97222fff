"""What a training step of a pipeline communicates, in the terms of `strategy.explain`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.global_view.transfer import SPARSE_GRADIENT, Transfer
from tfdist._src.pipeline.partition.cut import Edge, Partition
from tfdist._src.pipeline.partition.graph import Key
from tfdist._src.pipeline.placement.strategy import HybridStrategy
from tfdist._src.pipeline.stages.value_specs import ValueSpec, ValueSpecs


def between_stages(
    partition: Partition,
    value_specs: ValueSpecs,
    strategy: HybridStrategy,
    backward: Collection[Key],
    rows: int,
) -> Iterator[Transfer]:
    """The values that stages of different workers send each other, those of all microbatches.

    Args:
        partition: the model's partition.
        value_specs: the specs of the values between stages.
        strategy: the strategy, which places the stages.
        backward: the values whose gradients are sent back.
        rows: the number of rows of the batch.
    """
    names = _names(partition)

    def sent(edge: Edge, key: Key, what: str, spec: ValueSpec) -> Transfer:
        shape = tuple(size + per_row * rows for size, per_row in spec.shape)
        where = f"{names[key]} (stage {edge.source} to {edge.target})"
        return _transfer("send", what, shape, spec.dtype, where)

    for edge in partition.edges:
        if strategy.pipeline_rank_of(edge.source) == strategy.pipeline_rank_of(edge.target):
            continue
        for key in edge.keys:
            yield sent(edge, key, "activation", value_specs.of(key))
            if key in backward:
                yield sent(edge, key, "gradient", value_specs.of(key))
        for key in edge.masked:
            yield sent(edge, key, "mask", value_specs.mask_of(key))


def gradients(
    partition: Partition, strategy: HybridStrategy, sparse: Collection[str]
) -> Iterator[Transfer]:
    """The gradients that workers sum: of a stage over the pipelines, of a shared variable in each.

    Args:
        partition: the model's partition.
        strategy: the strategy.
        sparse: the paths of the variables whose gradients are sparse.
    """
    for shared in partition.shared:
        ranks = {strategy.pipeline_rank_of(stage) for stage in shared.stages}
        if shared.variable.trainable and len(ranks) > 1:
            stages = " and ".join(map(str, shared.stages))
            yield _gradient(shared.variable, f"shared by stages {stages}", sparse)
    if strategy.extended.mesh.data == 1:
        return
    seen: set[int] = set()
    for stage in partition.stages:
        for variable in stage.trainable_variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                yield _gradient(variable, f"stage {stage.index} of all pipelines", sparse)


def _gradient(variable: Any, whose: str, sparse: Collection[str]) -> Transfer:
    dtype, where = tf.as_dtype(variable.dtype), f"{variable.path} ({whose})"
    shape = tuple(variable.shape)
    if variable.path in sparse:  # As many rows of it as the batch looks up.
        shape = (None, *shape[1:])
        return _transfer("gather", "gradient", shape, dtype, where, SPARSE_GRADIENT)
    return _transfer("reduce", "gradient", shape, dtype, where)


def _transfer(
    kind: str,
    what: str,
    shape: Sequence[int | None],
    dtype: tf.DType,
    where: str,
    reason: str = "",
) -> Transfer:
    count: int | None = dtype.size
    for size in shape:
        count = None if count is None or size is None else count * size
    return Transfer(kind, what, count, tuple(shape), where, reason, dtype.size)


def _names(partition: Partition) -> dict[Key, str]:
    """The layers or inputs that make the values of a model."""
    graph = partition.graph
    names = {key: t.name for key, t in zip(graph.inputs, graph.model.inputs, strict=True)}
    for stage in partition.stages:
        for call in stage.calls:
            names.update(dict.fromkeys(call.outputs, call.name))
    return names
