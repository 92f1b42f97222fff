"""Calls of `fit`, `evaluate`, `predict` and `compile`, checked before they start.

What the workers must do alike, and what a model must be made of, is told at once and by name,
rather than by a collective that fails or waits.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras

from tfdist.errors import UnsupportedError
from tfdist.internals.keras import TensorFlowTrainer, TFEpochIterator
from tfdist.sharding.elementwise import check_elementwise
from tfdist.sharding.sharded import shares_out
from tfdist.strategies.data import in_order
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.group import joined_group, share_randomness
from tfdist.trainer.patching import patch

_ALIKE = ("epochs", "initial_epoch", "steps_per_epoch", "steps", "validation_steps")


def install() -> None:
    """Wraps Keras's calls for models under a tfdist strategy."""
    patch("TensorFlowTrainer.fit", _checked)
    patch("TensorFlowTrainer.evaluate", _checked)
    predict = TensorFlowTrainer.predict

    @functools.wraps(predict)
    def predict_in_order(self: Any, *args: Any, **kwargs: Any) -> Any:
        with in_order():
            return predict(self, *args, **kwargs)

    patch("TensorFlowTrainer.predict", lambda _: _checked(predict_in_order))
    # On the base class: Keras tells by it whether a model has a `compile` of its own.
    patch("Trainer.compile", _in_scope)
    _install_number_of_batches()


def is_ours(model: Any) -> bool:
    """Whether the model was made under a tfdist strategy."""
    strategy = model._distribute_strategy
    return strategy is not None and isinstance(strategy.extended, ReplicatedExtended)


def check_variables(model: Any) -> None:
    """Checks that every replica has its copy of what is trained.

    Raises:
        ValueError: a variable was made outside of the strategy's scope.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return
    for variable in model.trainable_variables:
        if getattr(variable.value, "distribute_strategy", None) is not strategy:
            raise ValueError(
                f"The variable {variable.path!r} was made outside of the scope of the strategy "
                "that trains the model, so the replicas would not keep it equal. Make all layers "
                "inside `with strategy.scope():`."
            )


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = joined_group()
        if group is not None and not is_ours(self):
            warnings.warn(
                f"`{call.__name__}` was called on a model that was made outside of "
                "`strategy.scope()`: it runs on this worker alone.",
                stacklevel=2,
            )
        elif group is not None:
            given = signature.bind(self, *args, **kwargs).arguments
            alike = {name: given[name] for name in _ALIKE if name in given}
            group.agree("call", f"{call.__name__} {alike or ''}".strip())
            share_randomness(group)
        if is_ours(self):
            _refuse_stateful_layers(self)
        return call(self, *args, **kwargs)

    return checked


def _refuse_stateful_layers(model: Any) -> None:
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UnsupportedError(
                f"The layer {layer.name!r} is stateful: it keeps a state for each row of a batch "
                "of fixed size, which cannot be shared out among replicas. Use stateful=False, or "
                "train with one replica."
            )


def _in_scope(compile_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_model)
    def compile_in_scope(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self):
            return compile_model(self, *args, **kwargs)
        strategy = self._distribute_strategy
        with strategy.scope():
            result = compile_model(self, *args, **kwargs)
        if self.optimizer is not None and shares_out(self.optimizer):
            check_elementwise(self.optimizer)
        of_optimizer = getattr(self.optimizer, "_distribution_strategy", strategy)
        if of_optimizer is not strategy:
            raise ValueError(
                f"The optimizer {self.optimizer.name!r} was made outside of the scope of the "
                "strategy that the model belongs to. Make it inside `with strategy.scope():`."
            )
        return result

    return compile_in_scope


def _install_number_of_batches() -> None:
    # Workers may hold different numbers of batches; an epoch lasts until the last runs out.
    begin, reset = TFEpochIterator.__init__, TFEpochIterator.reset

    @functools.wraps(begin)
    def begin_agreed(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        extended = self._distribute_strategy.extended
        if isinstance(extended, ReplicatedExtended) and extended.process_count > 1:
            counts = extended.group.exchange("batches of an epoch", str(self._num_batches))
            self._agreed = None if "None" in counts else max(map(int, counts))
            self._num_batches = self._agreed

    def reset_agreed(self: Any) -> None:
        reset(self)
        self._num_batches = getattr(self, "_agreed", self._num_batches)

    patch("TFEpochIterator.__init__", lambda _: begin_agreed)
    patch("TFEpochIterator.reset", lambda _: reset_agreed)
