"""Optimizers that keep and update a share of the model's variables (ZeRO-1, arXiv 1910.02054).

Under a strategy with `shard_optimizer=True` an optimizer is built for this replica's share: flat
parts of variables, which stand for them wherever Keras's optimizers work element by element. An
update takes the replica's part of the summed gradients, changes the parts, and spreads them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.internals.optimizer import (
    Anywhere,
    batches_of,
    check_known,
    key_of,
    scales_losses,
    strategy_of,
    under_strategy,
    update,
    without_empty,
)
from tfdist.sharding.elementwise import check_elementwise, check_variables
from tfdist.sharding.shard import local_variables
from tfdist.sharding.sharded import (
    ShardedVariables,
    is_sharded,
    may_shard,
    note_sharded,
    sharded_by,
)
from tfdist.strategies.step import clip_by_norm, current_step, sum_of_squares
from tfdist.trainer.optimizers.gradient_sync import (
    compressor_in_use,
    gradients_are,
    note_summed,
    sum_over_replicas,
    weigh,
)
from tfdist.trainer.patching import patch


def install() -> None:
    """Replaces where Keras's optimizers are made, built and applied."""
    patch("TFOptimizer.__init__", _built_for_shards)
    patch("BaseOptimizer.apply", _applied_to_shards)
    patch("BaseOptimizer._use_weight_decay", _asked_of_variables)


def _built_for_shards(init: Callable[..., Any]) -> Callable[..., Any]:
    def init_and_replace_build(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # One that scales losses has no slots; it builds the other one.
        if may_shard(self) and not scales_losses(self):
            self.build = types.MethodType(_build, self)

    return init_and_replace_build


def _build(self: Any, variables: Sequence[Any]) -> None:
    build = type(self).build
    if not is_sharded(self):
        build(self, variables)  # Plain SGD, or a copy that is made to be saved.
        return
    if self.built:
        return
    check_elementwise(self)
    check_variables(variables)
    extended = strategy_of(self).extended
    device = extended.worker_devices[0]
    sharded = ShardedVariables(variables, extended.replicas[0], device)
    with under_strategy(self, Anywhere()), local_variables(device):
        build(self, list(sharded.shards))
    note_sharded(self, sharded)


def _applied_to_shards(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_to_shards(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not is_sharded(self):
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
    grads, variables = without_empty(self, grads, variables)
    numbers = {key_of(self, v): n for n, v in enumerate(sharded.variables)}
    if any(key_of(self, v) not in numbers for v in variables):
        check_known(self, variables)  # Raises.
    given: list[Any] = [None] * len(sharded.variables)
    whole = compressor_in_use() is not None
    grads = sum_over_replicas(self, grads, variables) if whole else weigh(grads)
    for gradient, variable in zip(grads, variables, strict=True):
        given[numbers[key_of(self, variable)]] = gradient
    own = sharded.of(given) if whole else sharded.reduce(given)
    sharded.refresh()
    pairs = [(g, s) for g, s in zip(own, sharded.shards, strict=True) if g is not None]
    with gradients_are():
        note_summed()
        if pairs:
            apply(self, [g for g, _ in pairs], [s for _, s in pairs])
        else:
            # A worker may have no part of so little, and goes along. Until Keras 3.9 this counts.
            before = tf.identity(batches_of(self))
            update(self, [], [])
            batches_of(self).assign(before + 1)

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
        tf.cond(tf.equal(tf.convert_to_tensor(batches_of(self)) % steps, 0), publish, lambda: None)


def _asked_of_variables(use_weight_decay: Callable[..., Any]) -> Callable[..., Any]:
    # What is left out of weight decay is told by the model's variables and their names.
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
