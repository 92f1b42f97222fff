"""Whether an optimizer accumulates the sums over all replicas, or each replica's own gradients.

Usually each replica accumulates its own, so that gradients cross the network once per update. What
one worker alone has accumulated would be lost with it, so where the group of workers may change,
the gradients of every batch are summed first, and all replicas accumulate the same.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.internals.optimizer import accumulators, updating_optimizers
from tfdist._src.keras.optimizers.of_model import optimizers_of
from tfdist._src.sharding.sharded import is_sharded
from tfdist._src.strategy.extended import ReplicatedExtended

_sums: weakref.WeakSet[Any] = weakref.WeakSet()


def accumulates_sums(optimizer: Any) -> bool:
    """Whether a step sums gradients before the optimizer accumulates them."""
    return optimizer in _sums


def accumulates_own(outermost: Any, extended: ReplicatedExtended) -> bool:
    """Whether each replica has accumulated something else.

    Args:
        outermost: the model's optimizer.
        extended: the engine of the model's strategy.
    """
    optimizers = updating_optimizers(outermost)
    if extended.in_stages:
        return not all(map(accumulates_sums, optimizers))
    # Before an optimizer that scales the loss, gradients are summed unless they are compressed.
    scales = isinstance(outermost, keras.optimizers.LossScaleOptimizer)
    compresses = extended.compressor is not None and extended.compressor.active
    if scales and not compresses and not any(map(is_sharded, optimizers)):
        return False
    return not all(map(accumulates_sums, optimizers))


def accumulate_sums(model: keras.Model, *, joins: bool) -> None:
    """Has the model's optimizers accumulate sums from now on; called by all workers.

    Args:
        model: about to be trained, in a step that is traced anew.
        joins: whether this worker is about to join others, which do not call this.
    """
    extended = model.distribute_strategy.extended
    for outermost in optimizers_of(model).values():
        own = accumulates_own(outermost, extended)
        for optimizer in updating_optimizers(outermost):
            if not optimizer.gradient_accumulation_steps or accumulates_sums(optimizer):
                continue
            if is_sharded(optimizer):  # which sums the gradients of every batch anyway
                continue
            _sums.add(optimizer)
            if own and not joins:
                for accumulator in accumulators(optimizer):
                    _sum(accumulator, extended)


def _sum(accumulator: Any, extended: ReplicatedExtended) -> None:
    value = getattr(accumulator, "value", accumulator)
    copies = list(getattr(value, "values", [value]))
    here = tf.add_n([copy.read_value() for copy in copies])
    accumulator.assign(extended.workers.all_reduce([here])[0])
