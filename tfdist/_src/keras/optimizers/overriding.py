"""Optimizers that override Keras's gradient processing: they receive the sums.

Such a class may process gradients nonlinearly, and may update variables directly. Given the sums of
all replicas, it behaves on each replica as in a single process. The overridden methods are replaced
on each instance, so the class is unchanged.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from tfdist._src.internals.optimizer import overrides, scales_losses
from tfdist._src.keras.optimizers.applying import check_alone, prepare, updated_now, variables_of
from tfdist._src.keras.optimizers.gradient_sync import (
    are_summed,
    in_apply,
    in_replica,
    must_sum,
    note_summed,
    sum_or_combine,
    sum_over_replicas,
)
from tfdist._src.keras.patching import patch
from tfdist._src.sharding.sharded import is_sharded



def install() -> None:
    """Wraps the constructor of optimizers."""
    patch("TFOptimizer.__init__", _giving_sums_to_overriding)


def _giving_sums_to_overriding(init: Method) -> Method:
    def init_given_sums(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # A loss-scaling optimizer has its gradients summed by the method that it overrides.
        for name, giving_sums in {} if scales_losses(self) else _OVERRIDABLE.items():
            if overrides(self, name):
                method = giving_sums(getattr(type(self), name))
                setattr(self, name, types.MethodType(method, self))

    return init_given_sums


def _given_sums(apply: Method) -> Method:
    @functools.wraps(apply)
    def call(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(grads)
        variables = variables_of(self, trainable_variables)
        if not in_replica():
            check_alone(self, variables)
        if not in_replica() or are_summed() or not grads:
            return apply(self, grads, trainable_variables)
        prepare(self, grads, trainable_variables)
        with in_apply(), must_sum(self, variables):
            if not is_sharded(self):  # Otherwise Keras's `apply`, which it must call, shards them.
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
            grads = sum_over_replicas(self, grads, updated_now())
            note_summed()
        return clip(self, grads)

    return call


_OVERRIDABLE = {
    "apply": _given_sums,
    "apply_gradients": _given_sums_in_pairs,
    "_backend_apply_gradients": _given_sums,
    "_clip_gradients": _given_sums_to_clip,
}
