"""A callback with which training goes on when workers are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tfdist.elastic.membership import membership_of
from tfdist.elastic.recovery import Recovery
from tfdist.errors import UnsupportedError
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.trainer.fit.added_callbacks import Entries, RunsFit, RunsLast


class Elastic(RunsFit, RunsLast, keras.callbacks.Callback):  # type: ignore[misc]
    """Goes on with training in the same processes when a worker is lost.

    The workers that are left form a new group, agree on the last step that stands, share the data
    out anew, and go on: at most one step is trained again. The global batch stays as it is, so the
    result is that of an undisturbed training.

    More than half of the workers must be left; or half of them with rank 0; or the others must have
    been seen to die by a worker on the same host. Otherwise some may only have been cut off, and
    would train on beside these.

    A callback of your own that needs to know has a method `on_group_change(old, new)`, which is
    called with two `tfdist.elastic.GroupInfo`, before the next step.

    Args:
        min_workers: below this number the workers wait for others, for TFDIST_START_TIMEOUT.

    Raises:
        ValueError: an argument is invalid.
        UnsupportedError: in `fit`, if the model was created outside of a strategy's scope, or the
            strategy has TensorFlow's collectives.
        GroupLostError: in `fit`, if too few workers are left.

    Example:
        ```python
        model.fit(dataset, epochs=10, callbacks=[tfdist.callbacks.Elastic(min_workers=2)])
        ```
    """

    same_on_all_workers = True
    communicates_in = ()

    def __init__(self, min_workers: int = 1) -> None:
        super().__init__()
        if not isinstance(min_workers, int) or isinstance(min_workers, bool) or min_workers < 1:
            raise ValueError(
                f"`min_workers` must be a positive integer. Received: {min_workers!r}. Pass 1."
            )
        self._min_workers = min_workers
        self._recovery: Recovery | None = None

    def __repr__(self) -> str:
        return f"Elastic(min_workers={self._min_workers})"

    def run_fit(self, fit: Callable[[], Any], entries: Entries) -> Any:
        model = entries.callbacks.model
        extended = model.distribute_strategy.extended
        if not isinstance(extended, ReplicatedExtended):
            raise UnsupportedError(
                "Elastic needs a model created in the scope of a tfdist strategy. Create it inside "
                "`with strategy.scope():`."
            )
        membership = membership_of(extended.group)
        if membership is None:
            return fit()
        self._recovery = Recovery(model, entries, membership, min_workers=self._min_workers)
        try:
            return self._run(fit, self._recovery)
        finally:
            self._recovery = None

    def _run(self, fit: Callable[[], Any], recovery: Recovery) -> Any:
        while True:
            try:
                return fit()
            except Exception as error:
                if not recovery.can_help(error):
                    raise
            recovery.recover()

    def runs_after(self, others: Any) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._recovery is not None:
            self._recovery.epoch_begins(epoch)
