"""The base class of callbacks that react to other workers and to restarts."""

from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class GroupInfo:
    """A group of workers, as one of them sees it.

    Attributes:
        generation: the number of earlier changes of the group.
        rank: this worker's rank.
        size: the number of workers.
        workers: their names in rank order, such as `"worker 1 (10.0.0.2:2222)"`.
    """

    generation: int
    rank: int
    size: int
    workers: tuple[str, ...]


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that can be saved, and that learns of changes of the group of workers.

    Derive from it and override the methods that you need; the defaults do nothing. `fit` also calls
    these methods, and reads these attributes, of any other Keras callback that defines them.

    A method communicates if it calls `tfdist.collective` functions, `evaluate`, `predict` or
    `save`: all workers must then make the same calls.

    Attributes:
        same_on_all_workers: whether all workers must pass this callback with the same arguments.
            If so, `fit` compares their `repr`, which must then show the arguments that matter.
        communicates_in: the names of the events, such as `("on_epoch_end",)`, in which the callback
            communicates. With `Elastic`, if one of these events is interrupted, the callback sees
            it again on all workers; it sees any other event once. By default, `on_epoch_end` and
            `on_train_batch_end` if `same_on_all_workers` is set, otherwise none.

    Example:
        ```python
        class LossCurve(tfdist.callbacks.Callback):
            def __init__(self):
                super().__init__()
                self.losses = []

            def on_epoch_end(self, epoch, logs=None):
                self.losses.append(logs["loss"])

            def state_dict(self):
                return {"losses": self.losses}

            def load_state_dict(self, state):
                self.losses = state["losses"]

            def on_group_change(self, old, new):
                if new.rank == 0:
                    print(f"{new.size} workers, formerly {old.size}")

        backup = tfdist.callbacks.BackupAndRestore("/shared/run7")
        model.fit(dataset, callbacks=[LossCurve(), tfdist.callbacks.Elastic(), backup])
        ```
    """

    same_on_all_workers: bool = False
    communicates_in: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def state_dict(self) -> Any:
        """Returns the state that a restarted or a joining worker needs.

        Called between steps: on all workers when `BackupAndRestore` saves a snapshot, and with
        `Elastic` on one worker when others join. It must not communicate. Any worker may receive
        the state, so it must not depend on the rank.

        Returns:
            Numbers, strings, lists and dicts, which JSON can represent; arrays and tensors become
            lists. None, the default, if there is no state.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restores a state.

        Called on all workers if `BackupAndRestore` resumes from a snapshot, and on a joining
        worker. It is called after `on_train_begin`, and again after the first `on_epoch_begin` if
        training resumes within that epoch. It must not communicate.

        Args:
            state: as returned by `state_dict`, after a round trip through JSON.
        """

    def on_group_change(self, old: GroupInfo, new: GroupInfo) -> None:
        """Called on all workers of a new group before its next step, with `Elastic`.

        May communicate. Called again if another worker is lost before that step.

        Args:
            old: the group of the last step. On a worker that has just joined, the group that it saw
                when it started.
            new: the present group.
        """

    def on_group_wait(self, epoch: int, batches: int) -> bool:
        """Saves the state before the workers wait for others, which may never arrive.

        Called on all remaining workers if they are fewer than `Elastic` requires. May communicate.

        Args:
            epoch: the epoch that continues afterward.
            batches: the number of trained batches of that epoch.

        Returns:
            Whether the state is saved. If so, SIGTERM during the wait ends the worker with code 75.
        """
        return False


_NAMES = [name for name in vars(Callback) if not name.startswith("_")]


def protocol_of(callback: Any) -> Callback:
    """Returns a callback as a `Callback`.

    A callback of another class may define only some of the methods and attributes of `Callback`;
    the result has the defaults of the rest. All other code reads these names from the result.
    """
    return callback if isinstance(callback, Callback) else _Adapted(callback)


class _Adapted(Callback):
    def __init__(self, callback: Any) -> None:
        super().__init__()
        for name in _NAMES:
            own = getattr(callback, name, None)
            if own is not None and callable(own) == callable(getattr(Callback, name)):
                setattr(self, name, own)


def saves_before_waits(callback: Any) -> bool:
    """Whether a callback defines `on_group_wait`, and so may save the state."""
    known = protocol_of(callback)
    defines = type(known).on_group_wait is not Callback.on_group_wait
    return defines or "on_group_wait" in vars(known)
