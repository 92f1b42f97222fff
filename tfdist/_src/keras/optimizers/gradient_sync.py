"""Sums the gradients of replicas, checks them for overflow, and applies them at a step's end.

Keras's `train_step` applies the gradients and then computes the metrics, which are also summed over
the replicas. A worker that died in between would leave the others with new weights and a failed
step. Therefore the update is deferred to the end of the step, which usually does not change the
results. The step is traced again in Keras's order if both the update and an operation traced after
it use a variable that either of them writes. For example, a metric may read the optimizer's
iterations, or draw noise from the same seed as the update. The step is also traced again if the
update stores a tensor on the optimizer, such as a norm for the logs, or if the code after the
update fails.

Gradients are summed after their accumulation, so that they cross the network once per update;
`applying.py` decides when this does not apply.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.internals.extended import copy_here
from tfdist._src.internals.optimizer import (
    is_overwritten,
    updating_optimizers,
    variables_written_by,
    wrappers,
)
from tfdist._src.sharding import is_sharded, sharded_by, trained_by
from tfdist._src.strategy.commit_point import READS
from tfdist._src.strategy.extended import extended_if_ours, extended_of
from tfdist._src.strategy.step import (
    EagerGlobalStep,
    GlobalStep,
    Step,
    current_step,
    equal_everywhere,
    this_thread,
)
from tfdist.errors import UnsupportedError


@dataclass
class DeferralTrial:
    """An attempt to trace a step with a deferred update.

    Attributes:
        fails: whether the trace must not be used, because the step needs the results of its update
            before its end, or has failed and may have needed them.
    """

    fails: bool = False


@dataclass
class LateUpdate:
    """A deferred update.

    Attributes:
        apply: applies the gradients.
        optimizer: the outermost optimizer.
        gradients: the gradients to apply.
        operations: the number of operations in the step's graph when the update was deferred.
        communicated: the values that the step communicated but does not pass to `announce_update`.
        running: whether the update is being traced.
        left: the identities of the tensors among the optimizer's attributes before the update.
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
        """The resources of the variables that the update may write."""
        optimizer = self.optimizer
        variables = [*variables_written_by(optimizer), *trained_by(optimizer)]
        sharded = sharded_by(optimizer)
        variables += [] if sharded is None else sharded.shards
        return resources_of(variables)


@contextlib.contextmanager
def putting_off(optimizer: Any, step: Step) -> Iterator[None]:
    """Within this context, the optimizer's updates are deferred to `update_late`.

    Args:
        optimizer: the model's optimizer; may be None.
        step: the step, which decides whether updates may be deferred.
    """
    if step.late_in is None or not hasattr(optimizer, "__dict__"):
        yield
        return
    own = vars(optimizer)
    # The instance may override these methods of its class.
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
        # A branch of a conditional must apply its gradients inside the branch.
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


def update_late(step: Step, trial: DeferralTrial | None) -> None:
    """Traces the deferred update, if any.

    Args:
        step: the step, at its end.
        trial: marked as failed if the result depends on the order of the update and the operations
            traced since it was deferred. Tracing continues even then, since TensorFlow initializes
            new variables only if the trace completes.
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
    """The identities of graph tensors among an optimizer's attributes, including nested ones."""
    for part in (*wrappers(optimizer), *updating_optimizers(optimizer)):
        for value in vars(part).values():
            value = list(value.values()) if isinstance(value, dict) else value
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (id(v) for v in values if tf.is_symbolic_tensor(v))


def _taken(operations: Iterable[tf.Operation]) -> dict[str, bool]:
    """The resources that operations use, by name, and whether any operation may write them."""
    taken: dict[str, bool] = {}
    for operation in operations:
        for value in operation.inputs:
            if value.dtype == tf.resource:
                while value.op.type == "Identity":
                    value = value.op.inputs[0]
                taken[value.name] = taken.get(value.name, False) or operation.type not in READS
    return taken


def announce_update(arrived: Sequence[Any]) -> None:
    """Records in the step that the update being traced has finished communicating.

    Args:
        arrived: the values communicated, dense or `tf.IndexedSlices`; may contain None.
    """
    step = current_step()
    if step is None or step.late is None or not step.late.running:
        return
    tensors = tf.nest.flatten([v for v in arrived if v is not None], expand_composites=True)
    with tf.control_dependencies([*tensors, *step.late.communicated]):
        tokens.update_begins(step.late.resources)


def resources_of(variables: Sequence[Any]) -> list[tf.Tensor]:
    """The resources of variables of this replica, without duplicates."""
    copies = [_copy(variable) for variable in variables]
    return list({id(copy.handle): copy.handle for copy in copies}.values())


def _copy(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    value = variable if callable(value) else value  # a `tf.Variable` has a method of this name
    return copy_here(value) if hasattr(value, "values") else value


def in_replica() -> bool:
    """Whether the caller is a replica of a tfdist strategy with several replicas, now or later."""
    context = tf.distribute.get_replica_context()
    return context is not None and has_replicas(context.strategy)


def has_replicas(strategy: Any) -> bool:
    """Whether a strategy is a tfdist strategy with several replicas, now or later."""
    extended = extended_if_ours(strategy)
    return extended is not None and extended.communicates


def compressor_in_use() -> Any:
    """The compressor of the replicas' gradients; None if they are not compressed."""
    if not in_replica():
        return None
    compressor = extended_of(tf.distribute.get_strategy()).compressor
    if compressor is None:
        return None
    compressor.note_traced()
    return compressor if compressor.active else None


@contextlib.contextmanager
def in_apply(*, summed: bool = False) -> Iterator[None]:
    """Within this context, this thread applies an optimizer.

    Args:
        summed: whether its gradients are already summed.
    """
    before = this_thread.gradients_are_summed
    this_thread.gradients_are_summed = before or summed
    this_thread.optimizers += 1
    try:
        yield
    finally:
        this_thread.optimizers -= 1
        this_thread.gradients_are_summed = before


def are_summed() -> bool:
    """Whether the gradients of this thread's optimizers are already summed."""
    return this_thread.gradients_are_summed


def note_summed() -> None:
    """Records that the gradients of this thread's optimizer have now been summed."""
    this_thread.summations += 1
    if this_thread.optimizers:
        this_thread.gradients_are_summed = True


@contextlib.contextmanager
def must_sum(optimizer: Any, variables: Any) -> Iterator[None]:
    """Checks that the gradients of an optimizer applied within this context are summed.

    Args:
        optimizer: the optimizer.
        variables: the variables that it trains.

    Raises:
        UnsupportedError: the gradients were not summed.
    """
    before, done = this_thread.summations, this_thread.gradients_are_summed
    yield
    # In eager mode, accumulated gradients are summed in another step.
    later = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
    if not (done or later or this_thread.summations > before):
        names = ", ".join(str(getattr(v, "path", v.name)) for v in list(variables)[:3])
        raise UnsupportedError(
            "An optimizer must apply gradients summed over the replicas. Received: "
            f"{type(optimizer).__name__}, which has updated {names}, … with the gradients of one "
            "replica. Call the `apply` of keras.optimizers.Optimizer in its `apply`."
        )


def own_parts(gradients: Sequence[Any]) -> list[Any]:
    """This replica's contribution to the sums of an optimizer's gradients; None stays None."""
    step = current_step()
    if step is None or this_thread.gradients_are_summed:
        return list(gradients)
    return step.own_parts(gradients)


def sum_gradients(optimizer: Any, grads: Any, variables: Any = ()) -> list[Any]:
    """Sums an optimizer's gradients over all replicas; None stays None.

    Args:
        optimizer: the optimizer.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient, if the gradients may be compressed or belong to
            variables shared by stages.
    """
    given = list(grads)
    present = [g for g in given if g is not None]
    if not present:
        return given
    step = current_step()
    if step is not None:
        present = step.contributions(present)
    extended = extended_of(tf.distribute.get_strategy())
    exact = functools.partial(extended.sum_over_replicas, name="gradients")
    compressor = compressor_in_use()

    if isinstance(step, GlobalStep) and not isinstance(step, EagerGlobalStep):
        # Slices are completed where they are used: gathered, or reduced if their rows are constant.
        exact = functools.partial(_exactly_but_slices, exact)

    def add_up(gradients: Sequence[Any], owners: Sequence[Any]) -> list[Any]:
        if compressor is None:
            return list(exact(list(gradients)))
        return list(compressor.sum(optimizer, gradients, owners, exact))

    if not variables:
        sums = iter(exact(present))
    else:
        owners = [v for g, v in zip(given, variables, strict=True) if g is not None]
        by_step = add_up if step is None else functools.partial(step.sum_gradients_of_part, add_up)
        sums = iter(by_step(present, owners))
    if isinstance(step, GlobalStep):
        sums = iter(equal_everywhere(list(sums)))
    results = [None if g is None else next(sums) for g in given]
    clips_later = step is not None and step.clips_together and optimizer.global_clipnorm
    if not (is_sharded(optimizer) or clips_later):
        announce_update(results)
    return results


def _exactly_but_slices(exact: Callable[..., Any], gradients: Sequence[Any]) -> list[Any]:
    """Sums dense gradients, and leaves slices unchanged."""
    results = list(gradients)
    dense = [i for i, g in enumerate(results) if not isinstance(g, tf.IndexedSlices)]
    if dense:
        for i, total in zip(dense, exact([results[i] for i in dense]), strict=True):
            results[i] = total
    return results


def combine_overwriting(grads: Any, variables: Any) -> tuple[list[Any], list[int]]:
    """Makes gradients that overwrite their variables equal on all replicas.

    In float8 layers, these are the largest values that a layer has seen, and scales derived from
    the largest values of previous steps.

    Args:
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient.

    Returns:
        All gradients, and the indices of the overwriting ones.

    Raises:
        UnsupportedError: the values would differ from the values in a single process.
    """
    results = list(grads)
    pairs = enumerate(zip(results, variables, strict=True))
    indices = [i for i, (g, v) in pairs if g is not None and is_overwritten(v)]
    if not indices:
        return results, []
    step = current_step()
    if step is None:
        raise UnsupportedError(
            "A float8 layer records the largest gradients of the backward pass, which cover the "
            f"global batch only in a `train_step`. Received: {variables[indices[0]].path!r}, "
            "trained by several replicas in a custom loop. Use `fit`, or another dtype policy."
        )
    largest = step.largest_over_replicas([results[i] for i in indices])
    for i, value in zip(indices, largest, strict=True):
        results[i] = value
    this_thread.summations += 1
    return results, indices


def sum_or_combine(optimizer: Any, grads: Any, variables: Any, exactly: bool) -> list[Any]:
    """Sums gradients over all replicas, and equalizes gradients that overwrite variables.

    Args:
        optimizer: the optimizer.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient.
        exactly: whether to disable compression.
    """
    variables = list(variables)
    combined, indices = combine_overwriting(grads, variables)
    others = [None if i in indices else g for i, g in enumerate(combined)]
    sums = sum_gradients(optimizer, others, () if exactly else variables)
    for i in indices:
        sums[i] = combined[i]
    return sums


def not_finite_anywhere(gradients: Any, add_up: Callable[[tf.Tensor], Any]) -> tf.Tensor:
    """Whether any gradient is not finite on any participant; a bool scalar.

    Collective over the participants, including those without gradients.

    Args:
        gradients: dense tensors, `tf.IndexedSlices` or None.
        add_up: sums a number over the participants.
    """
    finite = [tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients if g is not None]
    found = add_up(tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.int32))
    overflowed: tf.Tensor = equal_everywhere([found])[0] > 0
    return overflowed


def with_nan(gradients: Any, overflowed: tf.Tensor) -> list[Any]:
    """Sets one of the gradients to NaN if `overflowed`, so that Keras skips the step."""
    grads: list[Any] = list(gradients)
    present = [i for i, g in enumerate(grads) if g is not None]
    if not present:
        return grads
    dense = [i for i in present if not isinstance(grads[i], tf.IndexedSlices)]
    marked = next((i for i in dense if 0 not in grads[i].shape), present[0])
    grads[marked] = _marked(grads[marked], overflowed)
    return grads


def _marked(gradient: Any, overflowed: tf.Tensor) -> Any:
    """The gradient, or NaN after an overflow."""
    values = _values(gradient)
    nan = tf.cast(float("nan"), values.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.where(overflowed, nan, values)
    # The slices may be empty on this replica.
    row = tf.fill(tf.concat([[1], tf.shape(values)[1:]], axis=0), nan)
    first = tf.zeros([1], gradient.indices.dtype)
    more = tf.cast(overflowed, tf.int32)
    return tf.IndexedSlices(
        tf.concat([values, row[:more]], axis=0),
        tf.concat([gradient.indices, first[:more]], axis=0),
        gradient.dense_shape,
    )


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
