"""Lets a choice of codec follow the links while a model is trained."""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any

import keras

from tfdist.internals.keras import TensorFlowTrainer
from tfdist.trainer.calls import is_ours
from tfdist.trainer.patching import patch

_SECONDS = 30.0


def install() -> None:
    """Makes `fit` ask, when an epoch begins, whether the links have changed."""
    fit = TensorFlowTrainer.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_adapting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self) or self.distribute_strategy.extended.compressor is None:
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("callbacks")
        follow = FollowLinks()
        if isinstance(given, keras.callbacks.CallbackList):
            follow.set_model(self)
            given.callbacks = [c for c in given.callbacks if not isinstance(c, FollowLinks)]
            given.callbacks.append(follow)
        else:
            several = [] if given is None else list(given) if _is_list(given) else [given]
            bound.arguments["callbacks"] = [*several, follow]
        return fit(*bound.args, **bound.kwargs)

    patch("TensorFlowTrainer.fit", lambda _: fit_adapting)


def _is_list(callbacks: Any) -> bool:
    return isinstance(callbacks, (list, tuple))


class FollowLinks(keras.callbacks.Callback):  # type: ignore[misc]
    """Probes the links when an epoch begins, twice a minute at most; all workers together."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        extended = self.model.distribute_strategy.extended
        if not extended.compressor.is_automatic:
            return
        group, choice = extended.group, extended.compressor.choice
        due = str(time.monotonic() - self._last >= _SECONDS)
        if group.exchange("whether to probe the links", due)[0] != str(True):
            return
        self._last = time.monotonic()
        changed = str(choice is not None and choice.reconsider())
        # Workers that hold different stages choose by themselves.
        if str(True) in group.exchange("whether another codec is chosen", changed):
            self.model.make_train_function(force=True)
