"""Keeps the copies of a shared variable equal on all ranks of a pipeline that use the variable.

If stages on several ranks use the same variable, each of these ranks holds a copy of it. All copies
must be bitwise equal.

The gradients of the copies are first summed within each pipeline, then over the pipelines. If two
ranks computed the sum over the pipelines separately, their results could differ in the last bits,
since the order of the additions depends on the hosts. With compression, they could differ even
more. So only one rank of each pipeline, the owner of the variable, takes part in the sum over the
pipelines. It then broadcasts the result to the other ranks of its pipeline.
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

    All ranks of the job must create this object together.

    Args:
        partition: the model's partition into stages.
        strategy: the strategy, which assigns the stages to ranks.

    Attributes:
        has_copies: whether any variable has copies on several ranks of a pipeline.
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
                    # Make the copies equal. They may differ if the model was not built by a
                    # function, since each rank then drew its own initial values.
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
        """Returns whether the gradients of shared variables are dense or sparse on this rank.

        Args:
            stages: the `StageFunctions` of this rank.

        Returns:
            "dense" or "sparse" for each shared variable that has a gradient on this rank. The keys
            are the variables' indices in `Partition.shared`, as strings, since JSON requires
            strings as keys.
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
        """Records the kinds of gradients on all ranks.

        The sum of a variable's gradients is dense if the gradient is dense on any rank.

        Args:
            kinds: for each rank, the result of `gradient_kinds`.
        """
        for of_rank in kinds:
            for number, kind in of_rank.items():
                key = id(self._shared[int(number)].variable)
                self._kinds[key] = min(kind, self._kinds.get(key, kind))

    def sum_gradients(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Sums the gradients of shared variables over the ranks of a pipeline.

        Args:
            variables: the variables of this rank.
            gradients: the gradients of `variables`. Each is a tensor, `tf.IndexedSlices` or None.

        Returns:
            The gradients in the same order. The gradients of variables without copies on other
            ranks are unchanged.
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
        """Sums gradients over the pipelines.

        Only the owner of a shared variable takes part in the sum of the variable's gradient. The
        owner then broadcasts the result to the other ranks of its pipeline.

        Args:
            add_up: a function of gradients and their variables that sums the gradients over the
                pipelines.
            gradients: the gradients of `variables`.
            variables: the variables of this rank.
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
        """Broadcasts the values of shared variables from their owners to the other copies.

        This is needed with sharded optimizers. With them, the ranks that hold copies sum the
        gradients over the pipelines and update their copies independently of each other.
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
        """Adds up the changes of all copies of each non-trainable shared variable in this step.

        Each copy is set to its value before the step plus the sum of the changes. So seeds have the
        same values as in a single process, and moving statistics have approximately the same
        values.

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
    # Seeds are unsigned integers, but the difference of two seeds may be negative.
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)


@dataclass(frozen=True)
class _Gradients:
    """Trainable shared variables with copies on the same ranks, and the owner of each variable."""

    communicator: Communicator
    variables: list[Any]
    roots: list[int]


@dataclass
class _States:
    """Non-trainable shared variables with copies on the same ranks."""

    communicator: Communicator
    variables: list[Any]
    before: list[tf.Tensor] = field(default_factory=list)


def _broadcast_gradient(communicator: Communicator, gradient: Any, root: int) -> Any:
    """Broadcasts a dense or sparse gradient from the rank `root` to all ranks."""
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
