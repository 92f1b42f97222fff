"""A training of whose workers none has the whole state any more, and which goes back."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import tempfile
import threading
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfdist
from tests.recovery.behaviours import surviving
from tests.recovery.behaviours.surviving import Fault
from tfdist._src.recovery import recovery
from tfdist._src.snapshots.snapshot_series import SnapshotSeries
from tfdist.errors import GroupLostError


class Watched(keras.callbacks.Callback):
    """Remembers nothing by itself, and so sees what happens as it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, int]] = []
        self.begun = 0
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun += 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append((self._epoch, batch))


class Losses(keras.callbacks.Callback):
    """Remembers the epochs' losses in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]


def trained(strategy: Any, settings: dict[str, Any], faults: dict[int, Any]) -> dict[str, Any]:
    """Trains with snapshots, of which a fault makes no trained worker keep its state.

    Args:
        strategy: as for all behaviours.
        settings: those of `surviving.trained`, and
            folder: where files are; with a {} in it, each worker's own.
            every: steps between snapshots.
            losing: in how many changes of the group the state is lost.
            second: faults of other workers, by rank.
            spoil: what happens to the snapshots, and after how many steps.
            dies_looking: a rank that dies while all look for a snapshot at the beginning.
        faults: by rank.
    """
    if strategy is None:
        with tempfile.TemporaryDirectory() as one:
            return _trained(None, settings, {}, pathlib.Path(one))
    folder = pathlib.Path(settings["folder"].format(os.environ.get("TFDIST_HOST", tfdist.rank())))
    return _trained(strategy, settings, faults, folder)


def _trained(
    strategy: Any, settings: dict[str, Any], faults: dict[int, Any], folder: pathlib.Path
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    watched, losses = Watched(), Losses()

    def more() -> list[Any]:
        added: list[Any] = [
            watched,
            losses,
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(folder / "model.keras", "loss", save_best_only=True),
        ]
        if strategy and settings.get("every"):
            kept = folder / "snapshots"
            added.append(
                tfdist.callbacks.BackupAndRestore(
                    kept, settings["every"], asynchronous=settings.get("asynchronous", True)
                )
            )
        if strategy and tfdist.rank() in settings.get("second", {}):
            added.append(Fault(*settings["second"][tfdist.rank()]))
        if strategy and "spoil" in settings:
            added.append(Spoiling(folder / "snapshots", *settings["spoil"]))
        return [*added, *settings.get("more", list)()]

    said = io.StringIO()
    with contextlib.ExitStack() as during:
        during.enter_context(contextlib.redirect_stderr(said))
        if strategy:
            during.enter_context(losing(settings.get("losing", 1), watched))
            if settings.get("dies_looking") == tfdist.rank():
                during.enter_context(dying_while_it_looks())
        try:
            result = surviving.trained(strategy, {**settings, "more": more}, faults)
        except Exception as error:
            raise type(error)(f"{error} [said: {said.getvalue()}]") from error
    csv = folder / "log.csv"
    threads = [t.name for t in threading.enumerate() if t.name == "tfdist-snapshot"]
    return {
        **result,
        "batches": watched.batches,
        "begun": watched.begun,
        "losses": losses.losses,
        "csv": csv.read_text() if csv.exists() else "",
        "said": said.getvalue(),
        "left": [*threads, *(path.name for path in folder.glob("snapshots*"))],
        "rank": tfdist.rank() if strategy else 0,
    }


@contextlib.contextmanager
def losing(times: int, watched: Watched) -> Any:
    """Has the state be lost in changes of the group: no worker keeps anything of it.

    Args:
        times: in how many of the changes.
        watched: knows the model.
    """
    agree, left = recovery.agree, [times]

    def agree_on_nothing(standings: Any, *parts: Any) -> Any:
        if left[0] == 0:
            return agree(standings, *parts)
        left[0] -= 1
        model = watched.model
        for variable in [*model.variables, *model.optimizer.variables]:
            if "float" in variable.dtype:
                variable.assign(np.full(variable.shape, np.nan))
        raise GroupLostError("The state is lost.")

    with mock.patch.object(recovery, "agree", agree_on_nothing):
        yield


class Spoiling(keras.callbacks.Callback):
    """Damages the newest snapshot, or deletes all, before the group changes.

    Args:
        folder: where they are.
        what: "newest" or "all".
        steps: after how many steps.
    """

    def __init__(self, folder: pathlib.Path, what: str, steps: int) -> None:
        super().__init__()
        self._folder, self._what, self._left = folder, what, steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == -1 and tfdist.rank() == 0:
            for part in sorted(self._folder.glob("step-*/*.npz"))[
                slice(-1, None) if self._what == "newest" else slice(None)
            ]:
                part.write_bytes(part.read_bytes()[:100])


def dying_while_it_looks() -> Any:
    """Has this worker die while all look for a snapshot at the beginning."""
    die = lambda self, model: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    return mock.patch.object(SnapshotSeries, "loaded_or_newest", die)


def coming(_: Any, *arguments: Any) -> Any:
    """As `surviving.coming`, with this training."""
    return surviving.come(trained, *arguments)
