"""Variables that stages on several ranks share: each has a copy, and they stay equal, bit for bit.

Gradients are summed over the copies of a pipeline, then over the pipelines. Where sums over the
pipelines are taken at two places, they may differ in their last bits, by the order of the hosts,
and more where they are compressed; so only the owners take them, and give them to the other copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist.collective.communicator import Communicator
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.pipeline.partition.cut import Partition
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.strategies.reduction import all_gather_slices


class SharedVariables:
    """Sums the gradients of shared variables over the ranks that hold a copy.

    All ranks of the job make it together.

    Args:
        partition: of the model.
        strategy: where its stages are.
    """

    def __init__(self, partition: Partition, strategy: HybridStrategy) -> None:
        self._place = strategy.place
        self._shared = partition.shared
        self._forms: dict[int, str] = {}
        extended = strategy.extended
        pipeline = extended.mesh.pipeline_of(extended.group.topology.rank)
        self._owners: dict[int, int] = {}
        by_ranks: dict[tuple[int, ...], tuple[list[Any], list[Any]]] = {}
        for shared in partition.shared:
            places = [strategy.rank_of(stage) for stage in shared.stages]
            self._owners[id(shared.variable)] = places[0]
            if len(set(places)) > 1:
                trained, states = by_ranks.setdefault(tuple(sorted(set(places))), ([], []))
                (trained if shared.variable.trainable else states).append(shared.variable)
        self._groups: list[_Gradients] = []
        self._states: list[_States] = []
        for ranks, (trained, states) in sorted(by_ranks.items(), key=lambda item: item[0]):
            mine = self._place in ranks
            members = [pipeline[rank] for rank in ranks] if mine else []
            between = "=".join(map(str, ranks))
            part = extended.group.native_part(f"tied {between} of {extended.mesh}", members)
            if part is not None:
                for variable in (*trained, *states):
                    # A model that was made before may have drawn them by itself on each rank.
                    root = ranks.index(self._owners[id(variable)])
                    variable.assign(part.broadcast(tf.convert_to_tensor(variable), root))
                if trained:
                    roots = [ranks.index(self._owners[id(v)]) for v in trained]
                    self._groups.append(_Gradients(part, trained, roots))
                if states:
                    self._states.append(_States(part, states))

    def owns(self, variable: Any) -> bool:
        """Whether this rank answers for a variable that it holds."""
        return self._owners.get(id(variable), self._place) == self._place

    def forms_in(self, stages: Iterable[Any]) -> dict[str, str]:
        """The forms of shared variables' gradients in this rank's stages, by their numbers."""
        stages = list(stages)
        dense = {id(v) for stage in stages for v in stage.summed}
        sparse = {id(v) for stage in stages for v in stage.looked_up}
        return {
            str(number): "dense" if id(shared.variable) in dense else "sparse"
            for number, shared in enumerate(self._shared)
            if id(shared.variable) in dense | sparse
        }

    def learn(self, forms: Iterable[Mapping[str, str]]) -> None:
        """Takes up what `forms_in` gives on each rank; the sum is dense where one of them is."""
        for of_rank in forms:
            for number, form in of_rank.items():
                key = id(self._shared[int(number)].variable)
                self._forms[key] = min(form, self._forms.get(key, form))

    def add_up(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The gradients, those of shared variables summed over the ranks.

        Args:
            variables: this rank's.
            gradients: tensors, `tf.IndexedSlices` or None.
        """
        result = list(gradients)
        places = {id(v): i for i, v in enumerate(variables)}
        for group in self._groups:
            own = [places[id(v)] for v in group.variables if id(v) in places]
            forms = {i: self._forms.get(id(variables[i])) for i in own}
            summed = [i for i in own if forms[i] == "dense"]
            dense = [_dense(result[i], variables[i]) for i in summed]
            sums = group.communicator.all_reduce(dense) if dense else []
            for i, total in zip(summed, sums, strict=True):
                result[i] = total
            for i in [i for i in own if forms[i] == "sparse"]:
                result[i] = all_gather_slices(group.communicator, _slices(result[i], variables[i]))
        return result

    def add_up_once(
        self,
        add_up: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        """Sums gradients over the pipelines; those of a shared variable where its owner is.

        Args:
            add_up: sums gradients, given with their variables, over the pipelines.
            gradients: as of `add_up`.
            variables: this rank's.
        """
        result = list(gradients)
        own = [i for i, v in enumerate(variables) if self.owns(v)]
        if own:
            sums = add_up([gradients[i] for i in own], [variables[i] for i in own])
            for i, total in zip(own, sums, strict=True):
                result[i] = total
        places = {id(v): i for i, v in enumerate(variables)}
        for group in self._groups:
            for variable, root in zip(group.variables, group.roots, strict=True):
                if id(variable) in places:
                    i = places[id(variable)]
                    result[i] = _from(group.communicator, result[i], root)
        return result

    def spread(self) -> None:
        """Gives the owners' values to the other copies.

        For optimizers that are shared out, where each place sums and updates by itself.
        """
        for group in self._groups:
            for variable, root in zip(group.variables, group.roots, strict=True):
                value = tf.convert_to_tensor(variable)
                variable.assign(group.communicator.broadcast(value, root))

    def remember_states(self) -> None:
        """Keeps what shared variables that are not trained hold before a step."""
        for group in self._states:
            group.before = [tf.identity(v) for v in group.variables]

    def add_up_states(self) -> None:
        """Adds to every copy of a shared variable that is not trained what all copies changed by.

        Seeds then stand where one process's would, and moving statistics near to it.
        """
        for group in self._states:
            changes = [
                _number(v) - _number(b) for v, b in zip(group.variables, group.before, strict=True)
            ]
            sums = group.communicator.all_reduce(changes)
            for variable, before, change in zip(group.variables, group.before, sums, strict=True):
                variable.assign(tf.cast(_number(before) + change, variable.dtype))


def _number(value: Any) -> tf.Tensor:
    # Seeds are unsigned.
    value = tf.convert_to_tensor(value)
    return value if value.dtype.is_floating else tf.cast(value, tf.int64)


@dataclass(frozen=True)
class _Gradients:
    """Variables that are trained, of which the same ranks hold copies, and who owns each."""

    communicator: NativeCommunicator
    variables: list[Any]
    roots: list[int]


@dataclass
class _States:
    """Variables that are not trained, of which the same ranks hold copies."""

    communicator: Communicator
    variables: list[Any]
    before: list[tf.Tensor] = field(default_factory=list)


def _from(communicator: NativeCommunicator, gradient: Any, root: int) -> Any:
    """One rank's gradient, on all."""
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
