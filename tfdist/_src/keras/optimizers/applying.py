"""The optimizers of a model: how they are built, and how they accumulate gradients.

This module also finds the variables of the model and of its optimizers that are equal on all
replicas.

With gradient accumulation, each replica usually accumulates its own gradients, so that the
gradients are communicated only once per update. However, if a worker is lost, the gradients that it
has accumulated are lost as well. So if the group of workers may change, the gradients of every
batch are summed first, and all replicas accumulate the same sums.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.comm.tracing import GraphSpan
from tfdist._src.internals.keras import BaseOptimizer
from tfdist._src.internals.optimizer import (
    Unbuilt,
    accumulators,
    build_again,
    build_multi_again,
    has_updated,
    inner_optimizer,
    is_multi,
    key_of,
    noting_unbuilt,
    strategy_of,
    updating_optimizers,
)
from tfdist._src.keras.optimizers.gradient_sync import compressor_in_use, has_replicas
from tfdist._src.sharding import is_sharded, sharded_by, trained_by
from tfdist._src.strategy.extended import ReplicatedExtended, extended_of
from tfdist._src.strategy.step import OptimizerUpdate, current_step, this_thread
from tfdist.errors import UnsupportedError


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """Returns a model's optimizers, keyed by names.

    Args:
        model: a compiled model.

    Returns:
        The key is `"optimizer"` for the optimizer that was passed to `compile`, if any. It is
        `"optimizer NAME"` for each other optimizer that is an attribute of the model, or
        `"optimizer NAME/KEY"` for an optimizer in a list or dict.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> model.other = keras.optimizers.SGD()
        >>> list(optimizers_of(model))
        ['optimizer', 'optimizer other']
    """
    first = getattr(model, "optimizer", None)
    found = {} if first is None else {"optimizer": first}
    seen = {id(first)}
    for name, value in _named(sorted(vars(model).items())):
        if id(value) not in seen:
            seen.add(id(value))
            found[f"optimizer {name}"] = value
    return found


def _named(items: Iterable[tuple[Any, Any]], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in items:
        name = f"{prefix}{key}"
        if isinstance(value, BaseOptimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from _named(enumerate(value), f"{name}/")
        elif isinstance(value, dict):
            yield from _named(value.items(), f"{name}/")


def replicated_variables(model: keras.Model) -> dict[str, Any]:
    """Returns a model's weights and the part of its optimizers' state that all replicas share.

    The result contains neither accumulated gradients nor the slots of sharded optimizers, because
    both differ between replicas.

    Returns:
        Keras variables, keyed by names that are the same on all workers.
    """
    found = {f"weight {i}": variable for i, variable in enumerate(model.weights)}
    for name, outermost in optimizers_of(model).items():
        for i, variable in enumerate(replicated_state(outermost)):
            found[f"{name} {i}"] = variable
    return found


def replicated_state(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer that are equal on all replicas."""
    own = own_state(optimizer)
    return [v for v in optimizer.variables if id(v) not in own]


def own_state(optimizer: Any) -> set[int]:
    """Returns the `id`s of an optimizer's Keras variables that differ between replicas."""
    updating = updating_optimizers(optimizer)
    own = {id(v) for one in updating for v in accumulators(one)}
    sharded = [one for one in updating if sharded_by(one) is not None]
    return own | {id(v) for one in sharded for v in one.variables if v.shape.rank}


_sums: weakref.WeakSet[Any] = weakref.WeakSet()


def accumulates_sums(optimizer: Any) -> bool:
    """Whether gradients are summed over the replicas before the optimizer accumulates them."""
    return optimizer in _sums


def accumulates_own(outermost: Any, extended: ReplicatedExtended) -> bool:
    """Whether each replica accumulates its own gradients.

    Args:
        outermost: the model's optimizer.
        extended: the `extended` object of the model's strategy.
    """
    optimizers = updating_optimizers(outermost)
    if extended.in_stages:
        return not all(map(accumulates_sums, optimizers))
    # A loss-scaling optimizer sums the gradients before it calls the inner optimizer, unless the
    # gradients are compressed or the inner optimizer is sharded.
    scales = isinstance(outermost, keras.optimizers.LossScaleOptimizer)
    compresses = extended.compressor is not None and extended.compressor.active
    if scales and not compresses and not any(map(is_sharded, optimizers)):
        return False
    return not all(map(accumulates_sums, optimizers))


def accumulate_sums(model: keras.Model, *, joins: bool) -> None:
    """Makes the model's optimizers accumulate gradients that are summed over the replicas.

    All workers must call this function. Gradients that have already been accumulated are summed.

    Args:
        model: the model, which is about to be trained. Its step must be traced again.
        joins: whether this worker is about to join other workers. In this case, the other workers
            do not call this function, and this worker sums nothing.
    """
    extended = extended_of(model.distribute_strategy)
    for outermost in optimizers_of(model).values():
        own = accumulates_own(outermost, extended)
        for optimizer in updating_optimizers(outermost):
            if not optimizer.gradient_accumulation_steps or accumulates_sums(optimizer):
                continue
            if is_sharded(optimizer):  # It sums the gradients of every batch anyway.
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


@contextlib.contextmanager
def updating(variables: Sequence[Any]) -> Iterator[OptimizerUpdate]:
    """Records, in this context, that an optimizer of this thread updates these variables."""
    outer, this_thread.update = this_thread.update, OptimizerUpdate(variables)
    try:
        yield this_thread.update
    finally:
        this_thread.update = outer


def updated_now() -> Sequence[Any]:
    """Returns the variables that an optimizer of this thread is currently updating."""
    return this_thread.update.variables


def begin_update(gradients: Sequence[Any]) -> None:
    """Records that the current update begins when these gradients are available."""
    this_thread.update.span = GraphSpan(gradients)


def variables_of(optimizer: Any, given: Any) -> list[Any]:
    """Returns `given`, or all variables for which the optimizer was built if `given` is None."""
    return trained_by(optimizer) if given is None else list(given)


# The optimizers that were built before the first step. A loss-scaling optimizer is represented by
# its inner optimizer.
_built_early: weakref.WeakKeyDictionary[Any, Unbuilt] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def building_early(outermost: Any) -> Iterator[None]:
    """Allows an optimizer to be built in this context, before the first step.

    In a single process, Keras builds the optimizer in the first step. That step may train other
    variables than the model has now, for example variables that a callback unfreezes, or variables
    that only the step creates. So `build_as_used` may rebuild the optimizer until `keep_build` is
    called.

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
    """Stops `build_as_used` from rebuilding an optimizer.

    Args:
        outermost: the model's optimizer; may be None.
        if_updated: whether this call has an effect only if the optimizer has ever updated
            variables. Updates before a restart count as well.
    """
    optimizer = inner_optimizer(outermost)
    if not isinstance(optimizer, BaseOptimizer) or optimizer not in _built_early:
        return
    if not if_updated or any(map(has_updated, (optimizer, *updating_optimizers(optimizer)))):
        del _built_early[optimizer]


def build_as_used(outermost: Any, variables: Sequence[Any]) -> None:
    """Rebuilds an optimizer that was built early, if it must now update other variables."""
    optimizer = inner_optimizer(outermost)
    if optimizer not in _built_early:
        return
    unbuilt = _built_early[optimizer]
    known, used = (
        {key_of(optimizer, v) for v in some} for some in (trained_by(optimizer), variables)
    )
    if is_multi(optimizer):  # It needs a gradient for each variable that it was built for.
        if used != known:
            build_multi_again(optimizer, variables, unbuilt)
    elif not used <= known:
        ((_, own),) = unbuilt.variables
        build_again(optimizer, list(variables), own)


def check_alone(optimizer: Any, variables: Sequence[Any]) -> None:
    """Checks that gradients are not applied outside of replicas if there are several replicas.

    Args:
        optimizer: the optimizer that applies the gradients.
        variables: the variables that the optimizer would update.

    Raises:
        UnsupportedError: there are several replicas, and their gradients cannot be summed here.
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
    """Creates the state of the gradient compression before the optimizer runs.

    The optimizer may apply its gradients in a conditional, where variables cannot be created.

    Args:
        optimizer: the optimizer that will apply the gradients.
        grads: dense tensors, `tf.IndexedSlices` or None.
        trainable_variables: the variables that were passed to the optimizer; may be None.

    Raises:
        UnsupportedError: the step runs eagerly with several devices per worker.
    """
    compressor = compressor_in_use()
    if compressor is None:
        return
    if tf.executing_eagerly() and len(extended_of(tf.distribute.get_strategy()).worker_devices) > 1:
        raise UnsupportedError(
            "With several devices per worker, gradients cannot be compressed eagerly. Compile the "
            "model with run_eagerly=False, or omit `compression`."
        )
    if not optimizer.built:
        if trainable_variables is None:
            return  # Keras then raises an error.
        optimizer.build(list(trainable_variables))
    given = zip(grads, variables_of(optimizer, trainable_variables), strict=False)
    slices = {id(v) for g, v in given if isinstance(g, tf.IndexedSlices)}
    step = current_step()
    for own in updating_optimizers(optimizer):
        trained = trained_by(own)
        sparse = [v for v in trained if id(v) in slices]
        elsewhere = [v for v in trained if step is not None and not step.sums(v)]
        compressor.prepare(own, trained, sparse, elsewhere)
