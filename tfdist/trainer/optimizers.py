"""Optimizers that weigh the gradients by rows, and sum them over the replicas before they clip.

Keras clips each replica's gradients and sums them afterwards, which is not what one process does.
Here the sum comes first: at the last moment before clipping, so that accumulated gradients cross
the network once per update; and before the check for overflow where the loss is scaled, so that
all replicas skip a step together. A class that overrides one of Keras's methods on this way may do
anything with the gradients, so it is given the sums. `tfdist.trainer.replicas` says how they are
weighed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.optimizer import (
    apply_scaled,
    overrides,
    scales_losses,
    strategy_of,
    updating_optimizers,
)
from tfdist.sharding.sharded import sharded_by, shares_out, trained_by
from tfdist.strategies import reduction
from tfdist.strategies.step import current_step
from tfdist.trainer.patching import patch
from tfdist.trainer.replicas import (
    are_summed,
    combine_overwriting,
    compressor_in_use,
    gradients_are,
    has_replicas,
    in_replica,
    must_sum,
    not_finite_anywhere,
    note_summed,
    sum_or_combine,
    sum_over_replicas,
    weigh,
    with_nan,
)
from tfdist.trainer.sharded_optimizers import clip_shards

Method = Callable[..., Any]


def install() -> None:
    """Replaces where Keras's optimizers weigh and sum gradients in a tfdist replica."""
    patch("BaseOptimizer.scale_loss", _weighing_loss)
    patch("LossScaleOptimizer.scale_loss", _weighing_loss)
    patch("TFOptimizer.__init__", _giving_sums_to_overriding)
    patch("BaseOptimizer.apply", _applying)
    patch("BaseOptimizer._overwrite_variables_directly_with_gradients", _combining)
    patch("BaseOptimizer._backend_apply_gradients", _weighing)
    patch("BaseOptimizer._clip_gradients", _summing_before)
    patch("TFOptimizer._all_reduce_sum_gradients", _summing_unless_done)
    patch("LossScaleOptimizer.apply", _applying_scaled)
    patch("LossScaleOptimizer._tf_apply", _in_this_replica)


class _Here(threading.local):
    variables: Sequence[Any] = ()  # Those whose gradients an optimizer of this thread is given.


_here = _Here()


def _weighing_loss(scale_loss: Method) -> Method:
    def scale_weighed_loss(self: Any, loss: Any) -> Any:
        step = current_step()
        return scale_loss(self, loss if step is None else step.weigh_loss(loss))

    return scale_weighed_loss


def _applying(apply: Method) -> Method:
    def apply_in_replica(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = _variables(self, trainable_variables)
        if not in_replica():
            _check_alone(self, variables)
            return apply(self, grads, trainable_variables)
        _prepare(self, grads, trainable_variables)
        if not grads:
            return apply(self, grads, trainable_variables)
        with must_sum(self, variables), _unrecorded():
            return apply(self, grads, trainable_variables)

    return apply_in_replica


def _combining(overwrite: Method) -> Method:
    def overwrite_alike(self: Any, grads: Any, variables: Any) -> Any:
        if (in_replica() or current_step() is not None) and not are_summed():
            grads, _ = combine_overwriting(grads, variables)
        return overwrite(self, grads, variables)

    return overwrite_alike


def _weighing(apply_gradients: Method) -> Method:
    def apply_weighed(self: Any, grads: Any, trainable_variables: Any) -> Any:
        outer, _here.variables = _here.variables, trainable_variables
        try:
            grads = weigh(grads) if in_replica() else grads
            with gradients_are(weighed=True):
                return apply_gradients(self, grads, trainable_variables)
        finally:
            _here.variables = outer

    return apply_weighed


def _summing_before(clip: Method) -> Method:
    def clip_sums(self: Any, grads: Any) -> Any:
        sharded = sharded_by(self)
        if sharded is not None:
            return clip_shards(self, sharded, grads, _here.variables, clip)
        if in_replica() and not are_summed():
            grads = sum_over_replicas(self, grads, _here.variables)
            note_summed()
        step = current_step()
        if step is not None and self.global_clipnorm:
            return step.clip_by_global_norm(grads, _here.variables, self.global_clipnorm)
        return clip(self, grads)

    return clip_sums


def _summing_unless_done(sum_gradients: Method) -> Method:
    def sum_unless_done(self: Any, grads_and_vars: Any) -> Any:
        if not in_replica():
            return sum_gradients(self, grads_and_vars)
        if are_summed():
            return grads_and_vars
        grads, variables = zip(*grads_and_vars, strict=True)
        sums = sum_over_replicas(self, grads, variables)
        note_summed()
        return list(zip(sums, variables, strict=True))

    return sum_unless_done


def _applying_scaled(apply: Method) -> Method:
    def apply_sums(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = _variables(self, trainable_variables)
        if not in_replica():
            _check_alone(self, variables)
            return apply(self, grads, trainable_variables)
        _prepare(self, grads, trainable_variables)
        step = current_step()
        with _unrecorded():
            if are_summed() or (step is not None and step.agreed_on_overflow):
                return apply(self, grads, trainable_variables)
            if compressor_in_use() is None and not shares_out(self):
                grads = sum_or_combine(self, grads, variables, exactly=True)
                with gradients_are(summed=True):
                    return apply(self, grads, trainable_variables)
            # What is lost must not be scaled by what changes from step to step, nor come from a
            # step that is skipped; so all agree to skip first, and sum what is no longer scaled.
            if step is not None:
                grads = step.zero_without_rows(grads)
            broken = not_finite_anywhere(grads, reduction.sum_over_replicas)
            return apply(self, with_nan(grads, broken), trainable_variables)

    return apply_sums


def _in_this_replica(apply: Method) -> Method:
    # Keras would merge the replicas, whose gradients are finite on all of them or on none.
    def apply_here(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if in_replica():
            return apply_scaled(self, grads, trainable_variables)
        return apply(self, grads, trainable_variables)

    return apply_here


def _giving_sums_to_overriding(init: Method) -> Method:
    def init_given_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # One that scales losses has its gradients summed by the method that it overrides.
        for name, giving_sums in {} if scales_losses(self) else _OVERRIDABLE.items():
            if overrides(self, name):
                method = giving_sums(getattr(type(self), name))
                setattr(self, name, types.MethodType(method, self))

    return init_given_sums


def _given_sums(apply: Method) -> Method:
    @functools.wraps(apply)
    def call(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = _variables(self, trainable_variables)
        if not in_replica():
            _check_alone(self, variables)
        if not in_replica() or are_summed() or not grads:
            return apply(self, grads, trainable_variables)
        _prepare(self, grads, trainable_variables)
        with gradients_are(), must_sum(self, variables), _unrecorded():
            if not shares_out(self):  # Keras's `apply`, which it must call, shares them out.
                grads = sum_or_combine(self, grads, variables, exactly=False)
                note_summed()
            return apply(self, grads, trainable_variables)

    return call


def _given_sums_in_pairs(apply_gradients: Method) -> Method:
    @functools.wraps(apply_gradients)
    def call(self: Any, grads_and_vars: Any) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)

        def apply(self: Any, grads: Any, variables: Any) -> Any:
            return apply_gradients(self, list(zip(grads, variables, strict=True)))

        return _given_sums(apply)(self, grads, variables)

    return call


def _given_sums_to_clip(clip: Method) -> Method:
    @functools.wraps(clip)
    def call(self: Any, grads: Any) -> Any:
        if in_replica() and not are_summed():
            grads = sum_over_replicas(self, grads, _here.variables)
            note_summed()
        return clip(self, grads)

    return call


_OVERRIDABLE = {
    "apply": _given_sums,
    "apply_gradients": _given_sums_in_pairs,
    "_backend_apply_gradients": _given_sums,
    "_clip_gradients": _given_sums_to_clip,
}


def _variables(optimizer: Any, given: Any) -> list[Any]:
    return trained_by(optimizer) if given is None else list(given)


def _check_alone(optimizer: Any, variables: Sequence[Any]) -> None:
    """Checks that gradients that are applied outside of replicas are of a single one."""
    values = [v.value if isinstance(v, keras.Variable) else v for v in variables[:1]]
    made_under = [getattr(v, "distribute_strategy", None) for v in values]
    if any(has_replicas(strategy) for strategy in (strategy_of(optimizer), *made_under)):
        raise UnsupportedError(
            "Optimizers are applied where the gradients of all replicas can be summed. Received: "
            f"a call of {type(optimizer).__name__} outside of `strategy.run`. Compute the "
            "gradients and apply them in a function that all workers give to `strategy.run`."
        )


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """While it lasts the step takes no note of what is written: it is the same on all replicas."""
    step = current_step()
    if step is None:
        yield
        return
    written = dict(step.written)
    try:
        yield
    finally:
        step.written = written


def _prepare(optimizer: Any, grads: Sequence[Any], trainable_variables: Any) -> None:
    """Makes what compression keeps: variables cannot be made in an optimizer's conditionals."""
    compressor = compressor_in_use()
    if compressor is None:
        return
    if tf.executing_eagerly() and len(tf.distribute.get_strategy().extended.worker_devices) > 1:
        raise UnsupportedError(
            "Gradients of several devices per worker cannot be compressed eagerly. Compile "
            "the model with run_eagerly=False, or leave `compression` out."
        )
    if not optimizer.built:
        if trainable_variables is None:
            return  # Keras says what is wrong.
        optimizer.build(list(trainable_variables))
    given = zip(grads, _variables(optimizer, trainable_variables), strict=False)
    slices = {id(v) for g, v in given if isinstance(g, tf.IndexedSlices)}
    step = current_step()
    for own in updating_optimizers(optimizer):
        trained = trained_by(own)
        sparse = [v for v in trained if id(v) in slices]
        elsewhere = [v for v in trained if step is not None and not step.sums(v)]
        compressor.prepare(own, trained, sparse, elsewhere)
