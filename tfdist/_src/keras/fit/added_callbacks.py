"""The callbacks that `fit` adds to the user's under a tfdist strategy."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tfdist._src.internals.keras import TensorFlowTrainer
from tfdist._src.keras.fit.begin_together import BeginTogether
from tfdist._src.keras.fit.call_checks import compared_arguments, is_ours
from tfdist._src.keras.fit.codec_refresh import FollowLinks
from tfdist._src.keras.fit.current_data import training_data
from tfdist._src.keras.fit.data_position import TrainingData
from tfdist._src.keras.fit.delivered_once import DeliveredOnce, delivered_once
from tfdist._src.keras.fit.step_clock import StepClock
from tfdist._src.keras.fit.stop_training import StopTogether
from tfdist._src.keras.patching import patch
from tfdist._src.monitoring.training import record


class RunsFit:
    """Base class of callbacks that run `fit`, perhaps several times."""

    def run_fit(self, fit: Callable[[], Any], entries: Entries) -> Any:
        """Runs `fit`.

        Args:
            fit: enters it; may be called again when it has raised.
            entries: what all entries have in common.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Entries:
    """What all entries of a call of `fit` have in common.

    Attributes:
        callbacks: the callbacks, which see each event once.
        data: the data.
        arguments: those that must be the same on all workers.
    """

    callbacks: DeliveredOnce
    data: TrainingData
    arguments: dict[str, Any]


class RunsLast:
    """Base class of callbacks that `fit` calls after all others, wherever they are in its list."""

    def runs_after(self, others: Sequence[Any]) -> None:
        """Says which callbacks are called before this one."""
        raise NotImplementedError

    def during_fit(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which `fit` runs, however it ends."""
        return contextlib.nullcontext()


_OURS = (FollowLinks, StopTogether, StepClock, BeginTogether, BeginTogether.First)


def install() -> None:
    """Makes `fit` add these callbacks after the user's."""
    fit = TensorFlowTrainer.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_with_added(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self):
            return fit(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments.get("callbacks")
        added = _added_callbacks(self)
        if isinstance(given, keras.callbacks.CallbackList):
            for callback in added:
                callback.set_model(self)
            users = [c for c in given.callbacks if not isinstance(c, _OURS)]
            given.callbacks = called = _in_order(users, added)
        else:
            several = [] if given is None else list(given) if _is_list(given) else [given]
            bound.arguments["callbacks"] = called = _in_order(several, added)
        with contextlib.ExitStack() as during:
            data = during.enter_context(training_data())
            data.first_epoch = bound.arguments.get("initial_epoch") or 0
            for callback in called:
                if isinstance(callback, RunsLast):
                    during.enter_context(callback.during_fit())
            runs = next((c for c in called if isinstance(c, RunsFit)), None)
            if runs is None:
                return fit(*bound.args, **bound.kwargs)
            once = delivered_once(self, called, data, _with_defaults(bound))
            entries = Entries(once, data, compared_arguments(bound.arguments))
            bound.arguments["callbacks"] = once
            return runs.run_fit(lambda: fit(*bound.args, **bound.kwargs), entries)

    patch("TensorFlowTrainer.fit", lambda _: fit_with_added)


def _added_callbacks(model: Any) -> list[Any]:
    extended = model.distribute_strategy.extended
    added: list[Any] = []
    if extended.compressor is not None:
        added.append(FollowLinks())
    if extended.process_count > 1 or extended.group.elastic:
        added += [StopTogether(), BeginTogether()]
    if record.keeps_durations:
        added.append(StepClock())
    return added


def _in_order(users: Sequence[Any], added: Sequence[Any]) -> list[Any]:
    """The user's callbacks, then the added ones, then those that must see what all others do."""
    last = [c for c in users if isinstance(c, RunsLast)]
    others = [c for c in users if not isinstance(c, RunsLast)] + list(added)
    if last and not any(isinstance(c, keras.callbacks.History) for c in others):
        others.append(keras.callbacks.History())  # Keras would append it behind them.
    last.sort(key=lambda callback: isinstance(callback, RunsFit))  # which may leave `fit`
    for callback in last:
        callback.runs_after(others)
    begins = [c for c in others if isinstance(c, BeginTogether)]
    others = [c for c in others if not isinstance(c, BeginTogether)]
    return [*(c.first for c in begins), *others, *last, *begins]


def _with_defaults(bound: inspect.BoundArguments) -> dict[str, Any]:
    complete = inspect.BoundArguments(bound.signature, OrderedDict(bound.arguments))
    complete.apply_defaults()
    return dict(complete.arguments)


def _is_list(callbacks: Any) -> bool:
    return isinstance(callbacks, (list, tuple))
