"""What this worker's steps take and its links carry, to be compared with those of the others."""

from __future__ import annotations

import keras

from tfdist._src.comm.native_communicator import NativeCommunicator
from tfdist._src.monitoring import links
from tfdist._src.monitoring.links import Counts
from tfdist._src.monitoring.step_timer import StepTimer
from tfdist._src.monitoring.stragglers import Measurement
from tfdist._src.strategy.extended import ReplicatedExtended


class MeasuredSteps:
    """Measures this worker's steps, from now on.

    Args:
        model: in training.

    Attributes:
        timer: is told when epochs and steps begin and end.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.timer = StepTimer()
        self._links = self.counts()

    @property
    def communicator(self) -> NativeCommunicator | None:
        """That of all workers, if there are several and the core measures what they wait for."""
        extended = self._extended
        if extended is None or extended.process_count == 1:
            return None
        if extended.in_stages or isinstance(extended.workers, NativeCommunicator):
            return extended.group.native()
        return None

    def measure(self) -> Measurement | None:
        """The means over the steps since the last call; None if they cannot be compared."""
        figures, communicator = self.timer.figures(), self.communicator
        self.timer.restart()
        before, self._links = self._links, self.counts()
        if communicator is None or figures is None or figures.activity is None:
            return None
        steps, counted = max(1, figures.steps), figures.activity
        return Measurement.with_links(
            figures.seconds / steps,
            counted.input / steps,
            counted.workers / steps,
            counted.network / steps,
            links.traffic(before, self._links),
            communicator.hosts,
        )

    def counts(self) -> dict[int, Counts]:
        """What the kernel counts of the connections to each worker of another host, so far."""
        if self.communicator is None or self._extended is None:
            return {}
        workers = self._extended.group.topology.workers
        ranks = {str(worker): rank for rank, worker in enumerate(workers)}
        return links.by_rank(links.communicators(), ranks)

    @property
    def _extended(self) -> ReplicatedExtended | None:
        strategy = self._model.distribute_strategy
        extended = None if strategy is None else strategy.extended
        return extended if isinstance(extended, ReplicatedExtended) else None
