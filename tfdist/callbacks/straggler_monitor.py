"""A callback that names the worker that keeps the others waiting."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.net.wait_messages import say
from tfdist.collective.activity import Activity
from tfdist.collective.native_communicator import NativeCommunicator
from tfdist.monitoring import links
from tfdist.monitoring.links import Counts
from tfdist.monitoring.step_timer import StepFigures, StepTimer
from tfdist.monitoring.stragglers import Measurement, Straggler, describe, describe_end, find
from tfdist.strategies.extended import ReplicatedExtended
from tfdist.strategies.group import Group


class StragglerMonitor(keras.callbacks.Callback):  # type: ignore[misc]
    """Names the worker that keeps the others waiting, and what is slow there.

    All steps of synchronous training take equally long on all workers, since the fast ones wait for
    the slow ones. This callback compares the workers' own times, from which the waiting has been
    subtracted: the time that they wait for input and compute, and how fast their links to other
    hosts are. The chief writes a line to stderr when a worker begins to keep the others waiting,
    when the worker or the cause changes, and when it has ended. In a pipeline whose stages take
    differently long, that is the worker of the slowest stage.

    Every `every` batches the workers exchange a few numbers. Needs the native collectives; with
    TensorFlow's, or in a single process, the callback has no effect.

    Args:
        every: the number of batches between comparisons.
        factor: how many times the median of the other workers counts as slow; greater than 1.

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

    def __init__(self, every: int = 100, factor: float = 1.3) -> None:
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
        self._timer = StepTimer()
        self._calls = 0
        self._hosts: list[str] = []
        self._links: dict[int, Counts] = {}
        self._named: Straggler | None = None

    def __repr__(self) -> str:
        return f"StragglerMonitor(every={self._every}, factor={self._factor})"

    def on_train_begin(self, logs: Any = None) -> None:
        self._timer.begin_training()
        self._calls, self._named = 0, None
        if self._communicator() is not None:
            self._hosts = self._group.exchange("hosts", socket.gethostname())
            self._links = self._counts()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._timer.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._timer.begin_batch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._timer.end_batch(batch)
        self._calls += 1
        if self._calls % self._every:
            return
        figures, communicator = self._timer.figures(), self._communicator()
        if communicator is not None and figures is not None and figures.activity is not None:
            measured = self._gather(communicator, figures, figures.activity)
            self._report(find(measured, self._factor, communicator.hosts))
        self._timer.restart()

    def _gather(
        self, communicator: NativeCommunicator, figures: StepFigures, counted: Activity
    ) -> list[Measurement]:
        before, self._links = self._links, self._counts()
        steps = max(1, figures.steps)
        mine = Measurement.with_links(
            figures.seconds / steps,
            counted.input / steps,
            counted.workers / steps,
            counted.network / steps,
            links.sent(before, self._links),
            communicator.hosts,
        )
        row = tf.constant([dataclasses.astuple(mine)], tf.float64)
        with self._group.naming_lost_workers():
            rows = communicator.all_gather(row, "stragglers").numpy()
        return [
            Measurement(step, data, workers, network, best, int(peer), rate, int(hosts))
            for step, data, workers, network, best, peer, rate, hosts in rows.tolist()
        ]

    def _counts(self) -> dict[int, Counts]:
        workers = self._group.topology.workers
        ranks = {str(worker): rank for rank, worker in enumerate(workers)}
        return links.by_rank(links.communicators(), ranks)

    def _report(self, straggler: Straggler | None) -> None:
        before, self._named = self._named, straggler
        if straggler == before or not self._group.topology.is_chief:
            return
        if straggler is not None:
            say(f"tfdist: {describe(straggler, self._name)}")
        elif before is not None:
            say(f"tfdist: {describe_end(before, self._name)}")

    def _name(self, rank: int) -> str:
        return f"{self._group.topology.workers[rank]} on host {self._hosts[rank]}"

    @property
    def _group(self) -> Group:
        return self.model.distribute_strategy.extended.group  # type: ignore[no-any-return]

    def _communicator(self) -> NativeCommunicator | None:
        """The communicator of all workers, if the native core measures what they wait for."""
        strategy = self.model.distribute_strategy
        extended = None if strategy is None else strategy.extended
        if not isinstance(extended, ReplicatedExtended) or extended.process_count == 1:
            return None
        if extended.in_stages or isinstance(extended.workers, NativeCommunicator):
            return extended.group.native()
        return None
