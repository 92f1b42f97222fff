"""The gradients of replicas: weighed by their rows, summed, and known to overflow by all.

A replica's gradients are those of a mean over its own rows, so they are weighted by its share of
all rows, and summed. The weight comes in by one of three ways (`Step.weighed`), never by which
optimizer a loss has met:

- In Keras's own `train_step` all gradients are those of one loss, which goes through the
  optimizer's `scale_loss`. That loss is weighed, before the backward pass. It costs nothing, and
  the backward pass sees the numbers of one process: overflows in float16 happen at the same loss
  scale, and what is not linear in it (float8 layers, clipping in a custom gradient) is exact.
- In a `train_step` of one's own nobody knows which losses an optimizer's gradients come from, or
  whether they were scaled, so the gradients are weighed where an optimizer takes them up.
- The gradients of a pipeline come weighted by the rows of each microbatch.

They are weighed before they are accumulated, since the shares differ from step to step, and
summed after that, so that they cross the network once per update.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.optimizer import is_overwritten
from tfdist.strategies import reduction
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.step import current_step


class _Progress(threading.local):
    """How far the gradients have come that the optimizers of this thread are given."""

    applying = 0  # How many optimizers are being applied, one inside another.
    weighed = False
    summed = False
    sums = 0  # How many there were.


_progress = _Progress()


def in_replica() -> bool:
    """Whether the caller is one of several replicas of a tfdist strategy."""
    context = tf.distribute.get_replica_context()
    return context is not None and has_replicas(context.strategy)


def has_replicas(strategy: Any) -> bool:
    """Whether a strategy is one of tfdist with several replicas."""
    ours = isinstance(getattr(strategy, "extended", None), ReplicatedExtended)
    return ours and strategy.num_replicas_in_sync > 1


def compressor_in_use() -> Any:
    """What compresses the replicas' gradients; None where nothing does."""
    if not in_replica():
        return None
    compressor = tf.distribute.get_strategy().extended.compressor
    return compressor if compressor is not None and compressor.active else None


@contextlib.contextmanager
def gradients_are(*, weighed: bool = False, summed: bool = False) -> Iterator[None]:
    """While it lasts optimizers of this thread are given gradients that have come this far."""
    before = _progress.weighed, _progress.summed
    _progress.weighed, _progress.summed = before[0] or weighed or summed, before[1] or summed
    _progress.applying += 1
    try:
        yield
    finally:
        _progress.applying -= 1
        _progress.weighed, _progress.summed = before


def are_summed() -> bool:
    """Whether an optimizer of this thread is given gradients that are summed already."""
    return _progress.summed


def note_summed() -> None:
    """Notes that the gradients are summed now which an optimizer of this thread is given."""
    _progress.sums += 1
    if _progress.applying:
        _progress.weighed = _progress.summed = True


@contextlib.contextmanager
def must_sum(optimizer: Any, variables: Any) -> Iterator[None]:
    """Checks that an optimizer that is applied while it lasts has its gradients summed.

    Args:
        optimizer: any.
        variables: what it trains.

    Raises:
        UnsupportedError: nobody has summed them.
    """
    before, done = _progress.sums, _progress.summed
    yield
    # Eagerly, those that are accumulated are summed in another step.
    later = tf.executing_eagerly() and optimizer.gradient_accumulation_steps
    if not (done or later or _progress.sums > before):
        names = ", ".join(str(getattr(v, "path", v.name)) for v in list(variables)[:3])
        raise UnsupportedError(
            "An optimizer applies gradients that are summed over the replicas. Received: "
            f"{type(optimizer).__name__}, which has updated {names}, … by those of one replica. "
            "Its `apply` must call that of keras.optimizers.Optimizer."
        )


def weigh(gradients: Sequence[Any]) -> list[Any]:
    """An optimizer's gradients, weighted by the replica's share of the rows; None stays None."""
    step = current_step()
    if step is None or _progress.weighed or all(g is None for g in gradients):
        return list(gradients)
    return step.weigh_gradients(gradients)


def sum_over_replicas(optimizer: Any, grads: Any, variables: Any = ()) -> list[Any]:
    """Sums an optimizer's gradients over all replicas, weighted by rows; None stays None.

    Args:
        optimizer: whose gradients they are.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: for each gradient its variable, where they may be compressed or shared.
    """
    weighed = weigh(grads)
    present = [g for g in weighed if g is not None]
    if not present:
        return weighed
    step = current_step()
    exact = reduction.sum_over_replicas
    compressor = compressor_in_use()

    def add_up(gradients: Sequence[Any], owners: Sequence[Any]) -> list[Any]:
        if compressor is None:
            return list(exact(list(gradients)))
        return list(compressor.sum(optimizer, gradients, owners, exact))

    if not variables:
        sums = iter(exact(present))
    else:
        owners = [v for g, v in zip(weighed, variables, strict=True) if g is not None]
        by_step = add_up if step is None else functools.partial(step.sum_over_replicas, add_up)
        sums = iter(by_step(present, owners))
    return [None if g is None else next(sums) for g in weighed]


def combine_overwriting(grads: Any, variables: Any) -> tuple[list[Any], list[int]]:
    """Makes those gradients equal on all replicas which overwrite their variables.

    Those of float8 layers are the largest numbers that a layer has met, and scales that follow from
    those of the steps before.

    Args:
        grads: tensors, `tf.IndexedSlices` or None.
        variables: for each gradient its variable.

    Returns:
        All gradients, and the places of these.

    Raises:
        UnsupportedError: they are not what one process would have.
    """
    results = list(grads)
    pairs = enumerate(zip(results, variables, strict=True))
    places = [i for i, (g, v) in pairs if g is not None and is_overwritten(v)]
    if not places:
        return results, []
    step = current_step()
    if step is None or not step.weighed:
        raise UnsupportedError(
            "A float8 layer records the largest gradients that it meets in the backward pass, "
            "which are those of the global batch in Keras's own `train_step` alone. Received: "
            f"{variables[places[0]].path!r}, trained by several replicas in a loop or a "
            "`train_step` of one's own. Train with Keras's, or with another dtype policy."
        )
    largest = step.largest_over_replicas([results[i] for i in places])
    for i, value in zip(places, largest, strict=True):
        results[i] = value
    _progress.sums += 1
    return results, places


def sum_or_combine(optimizer: Any, grads: Any, variables: Any, exactly: bool) -> list[Any]:
    """Sums gradients over all replicas, and makes those equal which overwrite their variables.

    Args:
        optimizer: whose gradients they are.
        grads: tensors, `tf.IndexedSlices` or None.
        variables: for each gradient its variable.
        exactly: whether none may be compressed.
    """
    variables = list(variables)
    combined, places = combine_overwriting(grads, variables)
    others = [None if i in places else g for i, g in enumerate(combined)]
    sums = sum_over_replicas(optimizer, others, () if exactly else variables)
    for i in places:
        sums[i] = combined[i]
    return sums


def not_finite_anywhere(gradients: Any, add_up: Callable[[tf.Tensor], Any]) -> tf.Tensor:
    """Whether any gradient is not finite on any participant; a bool scalar.

    All of them call it, also one who has no gradients, for whom the others wait.

    Args:
        gradients: dense, `tf.IndexedSlices` or None.
        add_up: sums a number over the participants.
    """
    finite = [tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients if g is not None]
    broken: tf.Tensor = add_up(tf.cast(tf.logical_not(tf.reduce_all(finite)), tf.int32)) > 0
    return broken


def with_nan(gradients: Any, broken: tf.Tensor) -> list[Any]:
    """The gradients, one of them NaN where they are `broken` anywhere; Keras skips the step."""
    grads: list[Any] = list(gradients)
    present = [i for i, g in enumerate(grads) if g is not None]
    if not present:
        return grads
    dense = [i for i in present if not isinstance(grads[i], tf.IndexedSlices)]
    marked = next((i for i in dense if 0 not in grads[i].shape), present[0])
    grads[marked] = _marked(grads[marked], broken)
    return grads


def _marked(gradient: Any, broken: tf.Tensor) -> Any:
    """The gradient, or one that is not a number."""
    values = _values(gradient)
    nan = tf.cast(float("nan"), values.dtype)
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.where(broken, nan, values)
    # It may have no rows on this replica.
    row = tf.fill(tf.concat([[1], tf.shape(values)[1:]], axis=0), nan)
    first = tf.zeros([1], gradient.indices.dtype)
    more = tf.cast(broken, tf.int32)
    return tf.IndexedSlices(
        tf.concat([values, row[:more]], axis=0),
        tf.concat([gradient.indices, first[:more]], axis=0),
        gradient.dense_shape,
    )


def _values(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
