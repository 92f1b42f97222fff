"""Optimizers that sum gradients over the replicas before clipping.

Keras clips the gradients of each replica and sums them afterwards, so its results differ from the
results of a single process. Here, the gradients are summed before they are clipped, but only after
they have been accumulated, so that they are communicated only once per update. With loss scaling,
the gradients are summed even before the check for overflow, so that all replicas skip the same
steps.

A subclass of a Keras optimizer may override methods, for example to process gradients nonlinearly
or to update variables directly. If such a method receives the sums of the gradients over all
replicas, it behaves on each replica as in a single process. So these methods are wrapped to receive
the sums. The wrappers are attributes of each optimizer instance. The class remains unchanged.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._src.internals.contract import TARGETS
from tfdist._src.internals.optimizer import apply_scaled, overrides, scales_losses
from tfdist._src.keras.optimizers import applying, gradient_sync
from tfdist._src.keras.optimizers.sharded_optimizers import clip_shards
from tfdist._src.keras.patching import patch
from tfdist._src.sharding import is_sharded, sharded_by
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.step import current_step

Method = Callable[..., Any]


def install() -> None:
    """Replaces how Keras's optimizers sum gradients, and wraps the optimizers' constructor."""
    _install_summing()
    _install_overriding()


def _install_summing() -> None:
    """Replaces how Keras's optimizers sum gradients in a tfdist replica."""
    patch("TensorFlowTrainer.train_step", _with_late_update)
    patch("BaseOptimizer.apply", _in_replica_by(_checked))
    patch("BaseOptimizer._overwrite_variables_directly_with_gradients", _combining)
    patch("BaseOptimizer._backend_apply_gradients", _summing_accumulated)
    patch("BaseOptimizer._clip_gradients", _summing_before)
    patch("TFOptimizer._all_reduce_sum_gradients", _summing_unless_done)
    patch("TFOptimizer._backend_increment_gradient_accumulators", _announcing)
    patch("LossScaleOptimizer.apply", _in_replica_by(_scaled))
    patch("LossScaleOptimizer._tf_apply", _in_this_replica)
    if "MultiOptimizer.apply" in TARGETS:
        patch("MultiOptimizer.apply", _built_as_used)


def _with_late_update(train_step: Method) -> Method:
    # This wraps Keras's `train_step`. If a model overrides `train_step` and calls Keras's method
    # from there, the wrapper runs as well.
    def train_step_with_late_update(self: Any, data: Any) -> Any:
        step = current_step()
        if step is None:
            return train_step(self, data)
        with gradient_sync.putting_off(self.optimizer, step):
            return train_step(self, data)

    return train_step_with_late_update


def _in_replica_by(apply_here: Callable[..., Any]) -> Callable[[Method], Method]:
    """Wraps `apply` so that, in a replica, `apply_here` runs instead.

    The wrapper first prepares the state of the gradient compression.
    """

    def wrap(apply: Method) -> Method:
        def apply_in_replica(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = applying.variables_of(self, trainable_variables)
            if not gradient_sync.in_replica():
                applying.check_alone(self, variables)
                applying.build_as_used(self, variables)
                return apply(self, grads, trainable_variables)
            applying.build_as_used(self, variables)
            applying.prepare(self, grads, trainable_variables)
            return apply_here(
                self, grads, variables, lambda own: apply(self, own, trainable_variables)
            )

        return apply_in_replica

    return wrap


def _built_as_used(apply: Method) -> Method:
    # The optimizers inside a `MultiOptimizer` sum their own gradients.
    def apply_as_built(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            applying.build_as_used(self, trainable_variables)
        return apply(self, grads, trainable_variables)

    return apply_as_built


def _checked(self: Any, grads: list[Any], variables: Any, apply: Callable[[Any], Any]) -> Any:
    if not grads:
        return apply(grads)
    with gradient_sync.must_sum(self, variables):
        return apply(grads)


def _combining(overwrite: Method) -> Method:
    def overwrite_combined(self: Any, grads: Any, variables: Any) -> Any:
        if (
            gradient_sync.in_replica() or current_step() is not None
        ) and not gradient_sync.are_summed():
            grads, _ = gradient_sync.combine_overwriting(grads, variables)
        return overwrite(self, grads, variables)

    return overwrite_combined


def _summing_accumulated(apply_gradients: Method) -> Method:
    def apply_own_parts(self: Any, grads: Any, trainable_variables: Any) -> Any:
        grads = gradient_sync.own_parts(grads) if gradient_sync.in_replica() else grads
        with applying.updating(trainable_variables) as update, gradient_sync.in_apply():
            if (
                gradient_sync.in_replica()
                and applying.accumulates_sums(self)
                and not gradient_sync.are_summed()
            ):
                grads = gradient_sync.sum_gradients(self, grads, trainable_variables)
                gradient_sync.note_summed()
            result = apply_gradients(self, grads, trainable_variables)
            update.end()
            return result

    return apply_own_parts


def _summing_before(clip: Method) -> Method:
    def clip_sums(self: Any, grads: Any) -> Any:
        sharded = sharded_by(self)
        if sharded is not None:
            return clip_shards(self, sharded, grads, applying.updated_now(), clip)
        if gradient_sync.in_replica() and not gradient_sync.are_summed():
            grads = gradient_sync.sum_gradients(self, grads, applying.updated_now())
            gradient_sync.note_summed()
        step = current_step()
        if gradient_sync.in_replica() or step is not None:  # otherwise, XLA may compile this
            applying.begin_update(grads)
        if step is not None and self.global_clipnorm:
            grads = step.clip_by_global_norm(grads, applying.updated_now(), self.global_clipnorm)
        else:
            grads = clip(self, grads)
        if step is not None and (not gradient_sync.in_replica() or step.clips_together):
            gradient_sync.announce_update(grads)
        return grads

    return clip_sums


def _summing_unless_done(sum_gradients: Method) -> Method:
    def sum_unless_done(self: Any, grads_and_vars: Any) -> Any:
        if not gradient_sync.in_replica():
            return sum_gradients(self, grads_and_vars)
        if gradient_sync.are_summed():
            return grads_and_vars
        grads, variables = zip(*grads_and_vars, strict=True)
        sums = gradient_sync.sum_gradients(self, grads, variables)
        gradient_sync.note_summed()
        return list(zip(sums, variables, strict=True))

    return sum_unless_done


def _announcing(accumulate: Method) -> Method:
    def accumulate_announced(self: Any, grads: Any, acc_grads: Any) -> Any:
        if sharded_by(self) is None:  # a sharded optimizer still communicates
            gradient_sync.announce_update(grads)
        return accumulate(self, grads, acc_grads)

    return accumulate_announced


def _scaled(self: Any, grads: list[Any], variables: Any, apply: Callable[[Any], Any]) -> Any:
    step = current_step()
    if gradient_sync.are_summed() or (step is not None and step.agreed_on_overflow):
        return apply(grads)
    if gradient_sync.compressor_in_use() is None and not is_sharded(self):
        sums = gradient_sync.sum_or_combine(self, grads, variables, exactly=True)
        with gradient_sync.in_apply(summed=True):
            return apply(sums)
    # The compression errors that are carried over to the next step must not depend on the loss
    # scale, which varies, and must not contain the gradients of a skipped step. So all replicas
    # first agree on whether to skip the step, and then sum the unscaled gradients.
    if step is not None:
        grads = step.contributions(grads)
    extended = extended_of(tf.distribute.get_strategy())
    overflowed = gradient_sync.not_finite_anywhere(grads, extended.sum_over_replicas)
    return apply(gradient_sync.with_nan(grads, overflowed))


def _in_this_replica(apply: Method) -> Method:
    # Keras would use a merge call to make the replicas agree on an overflow. This is not needed,
    # because the replicas have already agreed: either all replicas have finite gradients, or no
    # replica has.
    def apply_here(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if gradient_sync.in_replica():
            return apply_scaled(self, grads, trainable_variables)
        return apply(self, grads, trainable_variables)

    return apply_here


def _install_overriding() -> None:
    """Wraps the constructor of optimizers, so that overriding methods receive summed gradients."""
    patch("TFOptimizer.__init__", _giving_sums_to_overriding)


def _giving_sums_to_overriding(init: Method) -> Method:
    def init_given_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # The patched `apply` of a loss-scaling optimizer already sums its gradients.
        for name, giving_sums in {} if scales_losses(self) else _OVERRIDABLE.items():
            if overrides(self, name):
                method = giving_sums(getattr(type(self), name))
                setattr(self, name, types.MethodType(method, self))

    return init_given_sums


def _given_sums(apply: Method) -> Method:
    @functools.wraps(apply)
    def call(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = applying.variables_of(self, trainable_variables)
        if not gradient_sync.in_replica():
            applying.check_alone(self, variables)
        if not gradient_sync.in_replica() or gradient_sync.are_summed() or not grads:
            return apply(self, grads, trainable_variables)
        applying.prepare(self, grads, trainable_variables)
        with gradient_sync.in_apply(), gradient_sync.must_sum(self, variables):
            # If the optimizer is sharded, the overriding method must call Keras's `apply`, which
            # sums and shards the gradients.
            if not is_sharded(self):
                grads = gradient_sync.sum_or_combine(self, grads, variables, exactly=False)
                gradient_sync.note_summed()
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
        if gradient_sync.in_replica() and not gradient_sync.are_summed():
            grads = gradient_sync.sum_gradients(self, grads, applying.updated_now())
            gradient_sync.note_summed()
        return clip(self, grads)

    return call


_OVERRIDABLE = {
    "apply": _given_sums,
    "apply_gradients": _given_sums_in_pairs,
    "_backend_apply_gradients": _given_sums,
    "_clip_gradients": _given_sums_to_clip,
}
