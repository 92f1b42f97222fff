"""Which group of workers is formed next, and when others are admitted to it."""

from __future__ import annotations

from typing import Any

from tfdist.cluster import Membership, Session
from tfdist.cluster.net.wait_messages import say
from tfdist.elastic.stages import OthersLeave, Stages, StagesMissing
from tfdist.errors import GroupLostError
from tfdist.trainer.fit.delivered_once import DeliveredOnce


class NextGroup:
    """Forms one group after the other.

    Args:
        stages: of the model in training.
        callbacks: those of the call of `fit`.
        membership: decides on the group; None for a process that has yet to be admitted.
        min_workers: how many workers it must have.
        max_workers: how many it may admit; None for any number.

    Attributes:
        membership: this process's, once it has one.
        min_workers: as given.
    """

    def __init__(
        self,
        stages: Stages,
        callbacks: DeliveredOnce,
        membership: Membership | None,
        *,
        min_workers: int,
        max_workers: int | None,
    ) -> None:
        self.membership = membership
        self.min_workers = min_workers
        self._stages, self._group = stages, stages.group
        self._callbacks = callbacks
        self._most = stages.most(max_workers)

    @property
    def is_full(self) -> bool:
        """Whether no others are admitted now."""
        size, most = self._group.topology.size, self._most
        if self.membership is None or (most is not None and size >= most):
            return True
        # Fewer may be in no pipeline.
        return self._stages.divided and size + len(self.membership.waiting) < (most or 0)

    def first(self) -> Session:
        """A group that may be too small for training, if a callback saves then."""
        return self._of_those_left(0)

    def after(self, error: OthersLeave | StagesMissing) -> Session:
        """The group after one that has formed no pipelines, or not only pipelines.

        Args:
            error: why.

        Raises:
            GroupLostError: there are no workers for a single pipeline.
        """
        if isinstance(error, OthersLeave):
            return self._of_those_left(error.count)
        size = max(self._group.topology.size + len(error.missing), self.min_workers)
        snapshots = any(hasattr(one, "on_state_lost") for one in self._callbacks.callbacks)
        if not snapshots:
            raise GroupLostError(error.without_others)
        if self._group.topology.is_chief:
            say(f"tfdist: {error} Training waits for new workers, to go back to a snapshot.")
        try:
            return self._form(min_workers=size, max_workers=size)
        except GroupLostError as lost:
            raise GroupLostError(f"{error.without_others} {lost}") from lost

    def large_enough(self) -> Session:
        """A group that is large enough for training."""
        return self._form()

    def _of_those_left(self, leaving: int) -> Session:
        lost = len(self._group.session.lost_ranks) + leaving
        left = self._group.topology.size - lost
        if left < self.min_workers and any(map(save_of, self._callbacks.callbacks)):
            return self._form(min_workers=1, joiners_welcome=False)
        if lost and left >= self.min_workers and self._stages.divided:
            return self._form(joiners_welcome=False)  # they may be in no pipeline
        return self._form()

    def _form(self, **changes: Any) -> Session:
        assert self.membership is not None
        terms = {"min_workers": self.min_workers, "max_workers": self._most}
        return self.membership.regroup(**{**terms, **changes})


def save_of(callback: Any) -> Any:
    """What a callback does before the workers wait for others, who may never come."""
    return getattr(callback, "on_group_wait", None)
