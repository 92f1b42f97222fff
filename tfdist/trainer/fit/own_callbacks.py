"""The callbacks that `fit` adds to the user's where it trains on several workers."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from tfdist.internals.keras import TensorFlowTrainer
from tfdist.trainer.fit.call_checks import is_ours
from tfdist.trainer.fit.codec_refresh import FollowLinks
from tfdist.trainer.fit.stop_training import StopTogether
from tfdist.trainer.patching import patch


def install() -> None:
    """Makes `fit` add them, after the user's."""
    fit = TensorFlowTrainer.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_with_own(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = _own_callbacks(self) if is_ours(self) else []
        if not own:
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            for callback in own:
                callback.set_model(self)
            users = [c for c in given.callbacks if not isinstance(c, (FollowLinks, StopTogether))]
            given.callbacks = [*users, *own]
        else:
            several = [] if given is None else list(given) if _is_list(given) else [given]
            bound.arguments["callbacks"] = [*several, *own]
        return fit(*bound.args, **bound.kwargs)

    patch("TensorFlowTrainer.fit", lambda _: fit_with_own)


def _own_callbacks(model: Any) -> list[Any]:
    extended = model.distribute_strategy.extended
    own: list[Any] = []
    if extended.compressor is not None:
        own.append(FollowLinks())
    if extended.process_count > 1:
        own.append(StopTogether())
    return own


def _is_list(callbacks: Any) -> bool:
    return isinstance(callbacks, (list, tuple))
