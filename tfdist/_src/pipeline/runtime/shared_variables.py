"""Variables shared by stages on several ranks: each rank has a copy; all copies are bitwise equal.

Gradients are summed over the copies within a pipeline, then over the pipelines. If two ranks each
computed the sum over the pipelines, the two sums could differ in the last bits, depending on the
order of the hosts; with compression, they could differ more. So only one of the ranks, the owner,
computes this sum and broadcasts it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.pipeline.partition.cut import Partition
from tfdist._src.pipeline.placement.strategy import HybridStrategy, pipeline_extended_of
from tfdist._src.strategy.communication import part_communicators
from tfdist._src.strategy.reduction import all_gather_slices


class SharedVariables:
    """Sums the gradients of shared variables over the ranks that hold a copy.

    Construction is collective over all ranks of the job.

    Args:
        partition: the model's partition.
        strategy: the strategy, which places the stages.

    Attributes:
        has_copies: whether several ranks of a pipeline hold a copy of a variable.
    """

    def __init__(self, partition: Partition, strategy: HybridStrategy) -> None:
        self._pipeline_rank = strategy.pipeline_rank
        self._shared = partition.shared
        self._kinds: dict[int, str] = {}
        extended = pipeline_extended_of(strategy)
        pipeline = extended.mesh.pipeline_of(extended.group.topology.rank)
        self._owners: dict[int, int] = {}
        by_ranks: dict[tuple[int, ...], tuple[list[Any], list[Any]]] = {}
        for shared in partition.shared:
            stage_ranks = [strategy.pipeline_rank_of(stage) for stage in shared.stages]
            self._owners[id(shared.variable)] = stage_ranks[0]
            if len(set(stage_ranks)) > 1:
                trained, states = by_ranks.setdefault(tuple(sorted(set(stage_ranks))), ([], []))
                (trained if shared.variable.trainable else states).append(shared.variable)
        self.has_copies = bool(by_ranks)
        self._groups: list[_Gradients] = []
        self._states: list[_States] = []
        for ranks, (trained, states) in sorted(by_ranks.items(), key=lambda item: item[0]):
            mine = self._pipeline_rank in ranks
            members = [pipeline[rank] for rank in ranks] if mine else []
            between = "=".join(map(str, ranks))
            part, replicas = part_communicators(
                extended.group, f"tied {between} of {extended.mesh}", members, extended.gpus
            )
            if part is not None and replicas is not None:
                for variable in (*trained, *states):
                    # If the model was built beforehand, ranks may have different initial values.
                    root = ranks.index(self._owners[id(variable)])
                    variable.assign(part.broadcast(tf.convert_to_tensor(variable), root))
                if trained:
                    roots = [ranks.index(self._owners[id(v)]) for v in trained]
                    self._groups.append(_Gradients(replicas, trained, roots))
                if states:
                    self._states.append(_States(part, states))

    def owns(self, variable: Any) -> bool:
        """Whether this rank is the owner of a variable that it holds."""
        return self._owners.get(id(variable), self._pipeline_rank) == self._pipeline_rank

    def gradient_kinds(self, stages: Iterable[Any]) -> dict[str, str]:
        """Returns "dense" or "sparse" for the shared variables with a gradient on this rank.

        Args:
            stages: the `StageFunctions` of this rank.

        Returns:
            The kinds by the variable's index in `Partition.shared`, as a string for JSON.
        """
        stages = list(stages)
        dense = {id(v) for stage in stages for v in stage.dense_variables}
        sparse = {id(v) for stage in stages for v in stage.sparse_variables}
        return {
            str(number): "dense" if id(shared.variable) in dense else "sparse"
            for number, shared in enumerate(self._shared)
            if id(shared.variable) in dense | sparse
        }

    def learn(self, kinds: Iterable[Mapping[str, str]]) -> None:
        """Records each rank's `gradient_kinds`; a sum is dense if any rank's gradient is dense."""
        for of_rank in kinds:
            for number, kind in of_rank.items():
                key = id(self._shared[int(number)].variable)
                self._kinds[key] = min(kind, self._kinds.get(key, kind))

    def sum_gradients(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients, summed over the ranks of a pipeline for shared variables.

        Args:
            variables: this rank's variables.
            gradients: tensors, `tf.IndexedSlices` or None.
        """
        result = list(gradients)
        index_of = {id(v): i for i, v in enumerate(variables)}
        for group in self._groups:
            own = [index_of[id(v)] for v in group.variables if id(v) in index_of]
            kinds = {i: self._kinds.get(id(variables[i])) for i in own}
            dense_indices = [i for i in own if kinds[i] == "dense"]
            dense = [_dense(result[i], variables[i]) for i in dense_indices]
            sums = group.communicator.all_reduce(dense) if dense else []
            for i, total in zip(dense_indices, sums, strict=True):
                result[i] = total
            for i in [i for i in own if kinds[i] == "sparse"]:
                result[i] = all_gather_slices(group.communicator, _slices(result[i], variables[i]))
        return result

    def sum_over_pipelines(
        self,
        add_up: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        """Sums gradients over the pipelines; only the owner sums the gradient of a shared variable.

        Args:
            add_up: sums gradients over the pipelines, given gradients and their variables.
            gradients: the gradients to sum.
            variables: this rank's variables.
        """
        result = list(gradients)
        own = [i for i, v in enumerate(variables) if self.owns(v)]
        if own:
            sums = add_up([gradients[i] for i in own], [variables[i] for i in own])
            for i, total in zip(own, sums, strict=True):
                result[i] = total
        index_of = {id(v): i for i, v in enumerate(variables)}
        for group in self._groups:
            for variable, root in zip(group.variables, group.roots, strict=True):
                if id(variable) in index_of:
                    i = index_of[id(variable)]
                    result[i] = _broadcast_gradient(group.communicator, result[i], root)
        return result

    def broadcast_from_owners(self) -> None:
        """Broadcasts the owners' values to the other copies.

        Used with sharded optimizers, where each pipeline rank sums and updates independently.
        """
        for group in self._groups:
            for variable, root in zip(group.variables, group.roots, strict=True):
                value = tf.convert_to_tensor(variable)
                variable.assign(group.communicator.broadcast(value, root))

    def save_states(self) -> None:
        """Saves the values of non-trainable shared variables before a step."""
        for group in self._states:
            group.before = [tf.identity(v) for v in group.variables]

    def sum_state_changes(self) -> list[tf.Tensor]:
        """Adds the changes of all copies of a non-trainable shared variable to each copy.

        Seeds then have the same values as in a single process, and moving statistics have
        approximately the same values.

        Returns:
            The sums of the changes.
        """
        changed = []
        for group in self._states:
            changes = [
                _as_signed(v) - _as_signed(b)
                for v, b in zip(group.variables, group.before, strict=True)
            ]
            sums = group.communicator.all_reduce(changes)
            changed += sums
            for variable, before, change in zip(group.variables, group.before, sums, strict=True):
                variable.assign(tf.cast(_as_signed(before) + change, variable.dtype))
        return changed


def _as_signed(value: Any) -> tf.Tensor:
    # Seeds are unsigned, but a change may be negative.
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)


@dataclass(frozen=True)
class _Gradients:
    """Trainable variables held by the same ranks, with the owner of each."""

    communicator: Communicator
    variables: list[Any]
    roots: list[int]


@dataclass
class _States:
    """Non-trainable variables held by the same ranks."""

    communicator: Communicator
    variables: list[Any]
    before: list[tf.Tensor] = field(default_factory=list)


def _broadcast_gradient(communicator: Communicator, gradient: Any, root: int) -> Any:
    """Broadcasts one rank's gradient to all."""
    if not isinstance(gradient, tf.IndexedSlices):
        return communicator.broadcast(gradient, root)
    rows = tf.shape(gradient.values)[0] if communicator.rank == root else 0
    own = tf.IndexedSlices(gradient.values[:rows], gradient.indices[:rows], gradient.dense_shape)
    return all_gather_slices(communicator, own)


def _slices(gradient: Any, variable: Any) -> tf.IndexedSlices:
    shape = tf.constant([*variable.shape], tf.int64)
    if gradient is None:
        nothing = tf.zeros([0, *variable.shape[1:]], variable.dtype)
        return tf.IndexedSlices(nothing, tf.zeros([0], tf.int64), shape)
    return tf.IndexedSlices(gradient.values, tf.cast(gradient.indices, tf.int64), shape)


def _dense(gradient: Any, variable: Any) -> tf.Tensor:
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    return tf.convert_to_tensor(gradient)
