"""Sums the gradients of replicas, checks them for overflow, and applies them at a step's end.

Keras's `train_step` applies the gradients and then computes the metrics, which are also summed over
the replicas. If a worker died between the two, the other workers would have new weights although
the step failed. Therefore the update is deferred to the end of the step, which usually does not
change the results. The order matters if the update and a later operation use the same variable, and
at least one of them writes it. In this case, the step is traced again in Keras's order. For
example, a metric may read the optimizer's iterations, or it may draw noise with the same seed
generator as the update. The step is also traced again if the update stores a tensor as an attribute
of the optimizer, such as a norm for the logs, or if the code after the update fails.

With gradient accumulation, gradients are summed over the replicas after they have been accumulated,
so that they are communicated only once per update. `applying.py` describes the exceptions.
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
        fails: whether the trace must be discarded, either because the step needs the results of its
            update before the end, or because tracing has failed and may have needed them.
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
        communicated: other communicated values for which the update must wait, besides the values
            that are passed to `announce_update`.
        running: whether the update is being traced.
        left: the `id`s of the tensors that were attributes of the optimizer before the update.
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
        """The resource handles of the variables that the update may write."""
        optimizer = self.optimizer
        variables = [*variables_written_by(optimizer), *trained_by(optimizer)]
        sharded = sharded_by(optimizer)
        variables += [] if sharded is None else sharded.shards
        return resources_of(variables)


@contextlib.contextmanager
def putting_off(optimizer: Any, step: Step) -> Iterator[None]:
    """Defers the optimizer's updates in this context until `update_late` is called.

    Args:
        optimizer: the model's optimizer; may be None.
        step: the step, which decides whether updates may be deferred.
    """
    if step.late_in is None or not hasattr(optimizer, "__dict__"):
        yield
        return
    own = vars(optimizer)
    # An attribute of the optimizer may already override these methods.
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
        # If a branch of a conditional computes gradients, they must be applied inside this branch.
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
        step: the step, which is about to end.
        trial: the attempt to defer the update. It is marked as failed if the results of the step
            depend on whether the update runs before or after the operations that were traced since
            it was deferred. Even then, the trace is completed, because TensorFlow initializes new
            variables only if the trace completes.
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
    """Yields the `id`s of graph tensors in an optimizer's attributes, including lists and dicts."""
    for part in (*wrappers(optimizer), *updating_optimizers(optimizer)):
        for value in vars(part).values():
            value = list(value.values()) if isinstance(value, dict) else value
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (id(v) for v in values if tf.is_symbolic_tensor(v))


def _taken(operations: Iterable[tf.Operation]) -> dict[str, bool]:
    """Maps the name of each resource that operations use to whether an operation may write it."""
    taken: dict[str, bool] = {}
    for operation in operations:
        for value in operation.inputs:
            if value.dtype == tf.resource:
                while value.op.type == "Identity":
                    value = value.op.inputs[0]
                taken[value.name] = taken.get(value.name, False) or operation.type not in READS
    return taken


def announce_update(arrived: Sequence[Any]) -> None:
    """Marks the place in the step's graph at which the update has finished its communication.

    Args:
        arrived: the values that were communicated, dense or `tf.IndexedSlices`; may contain None.
    """
    step = current_step()
    if step is None or step.late is None or not step.late.running:
        return
    tensors = tf.nest.flatten([v for v in arrived if v is not None], expand_composites=True)
    with tf.control_dependencies([*tensors, *step.late.communicated]):
        tokens.update_begins(step.late.resources)


def resources_of(variables: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the resource handles of this replica's copies of variables, without duplicates."""
    copies = [_copy(variable) for variable in variables]
    return list({id(copy.handle): copy.handle for copy in copies}.values())


def _copy(variable: Any) -> Any:
    value = getattr(variable, "value", variable)
    value = variable if callable(value) else value  # `tf.Variable.value` is a method
    return copy_here(value) if hasattr(value, "values") else value


def in_replica() -> bool:
    """Whether this code runs in a replica of a strategy for which `has_replicas` is True."""
    context = tf.distribute.get_replica_context()
    return context is not None and has_replicas(context.strategy)


def has_replicas(strategy: Any) -> bool:
    """Whether a strategy is a tfdist strategy that has or may get several replicas."""
    extended = extended_if_ours(strategy)
    return extended is not None and extended.communicates


def compressor_in_use() -> Any:
    """Returns the compressor of the replicas' gradients; None if they are not compressed."""
    if not in_replica():
        return None
    compressor = extended_of(tf.distribute.get_strategy()).compressor
    if compressor is None:
        return None
    compressor.note_traced()
    return compressor if compressor.active else None


@contextlib.contextmanager
def in_apply(*, summed: bool = False) -> Iterator[None]:
    """Records, in this context, that this thread applies an optimizer.

    Args:
        summed: whether the gradients of the optimizer are already summed over the replicas.
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
    """Whether the gradients that this thread's optimizers apply are already summed."""
    return this_thread.gradients_are_summed


def note_summed() -> None:
    """Records that the gradients of this thread's optimizer have been summed over the replicas."""
    this_thread.summations += 1
    if this_thread.optimizers:
        this_thread.gradients_are_summed = True


@contextlib.contextmanager
def must_sum(optimizer: Any, variables: Any) -> Iterator[None]:
    """Checks that an optimizer sums its gradients over the replicas in this context.

    Args:
        optimizer: the optimizer.
        variables: the variables that the optimizer trains.

    Raises:
        UnsupportedError: the gradients were not summed.
    """
    before, done = this_thread.summations, this_thread.gradients_are_summed
    yield
    # In eager mode, gradients that are accumulated in this step are summed in a later step.
    later = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
    if not (done or later or this_thread.summations > before):
        names = ", ".join(str(getattr(v, "path", v.name)) for v in list(variables)[:3])
        raise UnsupportedError(
            "An optimizer must apply gradients summed over the replicas. Received: "
            f"{type(optimizer).__name__}, which has updated {names}, … with the gradients of one "
            "replica. Call the `apply` of keras.optimizers.Optimizer in its `apply`."
        )


def own_parts(gradients: Sequence[Any]) -> list[Any]:
    """Returns this replica's contributions to the sums of gradients; None stays None."""
    step = current_step()
    if step is None or this_thread.gradients_are_summed:
        return list(gradients)
    return step.own_parts(gradients)


def sum_gradients(optimizer: Any, grads: Any, variables: Any = ()) -> list[Any]:
    """Sums an optimizer's gradients over all replicas; None stays None.

    Args:
        optimizer: the optimizer.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient. They must be given if the gradients may be
            compressed, or if stages share variables.
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
        # Sparse gradients are not summed here. The partitioned graph gathers or reduces their
        # slices where they are used.
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
    """Sums dense gradients, and leaves `tf.IndexedSlices` unchanged."""
    results = list(gradients)
    dense = [i for i, g in enumerate(results) if not isinstance(g, tf.IndexedSlices)]
    if dense:
        for i, total in zip(dense, exact([results[i] for i in dense]), strict=True):
            results[i] = total
    return results


def combine_overwriting(grads: Any, variables: Any) -> tuple[list[Any], list[int]]:
    """Combines, over all replicas, the gradients that overwrite their variables.

    Keras assigns such gradients directly to their variables. The variables belong to float8 layers,
    and contain the largest values that a layer has seen, and scales derived from the largest values
    of earlier steps. So the replicas use the maximum of their gradients instead of the sum.

    Args:
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient.

    Returns:
        All gradients, and the indices of the gradients that overwrite their variables.

    Raises:
        UnsupportedError: the gradients belong to a custom training loop, where they do not cover
            the global batch.
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
    """Sums gradients over all replicas, except for gradients that overwrite their variables.

    `combine_overwriting` handles the exceptions.

    Args:
        optimizer: the optimizer.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient.
        exactly: whether to sum without compression.
    """
    variables = list(variables)
    combined, indices = combine_overwriting(grads, variables)
    others = [None if i in indices else g for i, g in enumerate(combined)]
    sums = sum_gradients(optimizer, others, () if exactly else variables)
    for i in indices:
        sums[i] = combined[i]
    return sums


def not_finite_anywhere(gradients: Any, add_up: Callable[[tf.Tensor], Any]) -> tf.Tensor:
    """Returns whether any gradient of any participant is not finite, as a bool scalar.

    All participants must call this function, even participants without gradients.

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
    """Returns the gradient, or NaN if `overflowed`."""
    values = _values(gradient)
    nan = tf.cast(float("nan"), values.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.where(overflowed, nan, values)
    # This replica may have no slices, so a slice of NaN is appended.
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
