"""Trainings in which things go wrong while the group changes, or while something is saved."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

import keras

import tfdist
from tests.recovery.behaviours.surviving import SIGNALS, come, trained
from tfdist._src.cluster import from_environment
from tfdist._src.cluster.membership import consensus, node, record
from tfdist._src.cluster.mesh import shared_memory
from tfdist._src.group import Communicators, Group
from tfdist._src.recovery import next_group, recovery, state_transfer
from tfdist._src.snapshots import part_file, snapshot_series

# Where something can happen, in the order in which a group changes: before these are called.
POINTS: dict[str, tuple[Any, str]] = {
    "answer": (node.Node, "answer"),
    "proposal": (consensus.Proposer, "propose"),
    "session": (Group, "regroup"),
    "communicators": (Communicators, "reopen"),
    "compressors": (Group, "_renew_compressors"),
    "fit progress": (recovery.Recovery, "_fit_progress"),
    "agreement": (recovery, "agree"),
    "state": (state_transfer, "_share"),
    "entry": (recovery, "broadcast_bytes"),
    "callbacks": (next_group, "tell_of_change"),
    "wait": (next_group.NextGroup, "large_enough"),
    "next entry": (recovery.Recovery, "_go_on"),
    "snapshot": (part_file, "_bits"),
    "snapshots": (snapshot_series.SnapshotSeries, "change_workers"),
}
Faults = Sequence[tuple[str, int, str]]


class Rows(keras.metrics.Metric):
    """How many rows there were in an epoch."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self._count = self.add_variable((), "zeros", name="count")

    def update_state(self, y: Any, z: Any, sample_weight: Any = None) -> None:
        self._count.assign_add(keras.ops.cast(keras.ops.shape(z)[0], "float32"))

    def result(self) -> Any:
        return self._count + 0.0


def arm(faults: Faults, folder: pathlib.Path) -> None:
    """Lets something happen when a point is reached for the n-th time."""
    for point, number, what in faults:
        owner, name = POINTS[point]
        _arm(owner, name, number, what, folder)


def _arm(owner: Any, name: str, number: int, what: str, folder: pathlib.Path) -> None:
    real, calls = getattr(owner, name), itertools.count(1)

    def armed(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            _happen(what, folder, arguments)
        return real(*arguments, **named)

    setattr(owner, name, armed)


def _happen(what: str, folder: pathlib.Path, arguments: tuple[Any, ...]) -> None:
    kind, _, of = what.partition(" ")
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])
    elif kind == "wake":
        os.kill(int((folder / f"pid-{of}").read_text()), signal.SIGCONT)
    elif kind == "tear":  # Its state is of no use any more.
        (self,) = arguments
        self._extended.progress.torn = True
        for variable in self._model.trainable_variables:
            variable.assign(keras.ops.zeros_like(variable))
    elif kind == "lead":  # It is a step ahead, with other values.
        (self,) = arguments
        progress = self._extended.progress
        progress.restore(progress.committed_steps + 1)
        for variable in self._model.trainable_variables:
            variable.assign(variable + 1.0)
    elif kind == "fill":
        with contextlib.suppress(OSError), open(folder / of / "filler", "wb") as file:
            while True:
                os.write(file.fileno(), bytes(1024))
    else:
        assert kind == "lock"
        subprocess.run(["mount", "-o", "remount,ro", folder / of], check=True)


def faulty(
    _: Any, settings: dict[str, Any], faults: dict[int, Any], points: dict[int, Faults]
) -> dict[str, Any]:
    """Trains; `faults` are those of `trained`, `points` those of `arm` besides, by rank."""
    settings = _prepared(settings, points, from_environment().rank)
    strategy = tfdist.MultiWorkerMirroredStrategy(compression=settings.get("compression"))
    return trained(strategy, settings, faults)


def coming(_: Any, points: dict[int, Faults], *arguments: Any) -> Any:
    """Trains on some of the workers, to which another one comes."""
    *others, settings = arguments
    return come(trained, *others, _prepared(settings, points, from_environment().rank))


def alone(_: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """What one process trains."""
    return trained(None, {**settings, "metrics": [Rows()]}, {})


def _prepared(settings: dict[str, Any], points: dict[int, Faults], rank: int) -> dict[str, Any]:
    folder = pathlib.Path(settings["folder"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if settings.get("memory"):
        record._MEMORY = shared_memory.MEMORY = str(folder / settings["memory"])
    if settings.get("flights"):
        os.environ["TFDIST_FLIGHT_DIR"] = str(folder / settings["flights"])
    more = settings.get("more", list)
    if saved := settings.get("saved"):
        place = folder / saved / "snapshots"
        more = lambda: [tfdist.callbacks.BackupAndRestore(place, save_every=2)]  # noqa: E731
    arm(points.get(rank, ()), folder)
    return {**settings, "metrics": [Rows()], "more": more}
