"""A script that calls `fit` several times, to which a process comes in one of the calls."""

from __future__ import annotations

import contextlib
import io
import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.recovery.behaviours import surviving
from tests.recovery.behaviours.data_kinds import DATA
from tests.recovery.behaviours.surviving import rows
from tfdist.errors import ProgramMismatchError

CALLS = 3


class AwaitRefusal(keras.callbacks.Callback):
    """Before a step, the workers wait until the process that came has been refused."""

    def __init__(self, step: int, sign: str) -> None:
        super().__init__()
        self._left, self._sign = step, sign

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            pathlib.Path(self._sign).touch()
            surviving._await(pathlib.Path(f"{self._sign}.refused").exists)


class Curve(keras.callbacks.Callback):
    """Records a list of numbers in each epoch, for `History`.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["curve"] = [epoch + number / 3 for number in range(self._count)]


def several(strategy: Any, settings: dict[str, Any], faults: dict[int, Any]) -> dict[str, Any]:
    """Calls `fit` several times; evaluates and saves behind each.

    Args:
        strategy: as for all behaviours.
        settings: those of `surviving.trained`, and
            folder: where files are.
        comes_in: in which call a process comes.
            differs: what is different on that process: "epochs", "callback", "batch" or "model".
            refused: a file that says to come, if the process is refused.
            curve: how many numbers each epoch adds to `History`.
        faults: none.
    """
    is_new = strategy is not None and strategy.extended.group.joiner is not None
    assert not (is_new and tfdist.is_chief())
    differs = settings.get("differs") if is_new else None
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            results = _calls(strategy, settings, differs)
        except ProgramMismatchError:
            pathlib.Path(f"{settings['refused']}.refused").touch()
            raise
    return {**results, "said": said.getvalue(), "size": tfdist.size() if strategy else 1}


def _calls(strategy: Any, settings: dict[str, Any], differs: str | None) -> dict[str, Any]:
    optimizer = {"optimizer": {"use_ema": True}} if differs == "model" else {}
    model = surviving.make_model(strategy, optimizer)
    if differs == "model":
        model.layers[0].trainable = False
    histories, losses, weights = [], [], []
    folder = pathlib.Path(settings.get("folder", ""))
    for call in range(CALLS):
        callbacks: list[Any] = [Curve(settings["curve"])] if "curve" in settings else []
        if strategy:
            callbacks.append(
                tfdist.callbacks.Elastic(
                    max_workers=7 if differs == "callback" else 8,
                    batch="per_worker" if differs == "batch" else "global",
                )
            )
            callbacks.append(keras.callbacks.CSVLogger(folder / f"{call}.csv"))
        if strategy and call == settings["comes_in"]:
            refused = settings.get("refused")
            callbacks += [AwaitRefusal(3, refused)] if refused else settings["more"]()
        history = model.fit(
            **DATA["dataset"](*rows(50)),
            epochs=3 if differs == "epochs" else 2,
            verbose=0,
            callbacks=callbacks,
        )
        assert model.history is history
        histories.append((history.epoch, dict(history.history)))
        losses.append(model.evaluate(*rows(20, seed=1), batch_size=8, verbose=0)[0])
        weights.append(model.get_weights())
        if strategy:
            model.save_weights(folder / f"{call}.weights.h5")
    return {
        "after": weights,
        "weights": model.get_weights(),
        "slots": [np.asarray(variable) for variable in model.optimizer.variables],
        "histories": histories,
        "losses": losses,
    }


def coming(_: Any, *arguments: Any) -> Any:
    """As `surviving.coming`, with this script."""
    return surviving.come(several, *arguments)
