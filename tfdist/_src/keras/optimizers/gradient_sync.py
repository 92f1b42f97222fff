"""The gradients of replicas: summed, and checked for overflow together.

Gradients are summed after their accumulation, so that they cross the network once per update;
`accumulation.py` tells when not.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.internals.optimizer import is_overwritten
from tfdist._src.keras.optimizers.late_update import announce_update
from tfdist._src.sharding import is_sharded
from tfdist._src.strategy import reduction
from tfdist._src.strategy.extended import ReplicatedExtended
from tfdist._src.strategy.step import EagerGlobalStep, GlobalStep, current_step, equal_everywhere
from tfdist.errors import UnsupportedError


class _Progress(threading.local):
    """What has been done to the gradients passed to this thread's optimizers."""

    applying = 0  # The nesting depth of optimizers being applied.
    summed = False
    sums = 0  # The number of summations so far.


_progress = _Progress()


def in_replica() -> bool:
    """Whether the caller is a replica of a tfdist strategy that has others, or may have."""
    context = tf.distribute.get_replica_context()
    return context is not None and has_replicas(context.strategy)


def has_replicas(strategy: Any) -> bool:
    """Whether a strategy is a tfdist strategy with several replicas, now or later."""
    extended = getattr(strategy, "extended", None)
    return isinstance(extended, ReplicatedExtended) and extended.communicates


def compressor_in_use() -> Any:
    """The compressor of the replicas' gradients; None if they are not compressed."""
    if not in_replica():
        return None
    compressor = tf.distribute.get_strategy().extended.compressor
    if compressor is None:
        return None
    compressor.note_traced()
    return compressor if compressor.active else None


@contextlib.contextmanager
def in_apply(*, summed: bool = False) -> Iterator[None]:
    """Within this context, this thread applies an optimizer.

    Args:
        summed: whether its gradients are summed already.
    """
    before = _progress.summed
    _progress.summed = before or summed
    _progress.applying += 1
    try:
        yield
    finally:
        _progress.applying -= 1
        _progress.summed = before


def are_summed() -> bool:
    """Whether the gradients of this thread's optimizers are already summed."""
    return _progress.summed


def note_summed() -> None:
    """Records that the gradients of this thread's optimizer have now been summed."""
    _progress.sums += 1
    if _progress.applying:
        _progress.summed = True


@contextlib.contextmanager
def must_sum(optimizer: Any, variables: Any) -> Iterator[None]:
    """Checks that the gradients of an optimizer applied within this context are summed.

    Args:
        optimizer: the optimizer.
        variables: the variables that it trains.

    Raises:
        UnsupportedError: the gradients were not summed.
    """
    before, done = _progress.sums, _progress.summed
    yield
    # In eager mode, accumulated gradients are summed in another step.
    later = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
    if not (done or later or _progress.sums > before):
        names = ", ".join(str(getattr(v, "path", v.name)) for v in list(variables)[:3])
        raise UnsupportedError(
            "An optimizer must apply gradients summed over the replicas. Received: "
            f"{type(optimizer).__name__}, which has updated {names}, … by those of one replica. "
            "Call the `apply` of keras.optimizers.Optimizer in its `apply`."
        )


def own_parts(gradients: Sequence[Any]) -> list[Any]:
    """What a replica contributes to the sums of an optimizer's gradients; None stays None."""
    step = current_step()
    if step is None or _progress.summed:
        return list(gradients)
    return step.own_parts(gradients)


def sum_over_replicas(optimizer: Any, grads: Any, variables: Any = ()) -> list[Any]:
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
    exact = functools.partial(reduction.sum_over_replicas, name="gradients")
    compressor = compressor_in_use()

    if isinstance(step, GlobalStep) and not isinstance(step, EagerGlobalStep):
        # Slices are whole where they are used: gathered, or reduced if they are of constant rows.
        exact = functools.partial(_exactly_but_slices, exact)

    def add_up(gradients: Sequence[Any], owners: Sequence[Any]) -> list[Any]:
        if compressor is None:
            return list(exact(list(gradients)))
        return list(compressor.sum(optimizer, gradients, owners, exact))

    if not variables:
        sums = iter(exact(present))
    else:
        owners = [v for g, v in zip(given, variables, strict=True) if g is not None]
        by_step = add_up if step is None else functools.partial(step.sum_over_replicas, add_up)
        sums = iter(by_step(present, owners))
    if isinstance(step, GlobalStep):
        sums = iter(equal_everywhere(list(sums)))
    results = [None if g is None else next(sums) for g in given]
    clips_later = step is not None and step.clips_together and optimizer.global_clipnorm
    if not (is_sharded(optimizer) or clips_later):
        announce_update(results)
    return results


def _exactly_but_slices(exact: Callable[..., Any], gradients: Sequence[Any]) -> list[Any]:
    """Sums dense gradients."""
    results = list(gradients)
    dense = [i for i, g in enumerate(results) if not isinstance(g, tf.IndexedSlices)]
    if dense:
        for i, total in zip(dense, exact([results[i] for i in dense]), strict=True):
            results[i] = total
    return results


def combine_overwriting(grads: Any, variables: Any) -> tuple[list[Any], list[int]]:
    """Makes gradients that overwrite their variables equal on all replicas.

    In float8 layers these are the largest values that a layer has seen, and scales derived from
    those of previous steps.

    Args:
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient.

    Returns:
        All gradients, and the indices of the overwriting ones.

    Raises:
        UnsupportedError: their values would differ from those of a single process.
    """
    results = list(grads)
    pairs = enumerate(zip(results, variables, strict=True))
    indices = [i for i, (g, v) in pairs if g is not None and is_overwritten(v)]
    if not indices:
        return results, []
    step = current_step()
    if step is None:
        raise UnsupportedError(
            "A float8 layer records the largest gradients of the backward pass, which are those of "
            "the global batch only in a `train_step`. Received: "
            f"{variables[indices[0]].path!r}, trained by several replicas in a custom loop. Use "
            "`fit`, or another dtype policy."
        )
    largest = step.largest_over_replicas([results[i] for i in indices])
    for i, value in zip(indices, largest, strict=True):
        results[i] = value
    _progress.sums += 1
    return results, indices


def sum_or_combine(optimizer: Any, grads: Any, variables: Any, exactly: bool) -> list[Any]:
    """Sums gradients over all replicas, and makes those that overwrite variables equal.

    Args:
        optimizer: the optimizer.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: the variable of each gradient.
        exactly: whether to disable compression.
    """
    variables = list(variables)
    combined, indices = combine_overwriting(grads, variables)
    others = [None if i in indices else g for i, g in enumerate(combined)]
    sums = sum_over_replicas(optimizer, others, () if exactly else variables)
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
