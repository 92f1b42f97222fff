"""A callback that names the worker that keeps the others waiting."""

import dataclasses
import socket
from typing import Any

import keras
import tensorflow as tf

from tfdist._src.callbacks.step_count import StepCount
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.group import Group
from tfdist._src.keras.fit.callback import Callback, GroupInfo
from tfdist._src.log import logger
from tfdist._src.monitoring import stragglers
from tfdist._src.monitoring.stragglers import (
    USUAL_FACTOR,
    Counts,
    Measurement,
    Straggler,
    describe,
    describe_end,
    find,
)
from tfdist._src.monitoring.training import StepTimer
from tfdist._src.strategy.extended import ReplicatedExtended, extended_if_ours, extended_of


class MeasuredSteps:
    """Measures the steps of this worker from the creation of this object.

    Args:
        model: the model in training.

    Attributes:
        timer: the timer, which must be notified when epochs and steps begin and end.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.timer = StepTimer()
        self._links = self.counts()

    @property
    def communicator(self) -> CoreCommunicator | None:
        """The communicator of all workers; None if their waiting times are not measured."""
        extended = self._extended
        if extended is None or extended.process_count == 1:
            return None
        if extended.in_stages or isinstance(extended.workers, CoreCommunicator):
            return extended.group.native()
        return None

    def measure(self) -> Measurement | None:
        """Returns the mean times since the last call; None if they cannot be compared."""
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
            stragglers.traffic(before, self._links),
            communicator.hosts,
        )

    def counts(self) -> dict[int, Counts]:
        """Returns the kernel's counters for the connections to each worker on another host."""
        if self.communicator is None or self._extended is None:
            return {}
        workers = self._extended.group.topology.workers
        ranks = {str(worker): rank for rank, worker in enumerate(workers)}
        return stragglers.by_rank(stragglers.communicators(), ranks)

    @property
    def _extended(self) -> ReplicatedExtended | None:
        return extended_if_ours(self._model.distribute_strategy)


class StragglerMonitor(Callback):
    """Names the worker that keeps the others waiting, and the cause.

    In synchronous training, each step takes equally long on all workers, because fast workers wait
    for slow workers. This callback compares the times that the workers need without this waiting:
    the time spent on input and computation, and the speed of the links to other hosts. The chief
    writes a line to stderr when a worker begins to keep the others waiting, when the worker or the
    cause changes, and when the delay has ended. If the stages of a pipeline take different times,
    the line names the worker with the slowest stage.

    The workers exchange a few numbers once in `every` batches. The callback needs the native
    collectives. With TensorFlow's collectives, or in a single process, it has no effect.

    Args:
        every: the number of batches between comparisons.
        factor: a worker counts as slow if its time is more than this multiple of the other workers'
            median. The factor must be greater than 1.

    Raises:
        ValueError: `every` is not a positive integer, or `factor` is not greater than 1.
        ProgramMismatchError: in training, if not all workers have this callback.

    Example:
        ```python
        model.fit(dataset, callbacks=[tfdist.callbacks.StragglerMonitor(every=100)])
        ```
        ```text
        tfdist: worker 2 (10.0.0.3:8470) on host node-c keeps the others waiting: its input takes
        61.3 ms of a step, where the median of the others is 2.1 ms. ...
        ```
    """

    same_on_all_workers = True

    def __init__(self, every: int = 100, factor: float = USUAL_FACTOR) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                f"`every` must be a positive number of batches. Received: {every!r}. Pass an "
                "integer such as 100."
            )
        if not factor > 1:
            raise ValueError(
                f"`factor` must be greater than 1. Received: {factor!r}. Pass a number such as 1.3."
            )
        self._every = every
        self._factor = factor
        self._count = StepCount()
        self._steps: MeasuredSteps | None = None
        self._hosts: list[str] = []
        self._named: Straggler | None = None

    def __repr__(self) -> str:
        return f"StragglerMonitor(every={self._every}, factor={self._factor})"

    def on_train_begin(self, logs: Any = None) -> None:
        self._count = StepCount()
        self._steps = MeasuredSteps(self.model)
        self._hosts, self._named = [], None

    def on_group_change(self, old: GroupInfo, new: GroupInfo) -> None:
        self._hosts, self._named = [], None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._measured.timer.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._count.end_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._count.begin_batch(batch)
        self._measured.timer.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count.end_batch(batch)
        self._measured.timer.end_batch(batch)
        if not self._count.completes(self._every):
            return
        mine, communicator = self._measured.measure(), self._measured.communicator
        if mine is not None and communicator is not None:
            self._report(find(self._gather(mine, communicator), self._factor, communicator.hosts))

    def state_dict(self) -> dict[str, Any]:
        return self._count.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count.load_state_dict(state)

    def _gather(self, mine: Measurement, communicator: CoreCommunicator) -> list[Measurement]:
        if not self._hosts:
            self._hosts = self._group.exchange("hosts", socket.gethostname())
        row = tf.constant([dataclasses.astuple(mine)], tf.float64)
        with self._group.naming_lost_workers():
            rows = communicator.all_gather(row, "stragglers").numpy()
        return [Measurement.of(row) for row in rows.tolist()]

    def _report(self, straggler: Straggler | None) -> None:
        before, self._named = self._named, straggler
        if straggler == before or not self._group.topology.is_chief:
            return
        if straggler is not None:
            logger.warning(f"{describe(straggler, self._name)}")
        elif before is not None:
            logger.info(f"{describe_end(before, self._name)}")

    def _name(self, rank: int) -> str:
        return f"{self._group.topology.workers[rank]} on host {self._hosts[rank]}"

    @property
    def _group(self) -> Group:
        return extended_of(self.model.distribute_strategy).group

    @property
    def _measured(self) -> MeasuredSteps:
        assert self._steps is not None, "training has begun"
        return self._steps
