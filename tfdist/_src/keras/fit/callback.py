"""The base class of callbacks that react to changes of the group of workers and to restarts."""

from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class GroupInfo:
    """A group of workers, as seen by one of these workers.

    Attributes:
        generation: the number of times that the group has changed since the job began.
        rank: this worker's rank.
        size: the number of workers.
        workers: the names of the workers in rank order, such as `"worker 1 (10.0.0.2:2222)"`.
    """

    generation: int
    rank: int
    size: int
    workers: tuple[str, ...]


class Callback(keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that can save its state, and that is notified when workers join or leave.

    To write your own callback, subclass this class and override the methods that you need. The
    default methods do nothing. You can also define some of these methods and attributes in any
    other Keras callback. `fit` uses them in the same way.

    A method of a callback communicates if it calls functions of `tfdist.collective`, or `evaluate`,
    `predict` or `save`. All workers must then make the same calls.

    Attributes:
        same_on_all_workers: whether all workers must pass this callback with the same arguments. If
            True, `fit` compares the `repr` of the callback on all workers, so the `repr` must
            contain all arguments that have to agree.
        communicates_in: the names of the events in which the callback communicates, such as
            `("on_epoch_end",)`. With `Elastic`, if the group changes during one of these events,
            the event is delivered to the callback again on all workers, except for
            `on_train_batch_end`. Every other event is delivered only once. By default, if
            `same_on_all_workers` is True, the events are `on_epoch_end` and `on_train_batch_end`.
            Otherwise there are none.

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

        This method is called between steps: on all workers when `BackupAndRestore` saves a
        snapshot, and on one worker when `Elastic` admits new workers. It must not communicate. Any
        worker may receive the state, so the state must not depend on the rank.

        Returns:
            Numbers, strings, lists and dicts, which are converted to JSON. Arrays and tensors
            become lists. The default is None, which means that there is no state.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restores a state that `state_dict` has returned.

        This method is called on all workers if `BackupAndRestore` resumes from a snapshot, and on a
        worker that joins with `Elastic`. The call follows `on_train_begin`. If training resumes
        within an epoch, the method is called again after the first `on_epoch_begin`, which may have
        changed the state. It must not communicate.

        Args:
            state: the result of `state_dict`, after it has been converted to JSON and back.
        """

    def on_group_change(self, old: GroupInfo, new: GroupInfo) -> None:
        """Called on all workers of a new group before its next step, if `Elastic` is used.

        This method may communicate. It is called again if another worker is lost before that step.

        Args:
            old: the group in which the last step ran. On a worker that has just joined, it is the
                group that this worker saw when it started.
            new: the current group.
        """

    def on_group_wait(self, epoch: int, batches: int) -> bool:
        """Saves the state before the remaining workers wait for new workers, which may never join.

        This method is called on all remaining workers if fewer workers remain than `Elastic`
        requires. It may communicate.

        Args:
            epoch: the epoch in which training continues after the wait.
            batches: the number of trained batches of that epoch.

        Returns:
            Whether the state has been saved. If so, a worker that receives SIGTERM during the wait
            exits with code 75, which requests a restart.
        """
        return False


_NAMES = [name for name in vars(Callback) if not name.startswith("_")]


def protocol_of(callback: Any) -> Callback:
    """Wraps a callback so that it has all methods and attributes of `Callback`.

    A callback of another class may define only some of them. The result takes the remaining ones
    from `Callback`. All other code of tfdist accesses these methods and attributes through the
    result.
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
    """Whether a callback defines `on_group_wait`, so that it may save the state before a wait."""
    known = protocol_of(callback)
    defines = type(known).on_group_wait is not Callback.on_group_wait
    return defines or "on_group_wait" in vars(known)
