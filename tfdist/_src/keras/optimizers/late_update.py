"""Puts an optimizer's update off to the end of the step, behind all that the step communicates.

Keras's `train_step` applies the gradients and then computes the metrics, which are summed over the
replicas too: a worker that dies in between would leave the others with new weights and a step that
failed. So the update comes last, and nobody can tell. If it and what is traced in between take the
same variable, and either writes it, the step is traced again in Keras's order. A metric may read
the optimizer's iterations, or draw noise by the seed that the update draws by, too. So it is if the
update leaves a tensor on the optimizer, such as a norm for the logs, or if what follows fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.internals.extended import copy_here
from tfdist._src.internals.optimizer import updating_optimizers, variables_written_by, wrappers
from tfdist._src.sharding import sharded_by, trained_by
from tfdist._src.strategy.commit_point import READS
from tfdist._src.strategy.step import Step, current_step


@dataclass
class Trial:
    """Traces of a step in which an update may be put off.

    Attributes:
        fails: whether the step needs the results of its update before its end, or may need them
            since it has failed, so that the trace must not be used.
    """

    fails: bool = False


@dataclass
class LateUpdate:
    """An update that has been put off.

    Attributes:
        apply: applies the gradients.
        optimizer: the outermost optimizer.
        gradients: what it applies.
        operations: the number of operations in the step's graph when the update was put off.
        communicated: what the step has communicated besides what `announce_update` is told of.
        running: whether it is being traced.
        left: the identities of the tensors that the optimizer has as attributes before.
    """

    apply: Callable[[], Any]
    optimizer: Any
    gradients: Sequence[Any]
    operations: int
    communicated: list[Any] = field(default_factory=list)
    running: bool = False
    left: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.left = frozenset(_tensors_left_on(self.optimizer))

    @property
    def resources(self) -> list[tf.Tensor]:
        """The resources of the variables that it may write."""
        optimizer = self.optimizer
        variables = [*variables_written_by(optimizer), *trained_by(optimizer)]
        sharded = sharded_by(optimizer)
        variables += [] if sharded is None else sharded.shards
        return resources_of(variables)


@contextlib.contextmanager
def putting_off(optimizer: Any, step: Step) -> Iterator[None]:
    """Within this context, what the optimizer is told to apply is put off to `update_late`.

    Args:
        optimizer: the model's optimizer; may be None.
        step: the step, which may allow it.
    """
    if step.late_in is None or not hasattr(optimizer, "__dict__"):
        yield
        return
    own = vars(optimizer)
    # The optimizer may have methods of its own instead of its class's.
    before = {name: own[name] for name in _APPLY if name in own}
    for name in _APPLY:
        own[name] = _put_off(optimizer, step, getattr(optimizer, name), paired=name == _PAIRED)
    try:
        yield
    finally:
        for name in _APPLY:
            del own[name]
        own.update(before)


_PAIRED = "apply_gradients"
_APPLY = ("apply", _PAIRED)


def _put_off(
    optimizer: Any, step: Step, apply: Callable[..., Any], *, paired: bool
) -> Callable[..., Any]:
    def put_off(grads: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(grads)
        graph = tf.compat.v1.get_default_graph()
        # A branch of a conditional has to apply its gradients itself.
        if step.late is not None or step.late_in is not graph:
            return apply(given, *args, **kwargs)
        step.late = LateUpdate(
            lambda: apply(given, *args, **kwargs),
            optimizer,
            [g for g, _ in given] if paired else given,
            len(graph.get_operations()),
        )
        return None

    return put_off


def update_late(step: Step, trial: Trial | None) -> None:
    """Traces the update that has been put off, if any.

    Args:
        step: the step, at its end.
        trial: told if the result depends on the order of the update and what has been traced since
            it was put off. The trace goes on, since TensorFlow initializes variables that it makes
            only if it ends.
    """
    late = step.late
    if late is None or trial is None:
        return
    before = step.late_in.get_operations()
    late.running = True
    late.apply()
    step.late = None
    meanwhile = _taken(before[late.operations :])
    update = _taken(step.late_in.get_operations()[len(before) :])
    ordering = {inner.name for outer, inner in step.late_in.captures if tokens.is_token(outer)}
    shared = (update.keys() & meanwhile) - ordering
    trial.fails |= any(update[name] or meanwhile[name] for name in shared)
    trial.fails |= not late.left.issuperset(_tensors_left_on(late.optimizer))


def _tensors_left_on(optimizer: Any) -> Iterator[int]:
    """The identities of the graph's tensors among the attributes of an optimizer, also nested."""
    for part in (*wrappers(optimizer), *updating_optimizers(optimizer)):
        for value in vars(part).values():
            value = list(value.values()) if isinstance(value, dict) else value
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (id(v) for v in values if tf.is_symbolic_tensor(v))


def _taken(operations: Iterable[tf.Operation]) -> dict[str, bool]:
    """The resources that operations take, by name, and whether any of them may write one."""
    taken: dict[str, bool] = {}
    for operation in operations:
        for value in operation.inputs:
            if value.dtype == tf.resource:
                while value.op.type == "Identity":
                    value = value.op.inputs[0]
                taken[value.name] = taken.get(value.name, False) or operation.type not in READS
    return taken


def announce_update(arrived: Sequence[Any]) -> None:
    """Tells the step that the update which is being traced has nothing more to communicate.

    Args:
        arrived: what has been communicated, dense or `tf.IndexedSlices`; may contain None.
    """
    step = current_step()
    if step is None or step.late is None or not step.late.running:
        return
    tensors = tf.nest.flatten([v for v in arrived if v is not None], expand_composites=True)
    with tf.control_dependencies([*tensors, *step.late.communicated]):
        tokens.update_begins(step.late.resources)


def resources_of(variables: Sequence[Any]) -> list[tf.Tensor]:
    """The resources of variables of this replica, each once."""
    copies = [_copy(variable) for variable in variables]
    return list({id(copy.handle): copy.handle for copy in copies}.values())


def _copy(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    value = variable if callable(value) else value  # a `tf.Variable` has a method of this name
    return copy_here(value) if hasattr(value, "values") else value
