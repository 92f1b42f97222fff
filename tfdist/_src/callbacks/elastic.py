"""A callback that continues training when workers are lost or join."""

from collections.abc import Callable
from typing import Any, Literal

from tfdist._src.callbacks.step_count import is_positive
from tfdist._src.keras.fit.hooks import Entries, RunsFit
from tfdist._src.keras.fit.step_exchange import Request, step_exchange
from tfdist._src.log import logger
from tfdist._src.recovery.agreement import GroupShrinks
from tfdist._src.recovery.fit_calls import FitAlreadyEnded, FitCalls, past_history, watch_others
from tfdist._src.recovery.next_group import calls_of, membership_of
from tfdist._src.recovery.preemption import preemption
from tfdist._src.recovery.recovery import Recovery, RestartFit
from tfdist._src.snapshots.shard_state import ShardState
from tfdist._src.snapshots.worker_state import require_variables
from tfdist._src.strategy.extended import extended_if_ours, extended_of
from tfdist.errors import UnsupportedError


class Elastic(RunsFit):
    """Continues training in the same processes when workers are lost or join.

    The remaining workers form a new group, agree on the last committed step, divide the data again,
    and continue training. At most one step is trained again. A joining worker is admitted at the
    end of a step, and receives the state from the others. By default, the global batch keeps its
    size, so the result is the same as if the group had not changed.

    With `batch="per_worker"`, the number of rows per worker stays the same instead. A batch then
    has B * workers / W rows, rounded to whole rows. Here, B is the number of rows of a batch of the
    dataset, and W is the number of workers at the beginning of this call of `fit`. If training has
    been resumed from a snapshot, W is the number of workers at the beginning of the call that saved
    the snapshot. Batches are formed from the dataset's rows in order, so every row of an epoch is
    still trained once, but the number of batches per epoch changes. `steps_per_epoch` and schedules
    that depend on the step still count batches. The learning rate does not change, unless
    `LearningRateWarmup(scale_by_size=True)` is used.

    Training continues only if more than half of the workers remain, or exactly half of them,
    including the worker with the lowest rank. Workers that are known to be dead do not count for
    this rule. Other missing workers might only be disconnected, and might continue training
    separately. If a worker dies, the other workers on its host know this. In a job of
    `tfdist run --elastic`, all workers know it.

    If a model is split into stages, training continues with as many complete pipelines as the
    remaining workers can form. If the remaining workers do not hold all stages, they wait for a new
    worker and return to the last snapshot of `BackupAndRestore`.

    To react to changes in your own callback, define the method `on_group_change` of
    `tfdist.callbacks.Callback`.

    Args:
        min_workers: the minimum number of workers. If fewer workers remain, they wait for new
            workers, for up to `TFDIST_START_TIMEOUT` seconds.
        max_workers: the largest number of workers to admit; None for any number.
        batch: the quantity to preserve when the number of workers changes: `"global"` for the
            number of rows of a batch, `"per_worker"` for the number of rows per worker.
        copies: 0 or 1. With `shard_optimizer=True`, each worker keeps copies of the optimizer
            shards of this number of other workers in memory. Without copies, the shard of a lost
            worker is lost. The argument has no effect on optimizers that are not sharded.

    Raises:
        ValueError: an argument is invalid.
        UnsupportedError: in `fit`, if the model was created outside of a strategy's scope or has no
            variables yet, or if the group cannot change, for example because a worker has several
            devices, or because the stages depend on measured times. With `shard_optimizer=True`,
            also if `SwapEMAWeights` is used, or if another optimizer of the model is also sharded.
            With `"per_worker"`, also if batches contain sparse or ragged tensors.
        ProgramMismatchError: in `fit`, on a joining worker, if its call of `fit` differs from the
            other workers' call.
        GroupLostError: in `fit`, if too few workers remain, or if the state is lost.

    Example:
        ```python
        model.fit(dataset, epochs=10, callbacks=[tfdist.callbacks.Elastic(min_workers=2)])
        ```
    """

    same_on_all_workers = True
    communicates_in = ()

    def __init__(
        self,
        min_workers: int = 1,
        max_workers: int | None = None,
        batch: Literal["global", "per_worker"] = "global",
        copies: int = 0,
    ) -> None:
        super().__init__()
        if not is_positive(min_workers):
            raise ValueError(
                f"`min_workers` must be a positive integer. Received: {min_workers!r}. Pass 1."
            )
        if max_workers is not None and not (
            is_positive(max_workers) and max_workers >= min_workers
        ):
            raise ValueError(
                f"`max_workers` must be an integer of at least `min_workers` ({min_workers}), or "
                f"None. Received: {max_workers!r}. Omit it to admit any number."
            )
        if batch not in ("global", "per_worker"):
            raise ValueError(
                f"`batch` must be 'global' or 'per_worker'. Received: {batch!r}. Omit it to get "
                "the results of an undisturbed training."
            )
        if copies not in (0, 1):
            raise ValueError(
                "`copies` must be 0 or 1: tfdist keeps at most one copy of an optimizer's shards. "
                f"Received: {copies!r}. Pass 1."
            )
        self._min_workers, self._max_workers, self._batch = min_workers, max_workers, batch
        self._copies = int(copies)
        self._recovery: Recovery | None = None
        self._arguments: dict[str, Any] = {}  # the arguments of `fit` that must agree

    def __repr__(self) -> str:
        return (
            f"Elastic(min_workers={self._min_workers}, max_workers={self._max_workers}, "
            f"batch={self._batch!r}, copies={self._copies})"
        )

    def _run_fit(self, fit: Callable[[], Any], entries: Entries) -> Any:
        model = entries.callbacks.model
        extended = extended_of(model.distribute_strategy)
        group = extended.group
        if group.topology.size == 1 and not group.elastic:
            return fit()  # A single worker has no other workers.
        group.check_can_change()
        calls = calls_of(group)
        membership = membership_of(group)
        shards = ShardState(
            model, entries.callbacks.callbacks, self._copies, joins=membership is None
        )
        self._arguments = entries.arguments
        self._recovery = recovery = Recovery(
            model,
            entries,
            membership,
            min_workers=self._min_workers,
            max_workers=self._max_workers,
            shards=shards,
            keeps_rows=self._batch == "per_worker",
        )
        calls.begin()
        try:
            return self._run(fit, recovery, calls)
        except BaseException as error:
            watch_others(group, calls.number, error)
            raise
        finally:
            shards.end()
            calls.end(getattr(model, "history", None))
            self._recovery = None

    def _run(self, fit: Callable[[], Any], recovery: Recovery, calls: FitCalls) -> Any:
        with (
            step_exchange.asking(Request.CHANGE_GROUP, lambda: recovery.can_grow),
            preemption.releasing(recovery.release),
        ):
            while True:
                leave: GroupShrinks | None = None
                try:
                    return fit()
                except RestartFit:
                    continue
                except FitAlreadyEnded as ended:
                    logger.info(
                        f"call {calls.number} of `fit` ended before this process joined, so it "
                        "immediately returns the history of the other workers."
                    )
                    return past_history(self.model, ended)
                except _GroupChanges:
                    pass
                except GroupShrinks as error:
                    leave = error
                except Exception as error:
                    if not recovery.can_help(error):
                        raise
                recovery.change(leave)

    def on_train_begin(self, logs: Any = None) -> None:
        if extended_if_ours(self.model.distribute_strategy) is None:
            raise UnsupportedError(
                "Elastic needs a model created in the scope of a tfdist strategy. Create it inside "
                "`with strategy.scope():`."
            )
        if self._recovery is not None:
            require_variables(self.model, "Elastic")
            self._recovery.shards.begin()
            calls = calls_of(extended_of(self.model.distribute_strategy).group)
            calls.describe(self._arguments, self.model)
            if self._recovery.membership is None:
                self._recovery.join()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._recovery is not None:
            self._recovery.epoch_begins(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._recovery is not None:
            self._recovery.batch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._recovery is None:
            return
        self._recovery.graphs.step_ends()
        if not step_exchange.is_granted(Request.CHANGE_GROUP):
            return
        batches = self.params["steps"]
        # The group does not change after the last batch of an epoch, because the state of an
        # exhausted iterator does not determine the next shuffle.
        if not batches or batch + 1 < batches:
            raise _GroupChanges


class _GroupChanges(Exception):
    """Raised to leave `fit`, so that it can be entered again in another group."""
