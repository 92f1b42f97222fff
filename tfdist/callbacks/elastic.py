"""A callback with which training goes on when workers are lost, and when others come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.elastic.membership import is_first_call, membership_of
from tfdist.elastic.recovery import Recovery
from tfdist.elastic.variables import require_variables
from tfdist.errors import UnsupportedError
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.trainer.fit.added_callbacks import Entries, RunsFit, RunsLast
from tfdist.trainer.fit.step_requests import Request, requests


class Elastic(RunsFit, RunsLast, keras.callbacks.Callback):  # type: ignore[misc]
    """Goes on with training in the same processes when a worker is lost, or another one comes.

    The workers that are left form a new group, agree on the last step that stands, share the data
    out anew, and go on: at most one step is trained again. A worker that comes is admitted at the
    end of a step, and takes the state over from the others. The global batch stays as it is, so the
    result is that of an undisturbed training.

    More than half of the workers must be left; or half of them with rank 0; or the others must have
    been seen to die by a worker on the same host. Otherwise some may only have been cut off, and
    would train on beside these.

    A callback of your own that needs to know has a method `on_group_change(old, new)`, which is
    called with two `tfdist.elastic.GroupInfo` before the next step.

    Args:
        min_workers: below this number the workers wait for others, for TFDIST_START_TIMEOUT.
        max_workers: beyond this number no others are admitted; None for any number.

    Raises:
        ValueError: an argument is invalid.
        UnsupportedError: in `fit`, if the model was created outside of a strategy's scope, has no
            variables yet, or the group cannot change, such as with `shard_optimizer=True` or
            several devices per worker.
        GroupLostError: in `fit`, if too few workers are left.

    Example:
        ```python
        model.fit(dataset, epochs=10, callbacks=[tfdist.callbacks.Elastic(min_workers=2)])
        ```
    """

    same_on_all_workers = True
    communicates_in = ()

    def __init__(self, min_workers: int = 1, max_workers: int | None = None) -> None:
        super().__init__()
        if not _positive(min_workers):
            raise ValueError(
                f"`min_workers` must be a positive integer. Received: {min_workers!r}. Pass 1."
            )
        if max_workers is not None and not (_positive(max_workers) and max_workers >= min_workers):
            raise ValueError(
                f"`max_workers` must be an integer of at least `min_workers` ({min_workers}), or "
                f"None. Received: {max_workers!r}. Omit it to admit any number."
            )
        self._min_workers, self._max_workers = min_workers, max_workers
        self._recovery: Recovery | None = None

    def __repr__(self) -> str:
        return f"Elastic(min_workers={self._min_workers}, max_workers={self._max_workers})"

    def run_fit(self, fit: Callable[[], Any], entries: Entries) -> Any:
        model = entries.callbacks.model
        extended = model.distribute_strategy.extended
        group = extended.group
        if group.topology.size == 1 and not group.elastic:
            return fit()  # There are no others.
        if len(extended.worker_devices) > 1:
            raise UnsupportedError(
                "Elastic needs workers of one device: TensorFlow reads ahead for several devices, "
                "and what it has read would be lost with the group. Received: "
                f"{len(extended.worker_devices)} devices. Start a worker for each device."
            )
        group.check_can_change()
        membership = membership_of(group)
        self._recovery = recovery = Recovery(
            model,
            entries,
            membership,
            min_workers=self._min_workers,
            max_workers=self._max_workers,
            admits=is_first_call(group),
        )
        self._listen()
        try:
            while True:
                try:
                    return fit()
                except _GroupChanges:
                    pass
                except Exception as error:
                    if not recovery.can_help(error):
                        raise
                recovery.change()
                requests.withdraw(Request.CHANGE_GROUP)
        finally:
            self._recovery = None
            requests.withdraw(Request.CHANGE_GROUP)

    def runs_after(self, others: Sequence[Any]) -> None:
        pass

    def on_train_begin(self, logs: Any = None) -> None:
        if not isinstance(self.model.distribute_strategy.extended, ReplicatedExtended):
            raise UnsupportedError(
                "Elastic needs a model created in the scope of a tfdist strategy. Create it inside "
                "`with strategy.scope():`."
            )
        if self._recovery is not None:
            require_variables(self.model, "Elastic")
            if self._recovery.membership is None:
                self._recovery.join()
                self._listen()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._recovery is not None:
            self._recovery.epoch_begins(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._recovery is None or not requests.is_granted(Request.CHANGE_GROUP):
            return
        batches = self.params["steps"]
        # The state of data that has been read to its end does not tell how it is shuffled next.
        if not batches or batch + 1 < batches:
            raise _GroupChanges

    def _listen(self) -> None:
        """Asks all workers to admit the processes that come, at the end of a step."""
        recovery = self._recovery
        if recovery is None or recovery.membership is None:
            return

        def ask() -> None:
            if not recovery.is_full:
                requests.make(Request.CHANGE_GROUP)

        recovery.membership.on_waiting = ask
        if recovery.membership.waiting:
            ask()


class _GroupChanges(Exception):
    """Leaves `fit`, in order to enter it again in another group."""


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
