"""Optimizers that hold and update a shard of the model's variables (ZeRO-1).

Under a strategy with `shard_optimizer=True`, an optimizer is not built for the variables of the
model, but for this replica's shards of them. A shard is a flat piece of a variable. It can replace
the variable wherever Keras's optimizers work element by element. An update applies the replica's
shards of the summed gradients to its shards of the variables, and sends the updated shards to the
other replicas.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import sharding
from tfdist._src.comm import tokens
from tfdist._src.internals.optimizer import (
    AnyDeviceStrategy,
    averages_of,
    batches_of,
    build_again,
    check_known,
    inner_optimizer,
    key_of,
    scales_losses,
    strategy_of,
    under_strategy,
    update,
    variables_written_by,
    without_empty,
)
from tfdist._src.keras.optimizers import gradient_sync
from tfdist._src.keras.optimizers.gradient_sync import announce_update
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.extended import extended_of
from tfdist._src.strategy.step import clip_by_norm, current_step, sum_of_squares


def install() -> None:
    """Replaces how Keras's optimizers are created, built, applied and averaged."""
    _install_averages()
    _install_optimizers()


def _install_averages() -> None:
    """Replaces how Keras overwrites weights with their moving averages.

    All workers must overwrite the weights together, because each of them holds only shards of the
    averages.
    """
    patch("TFOptimizer._overwrite_model_variables_with_average_value", _overwriting)
    patch("SwapEMAWeights._tf_swap_variables", _swapping)
    patch("SwapEMAWeights._tf_finalize_ema_values", _taking)


def _overwriting(overwrite: Callable[..., Any]) -> Callable[..., Any]:
    def overwrite_all(self: Any, trainable_variables: Any) -> Any:
        if sharding.sharded_by(self) is None or all(
            isinstance(v, sharding.Shard) for v in trainable_variables
        ):
            return overwrite(self, trainable_variables)
        _publish(self, averages_of(self))
        return None

    return overwrite_all


def _swapping(swap: Callable[..., Any]) -> Callable[..., Any]:
    def swap_shards(self: Any, optimizer: Any) -> None:
        if sharding.sharded_by(optimizer) is None:
            swap(self, optimizer)
        else:
            _swap(optimizer)

    return swap_shards


def _taking(take: Callable[..., Any]) -> Callable[..., Any]:
    def take_shards(self: Any, optimizer: Any) -> None:
        if sharding.sharded_by(optimizer) is None:
            take(self, optimizer)
        else:
            _take(optimizer)

    return take_shards


def _swap(optimizer: Any) -> None:
    before = [tf.identity(average) for average in averages_of(optimizer)]
    _take(optimizer)
    _publish(optimizer, before)


def _take(optimizer: Any) -> None:
    sharded = sharding.sharded_by(optimizer)
    assert sharded is not None
    averages = averages_of(optimizer)
    for shard, average in zip(sharded.shards, averages, strict=True):
        average.assign(shard.of(shard.variable))


def _publish(optimizer: Any, values: Any) -> None:
    sharded = sharding.sharded_by(optimizer)
    assert sharded is not None
    workers = extended_of(strategy_of(optimizer)).workers
    sharded.gather_and_assign(values, communicator=workers)


def _install_optimizers() -> None:
    """Replaces how Keras's optimizers are created, built and applied."""
    patch("TFOptimizer.__init__", _built_for_shards)
    patch("BaseOptimizer.apply", _applied_to_shards)
    patch("BaseOptimizer._use_weight_decay", _using_model_variables)


def _built_for_shards(init: Callable[..., Any]) -> Callable[..., Any]:
    def init_and_replace_build(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # A loss-scaling optimizer has no slots itself. It builds its inner optimizer.
        if sharding.may_shard(self) and not scales_losses(self):
            self.build = types.MethodType(_build, self)

    return init_and_replace_build


def _build(self: Any, variables: Sequence[Any]) -> None:
    build = type(self).build
    if not sharding.is_sharded(self):
        build(self, variables)  # This is plain SGD, or a copy made for saving.
        return
    if self.built:
        return
    sharding.check_elementwise(self)
    sharding.check_variables(variables)
    extended = extended_of(strategy_of(self))
    device = extended.worker_devices[0]
    sharded = sharding.ShardedVariables(variables, extended.replicas[0], device)
    sharded.unbuilt = list(self.variables)
    with under_strategy(self, AnyDeviceStrategy()), sharding.local_variables(device):
        build(self, list(sharded.shards))
    sharding.note_sharded(self, sharded)


def rebuild(optimizer: Any) -> None:
    """Rebuilds a sharded optimizer after the ranks of the workers have changed.

    The new slots do not contain the values of the earlier slots. Steps that were traced before must
    be traced again.

    Args:
        optimizer: a sharded optimizer that has been built. It may be inside a loss-scaling
            optimizer.
    """
    inner, sharded = inner_optimizer(optimizer), sharding.sharded_by(optimizer)
    assert sharded is not None
    with strategy_of(inner).scope():
        build_again(inner, sharded.variables, sharded.unbuilt)


def _applied_to_shards(apply: Callable[..., Any]) -> Callable[..., Any]:
    def apply_to_shards(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if not sharding.is_sharded(self):
            return apply(self, grads, trainable_variables)
        grads = list(grads)
        if not grads:
            return None
        if not self.built and trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            self.build(trainable_variables)
        sharded = sharding.sharded_by(self)
        if sharded is None:
            return apply(self, grads, trainable_variables)  # Keras then raises an error.
        _apply(self, apply, sharded, grads, list(trainable_variables or sharded.variables))
        return None

    return apply_to_shards


def _apply(
    self: Any,
    apply: Callable[..., Any],
    sharded: sharding.ShardedVariables,
    grads: list[Any],
    variables: list[Any],
) -> None:
    grads, variables = without_empty(self, grads, variables)
    numbers = {key_of(self, v): n for n, v in enumerate(sharded.variables)}
    if any(key_of(self, v) not in numbers for v in variables):
        check_known(self, variables)  # Raises.
    given: list[Any] = [None] * len(sharded.variables)
    full = gradient_sync.compressor_in_use() is not None
    grads = (
        gradient_sync.sum_gradients(self, grads, variables)
        if full
        else gradient_sync.own_parts(grads)
    )
    for gradient, variable in zip(grads, variables, strict=True):
        given[numbers[key_of(self, variable)]] = gradient
    own = sharded.of(given) if full else sharded.reduce(given)
    sharded.refresh()
    pairs = [(g, s) for g, s in zip(own, sharded.shards, strict=True) if g is not None]
    with gradient_sync.in_apply():
        gradient_sync.note_summed()
        if pairs:
            apply(self, [g for g, _ in pairs], [s for _, s in pairs])
        else:
            # If the variables have few elements, this worker may have no shard. It must still take
            # part in the collectives. Up to Keras 3.9, the empty `update` here counts a batch, so
            # the count is set explicitly.
            before = tf.identity(batches_of(self))
            update(self, [], [])
            batches_of(self).assign(before + 1)

    # If the group may change, each worker writes its own state before it contributes to the step's
    # last collective. If another worker then commits the step although it fails here, this worker
    # can redo it.
    redoable = extended_of(strategy_of(self)).progress.redoable

    def prepare() -> list[Any]:
        if not redoable:
            return []
        own = variables_written_by(self)
        if sharded.copies is not None:
            sharded.copies.exchange()
            own += sharded.copies.variables
        return tokens.prepares(gradient_sync.resources_of(own))

    def confirm() -> None:
        if redoable:
            with tf.control_dependencies(prepare()):
                sharded.total(tf.zeros([]))

    def publish() -> None:
        # With moving averages, variables without a gradient may be overwritten as well.
        some = None if self.use_ema else {n for n, g in enumerate(given) if g is not None}
        sharded.gather_and_assign(
            sharded.shards, some, announce=announce_update, before_last=prepare
        )
        for variable in variables:
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))

    steps = self.gradient_accumulation_steps
    if not steps or (self.use_ema and self.ema_overwrite_frequency):
        publish()
    else:
        tf.cond(tf.equal(tf.convert_to_tensor(batches_of(self)) % steps, 0), publish, confirm)


def _using_model_variables(use_weight_decay: Callable[..., Any]) -> Callable[..., Any]:
    # Users exclude variables of the model, or their names, from weight decay. So a shard is
    # replaced by its variable for this check.
    def use_weight_decay_of(self: Any, variable: Any) -> Any:
        sharded = sharding.sharded_by(self)
        if sharded is not None:
            owner = sharded.owner_of(variable)
            variable = getattr(owner, "value", owner)
        return use_weight_decay(self, variable)

    return use_weight_decay_of


def clip_shards(
    optimizer: Any,
    sharded: sharding.ShardedVariables,
    gradients: Sequence[Any],
    shards: Sequence[Any],
    clip: Callable[..., Any],
) -> list[Any]:
    """Clips shards of gradients by the norms of the full gradients.

    Args:
        optimizer: the optimizer, which has the settings for clipping.
        sharded: the variables for which the optimizer is built.
        gradients: this replica's shards of the summed gradients.
        shards: the shards of the variables that belong to these gradients.
        clip: Keras's method, which is called for elementwise clipping.
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
        sums[shard.range.variable] += sum_of_squares([gradient])
    norms = tf.sqrt(sharded.total(tf.stack(sums)))
    factors = optimizer.clipnorm / tf.maximum(norms, optimizer.clipnorm)
    return [
        tf.convert_to_tensor(gradient) * tf.cast(factors[shard.range.variable], gradient.dtype)
        for gradient, shard in zip(gradients, shards, strict=True)
    ]
