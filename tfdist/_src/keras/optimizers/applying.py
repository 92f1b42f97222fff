"""What all wrappers of `Optimizer.apply` share, inside and outside of replicas."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm.spans import GraphSpan
from tfdist._src.internals.keras import BaseOptimizer
from tfdist._src.internals.optimizer import (
    inner_optimizer,
    key_of,
    strategy_of,
    updating_optimizers,
)
from tfdist._src.internals.optimizer_build import (
    Unbuilt,
    build_again,
    build_multi_again,
    has_updated,
    is_multi,
    noting_unbuilt,
)
from tfdist._src.keras.optimizers.gradient_sync import compressor_in_use, has_replicas
from tfdist._src.sharding.sharded import trained_by
from tfdist._src.strategy.step import current_step
from tfdist.errors import UnsupportedError


class _Update:
    """An optimizer's update of variables, from when it has the summed gradients."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = variables
        self.span: GraphSpan | None = None

    def end(self) -> None:
        """Ends its span, after the variables have been written."""
        if self.span is not None:
            self.span.end("optimizer", "update")


class _Here(threading.local):
    update = _Update(())


_here = _Here()


@contextlib.contextmanager
def updating(variables: Sequence[Any]) -> Iterator[_Update]:
    """Within this context, an optimizer of this thread updates these variables."""
    outer, _here.update = _here.update, _Update(variables)
    try:
        yield _here.update
    finally:
        _here.update = outer


def updated_now() -> Sequence[Any]:
    """The variables that an optimizer of this thread is updating."""
    return _here.update.variables


def begin_update(gradients: Sequence[Any]) -> None:
    """Records that the running update begins when these gradients exist."""
    _here.update.span = GraphSpan(gradients)


def variables_of(optimizer: Any, given: Any) -> list[Any]:
    """The variables of an optimizer's gradients, as given or as the optimizer was built for."""
    return trained_by(optimizer) if given is None else list(given)


# Optimizers, without those around them that scale the loss.
_built_early: weakref.WeakKeyDictionary[Any, Unbuilt] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def building_early(outermost: Any) -> Iterator[None]:
    """Within this context, an optimizer may be built before the first step, unlike in one process.

    The step may train other variables than the model has by then: those that a callback unfreezes,
    or that only the step creates. So `build_as_used` may build it again until `keep_build`.

    Args:
        outermost: the model's optimizer; may be None.
    """
    optimizer = inner_optimizer(outermost)
    if not isinstance(optimizer, BaseOptimizer) or optimizer.built:
        yield
        return
    with noting_unbuilt(optimizer) as unbuilt:
        try:
            yield
        finally:
            if optimizer.built:
                _built_early[optimizer] = unbuilt


def keep_build(outermost: Any, *, if_updated: bool = False) -> None:
    """Has `build_as_used` leave an optimizer as it is built.

    Args:
        outermost: the model's optimizer; may be None.
        if_updated: whether to do so only if it has updated variables, also before a restart.
    """
    optimizer = inner_optimizer(outermost)
    if not isinstance(optimizer, BaseOptimizer) or optimizer not in _built_early:
        return
    if not if_updated or any(map(has_updated, (optimizer, *updating_optimizers(optimizer)))):
        del _built_early[optimizer]


def build_as_used(outermost: Any, variables: Sequence[Any]) -> None:
    """Builds an optimizer that was built early again, if it is to update other variables."""
    optimizer = inner_optimizer(outermost)
    if optimizer not in _built_early:
        return
    unbuilt = _built_early[optimizer]
    known, used = (
        {key_of(optimizer, v) for v in some} for some in (trained_by(optimizer), variables)
    )
    if is_multi(optimizer):  # It takes gradients of all the variables that it was built for.
        if used != known:
            build_multi_again(optimizer, variables, unbuilt)
    elif not used <= known:
        ((_, own),) = unbuilt.variables
        build_again(optimizer, list(variables), own)


def check_alone(optimizer: Any, variables: Sequence[Any]) -> None:
    """Checks that gradients applied outside of replicas belong to a single replica.

    Args:
        optimizer: the optimizer that applies them.
        variables: the variables that it would update.

    Raises:
        UnsupportedError: there are several replicas, whose gradients would not be summed.
    """
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables[:1]]
    made_under = [getattr(v, "distribute_strategy", None) for v in values]
    if any(has_replicas(strategy) for strategy in (strategy_of(optimizer), *made_under)):
        raise UnsupportedError(
            "Optimizers must be applied where the gradients of all replicas can be summed. "
            f"Received: a call of {type(optimizer).__name__} outside of `strategy.run`. Compute "
            "the gradients and apply them in a function that all workers pass to `strategy.run`."
        )


def prepare(optimizer: Any, grads: Sequence[Any], trainable_variables: Any) -> None:
    """Creates the state of compression, as an optimizer's conditionals cannot create variables.

    Args:
        optimizer: the optimizer that will apply the gradients.
        grads: dense tensors, `tf.IndexedSlices` or None.
        trainable_variables: as passed to the optimizer; may be None.

    Raises:
        UnsupportedError: the gradients cannot be compressed here.
    """
    compressor = compressor_in_use()
    if compressor is None:
        return
    if tf.executing_eagerly() and len(tf.distribute.get_strategy().extended.worker_devices) > 1:
        raise UnsupportedError(
            "With several devices per worker, gradients cannot be compressed eagerly. Compile "
            "the model with run_eagerly=False, or leave `compression` out."
        )
    if not optimizer.built:
        if trainable_variables is None:
            return  # Keras raises the error.
        optimizer.build(list(trainable_variables))
    given = zip(grads, variables_of(optimizer, trainable_variables), strict=False)
    slices = {id(v) for g, v in given if isinstance(g, tf.IndexedSlices)}
    step = current_step()
    for own in updating_optimizers(optimizer):
        trained = trained_by(own)
        sparse = [v for v in trained if id(v) in slices]
        elsewhere = [v for v in trained if step is not None and not step.sums(v)]
        compressor.prepare(own, trained, sparse, elsewhere)
