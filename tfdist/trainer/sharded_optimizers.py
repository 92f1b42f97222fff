"""Optimizers that keep and update a share of the model's variables (ZeRO-1, arXiv 1910.02054).

Under a strategy with `shard_optimizer=True` an optimizer is built for this replica's share: flat
parts of variables, which stand for them wherever Keras's optimizers work element by element. An
update takes the replica's part of the summed gradients, changes the parts, and spreads them.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import BaseOptimizer, LossScaleOptimizer, TensorFlowOptimizer
from tfdist.internals.optimizer import Anywhere
from tfdist.sharding.elementwise import check_elementwise, check_variables
from tfdist.sharding.shard import local_variables
from tfdist.sharding.sharded import (
    ShardedVariables,
    may_share_out,
    note_sharded,
    sharded_by,
    shares_out,
)
from tfdist.strategies.step import clip_by_norm, current_step, sum_of_squares
from tfdist.trainer.replicas import compressor_in_use, in_replica, sum_over_replicas, weigh


def install() -> None:
    """Replaces where Keras's optimizers are made, built and applied."""
    TensorFlowOptimizer.__init__ = _built_for_shards(TensorFlowOptimizer.__init__)
    BaseOptimizer.apply = _applied_to_shards(BaseOptimizer.apply)
    BaseOptimizer._use_weight_decay = _asked_of_variables(BaseOptimizer._use_weight_decay)


def _built_for_shards(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def init_and_replace_build(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # One that scales losses has no slots; it builds the other one.
        if may_share_out(self) and not isinstance(self, LossScaleOptimizer):
            self.build = types.MethodType(_build, self)

    return init_and_replace_build


def _build(self: Any, variables: Sequence[Any]) -> None:
    build = type(self).build
    if not shares_out(self):
        build(self, variables)  # Plain SGD, or a copy that is made to be saved.
        return
    if self.built:
        return
    check_elementwise(self)
    check_variables(variables)
    strategy = self._distribution_strategy
    extended = strategy.extended
    device = extended.worker_devices[0]
    sharded = ShardedVariables(variables, extended.replicas[0], device)
    self._distribution_strategy = Anywhere()
    try:
        with local_variables(device):
            build(self, list(sharded.shards))
    finally:
        self._distribution_strategy = strategy
    note_sharded(self, sharded)


def _applied_to_shards(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def apply_to_shards(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not shares_out(self) or isinstance(self, LossScaleOptimizer):
            return apply(self, grads, trainable_variables)
        grads = list(grads)
        if not grads:
            return None
        if not self.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        sharded = sharded_by(self)
        if sharded is None:
            return apply(self, grads, trainable_variables)  # Keras says what is wrong.
        if not in_replica():
            raise UnsupportedError(
                "With shard_optimizer=True all workers apply their gradients together. Received: "
                "a call of an optimizer outside of `strategy.run`. Apply the gradients in a "
                "function that `strategy.run` calls."
            )
        _apply(self, apply, sharded, grads, list(trainable_variables or sharded.variables))
        return None

    return apply_to_shards


def _apply(
    self: Any,
    apply: Callable[..., Any],
    sharded: ShardedVariables,
    grads: list[Any],
    variables: list[Any],
) -> None:
    grads, variables = self._filter_empty_gradients(grads, variables)
    numbers = {self._var_key(v): n for n, v in enumerate(sharded.variables)}
    if any(self._var_key(v) not in numbers for v in variables):
        self._check_variables_are_known(variables)  # Raises.
    given: list[Any] = [None] * len(sharded.variables)
    for gradient, variable in zip(_own_or_sum(self, grads, variables), variables, strict=True):
        given[numbers[self._var_key(variable)]] = gradient
    own = sharded.of(given) if compressor_in_use() is not None else sharded.reduce(given)
    sharded.refresh()
    pairs = [(g, s) for g, s in zip(own, sharded.shards, strict=True) if g is not None]
    if pairs:
        apply(self, [g for g, _ in pairs], [s for _, s in pairs])
    else:
        # A worker may have no part of so little, and goes along. Until Keras 3.9 this counts too.
        before = tf.identity(self._iterations)
        self._backend_apply_gradients([], [])
        self._iterations.assign(before + 1)

    def publish() -> None:
        # Moving averages may overwrite what has no gradient.
        some = None if self.use_ema else {n for n, g in enumerate(given) if g is not None}
        sharded.publish(sharded.shards, some)
        for variable in variables:
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))

    steps = self.gradient_accumulation_steps
    if not steps or (self.use_ema and self.ema_overwrite_frequency):
        publish()
    else:
        tf.cond(tf.equal(tf.convert_to_tensor(self._iterations) % steps, 0), publish, lambda: None)


def _own_or_sum(self: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
    """The replica's gradients, weighed; or the sums, where they are compressed."""
    if compressor_in_use() is not None:
        return sum_over_replicas(self, grads, variables)
    step = current_step()
    return grads if step is None else weigh(step, self, grads)


def _asked_of_variables(use_weight_decay: Callable[..., Any]) -> Callable[..., Any]:
    # What is left out of weight decay is told by the model's variables and their names.
    @functools.wraps(use_weight_decay)
    def use_weight_decay_of(self: Any, variable: Any) -> Any:
        sharded = sharded_by(self)
        if sharded is not None:
            owner = sharded.owner_of(variable)
            variable = getattr(owner, "value", owner)
        return use_weight_decay(self, variable)

    return use_weight_decay_of


def clip_shards(
    optimizer: Any,
    sharded: ShardedVariables,
    gradients: Sequence[Any],
    shards: Sequence[Any],
    clip: Callable[..., Any],
) -> list[Any]:
    """Clips parts of gradients by the norms of the whole ones.

    Args:
        optimizer: says how.
        sharded: what it is built for.
        gradients: summed, this replica's parts.
        shards: whose they are.
        clip: clips elements, each by itself.
    """
    if optimizer.global_clipnorm:
        step = current_step()
        owners = [shard.variable for shard in shards]
        squares = sum_of_squares(gradients) if step is None else step.squares(gradients, owners)
        norm = tf.sqrt(sharded.total(squares))
        return clip_by_norm(gradients, optimizer.global_clipnorm, norm) if gradients else []
    if not optimizer.clipnorm:
        return list(clip(optimizer, gradients))
    sums = [tf.zeros([])] * len(sharded.variables)
    for gradient, shard in zip(gradients, shards, strict=True):
        sums[shard.piece.variable] += sum_of_squares([gradient])
    norms = tf.sqrt(sharded.total(tf.stack(sums)))
    factors = optimizer.clipnorm / tf.maximum(norms, optimizer.clipnorm)
    return [
        tf.convert_to_tensor(gradient) * tf.cast(factors[shard.piece.variable], gradient.dtype)
        for gradient, shard in zip(gradients, shards, strict=True)
    ]
