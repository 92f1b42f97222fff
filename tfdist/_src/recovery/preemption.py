"""Handles SIGTERM: a worker saves its state and leaves, while the other workers continue."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

from tfdist._src.cluster import Membership
from tfdist._src.group import Group
from tfdist._src.keras.fit.step_exchange import Request, step_exchange
from tfdist._src.log import logger
from tfdist._src.options import PREEMPTED
from tfdist._src.recovery.agreement import FitProgress, GroupShrinks
from tfdist._src.snapshots.shard_state import HeldShards, find_shards
from tfdist.errors import TfdistError

_FORMS_SECONDS = 10.0
"""How long this worker waits for a group after SIGTERM. The group's first step saves the state."""


class Preemption:
    """Handles SIGTERM in this process during `fit`.

    Attributes:
        asked: whether SIGTERM has arrived during `fit`.
        release: a function that all workers call at the end of a step if one of them has received
            SIGTERM. It raises an exception if only some workers leave, and returns if all must
            leave. Training that can continue without some workers sets this function.
    """

    def __init__(self) -> None:
        self.asked = False
        self.release: Callable[[], object] = lambda: None
        self._before: Any = None  # the handler that `_handle` replaces during `fit`
        self._pid = 0

    @contextlib.contextmanager
    def releasing(self, release: Callable[[], object]) -> Iterator[None]:
        """Sets `release` within this context."""
        before, self.release = self.release, release
        try:
            yield
        finally:
            self.release = before

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """Lets SIGTERM request that `fit` saves the state and exits, instead of ending the process.

        Further signals have no effect: a worker may receive a scheduler's signal twice, directly
        and from its launcher. For the same reason, SIGTERM stays ignored after this context if the
        worker exits with the code that reports a saved state. Processes that are forked within the
        context get the previous handler.

        Outside of the main thread, where Python allows no handlers, this context does nothing.
        """
        before = signal.getsignal(signal.SIGTERM)
        # `before` is None if the handler was not installed from Python.
        if before in (None, self._handle) or not _in_main_thread():
            yield
            return
        self.asked, self._before, self._pid = False, before, os.getpid()
        signal.signal(signal.SIGTERM, self._handle)
        after = before
        try:
            with step_exchange.asking(Request.SAVE_AND_EXIT, lambda: self.asked):
                yield
        except SystemExit as error:
            self.asked = False  # This process ends, as the signal has requested.
            if error.code == PREEMPTED:
                after = signal.SIG_IGN
            raise
        finally:
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, after)
            if after is before:
                self._before = None
            if self.asked:  # Training ended before a step could save the state.
                self.asked = False
                signal.raise_signal(signal.SIGTERM)

    def check(self, *, saved: bool) -> None:
        """Ends a wait for other workers if SIGTERM has arrived.

        If the state has not been saved, this calls the handler that was installed before `fit`.

        Args:
            saved: whether the state of training has been saved.

        Raises:
            SystemExit: SIGTERM has arrived, and the state has been saved.
        """
        if not self.asked:
            return
        if saved:
            logger.info(f"SIGTERM: exiting with code {PREEMPTED}, which requests a restart.")
            raise SystemExit(PREEMPTED)
        self.asked = False
        signal.signal(signal.SIGTERM, self._before)
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._handle)

    def later_check(self) -> Callable[[], None]:
        """Returns a function to call repeatedly while this worker waits for a new group.

        If SIGTERM arrives during the wait, a group usually forms within a second, and this worker
        saves its state and exits in the first step of the group. If the group takes longer, because
        a worker is busy or silent, the function ends the wait: the launcher would soon kill this
        process in any case.
        """
        since: float | None = None

        def check() -> None:
            nonlocal since
            if self.asked:
                since = time.monotonic() if since is None else since
                if time.monotonic() - since >= _FORMS_SECONDS:
                    self.check(saved=False)

        return check

    def in_child(self) -> None:
        """Restores the previous handler in a process that has just been forked."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before, self.asked = None, False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.asked = True
        else:  # The signal arrived before `in_child` was called.
            self.in_child()
            signal.raise_signal(signal.SIGTERM)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


preemption = Preemption()
"""The instance of this process."""

os.register_at_fork(after_in_child=preemption.in_child)


_GATHER_SECONDS = 0.5
"""How long to wait for SIGTERM on other workers: launchers signal them one after the other."""


def release(
    group: Group,
    membership: Membership,
    alike: Sequence[Sequence[int]] | None,
    shards: tuple[HeldShards, ...] | None,
    *,
    min_workers: int,
    steps: int,
) -> None:
    """Releases the workers that have received SIGTERM from the group.

    All workers must call this function at the end of a step. It returns if all workers must leave.
    This is the case if all of them have received SIGTERM, if the others could not continue, or if a
    launcher would treat the exit of one worker as the end of the job.

    Args:
        group: the workers.
        membership: this worker's membership.
        alike: see `can_go_on`.
        shards: this worker's shards of a sharded optimizer.
        min_workers: see `can_go_on`.
        steps: see `can_go_on`.

    Raises:
        SystemExit: this worker leaves, and others continue.
        GroupShrinks: other workers leave, and this worker continues.
        TfdistError: a worker is lost.
    """
    time.sleep(_GATHER_SECONDS)
    mine = [preemption.asked, group.options.launcher.elastic, FitProgress(shards=shards).to_json()]
    answers = [json.loads(text) for text in group.exchange("SIGTERM", json.dumps(mine))]
    leaving = {rank for rank, (asked, _, _) in enumerate(answers) if asked}
    held = [FitProgress.from_json(text).shards for _, _, text in answers]
    elastic = all(elastic for _, elastic, _ in answers)
    if not elastic or not can_go_on(leaving, held, alike, min_workers, steps):
        return
    me = group.topology.rank
    if me == min(leaving):
        names = ", ".join(str(group.topology.workers[rank]) for rank in sorted(leaving))
        logger.info(
            f"SIGTERM: leaving after {steps} steps with exit code {PREEMPTED}: {names}. The others "
            "continue."
        )
    if me not in leaving:
        membership.release(leaving)
        raise GroupShrinks(leaving)
    with contextlib.suppress(TfdistError):  # The others form a new group even if this fails.
        membership.release(leaving)
    raise SystemExit(PREEMPTED)


def can_go_on(
    leaving: Collection[int],
    held: Sequence[tuple[HeldShards, ...] | None],
    alike: Sequence[Sequence[int]] | None,
    min_workers: int,
    steps: int,
) -> bool:
    """Whether the remaining workers can continue training with the state that they have.

    Args:
        leaving: the ranks that leave.
        held: each worker's shards of a sharded optimizer, in rank order.
        alike: for each part of the model, the ranks that hold the part; None if all ranks hold the
            whole model.
        min_workers: the minimum number of remaining workers.
        steps: the number of committed steps.

    Example:
        >>> pipelines = [[0, 2], [1, 3]]  # 0 and 1 hold a model's two stages, and so do 2 and 3
        >>> can_go_on({2}, [None] * 4, pipelines, min_workers=2, steps=7)
        True
        >>> can_go_on({1, 2}, [None] * 4, pipelines, min_workers=3, steps=7)
        False
    """
    parts = alike or [range(len(held))]
    left = len(parts) * min(len(set(ranks) - set(leaving)) for ranks in parts)
    shards = [one for rank, one in enumerate(held) if rank not in leaving and one is not None]
    whole = not shards or find_shards(shards, steps) is not None
    return left >= max(1, min_workers) and whole
