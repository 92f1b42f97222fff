"""Where an engine's replicas are among all replicas, which changes with the group of workers.

Graphs outlive such a change. So tfdist puts `place` into them, which they read when they run; what
else is read while a graph is traced may become a part of it, and is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import traces
from tfdist._src.comm.communicator_interface import Alone, Communicator
from tfdist._src.internals.extended import LocalExtended, on_replica_id
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int
from tfdist._src.strategy.step import in_global_step


class PlacedExtended(LocalExtended):
    """Replicas on the devices of this process, which is one of several workers.

    Args:
        container: the strategy that owns this engine.
        devices: this worker's devices, one replica each.
        workers: a communicator with one participant per worker.
    """

    def __init__(
        self, container: tf.distribute.Strategy, devices: Sequence[str], workers: Communicator
    ) -> None:
        super().__init__(container, devices)
        self._workers = workers
        on_replica_id(_note_replica_id)

    @property
    def _num_replicas_in_sync(self) -> int:
        if in_global_step():
            return 1  # The program for the whole batch is that of one replica.
        return len(self._devices) * self._workers.size

    @property
    def communicates(self) -> bool:
        """Whether there are other replicas, or may be while graphs of today are in use."""
        return len(self._devices) > 1 or self.spans_workers

    @property
    def spans_workers(self) -> bool:
        """Whether there are other workers, or may be while graphs of today are in use."""
        return not isinstance(self._workers, Alone)

    @property
    def traces_know_group(self) -> bool:
        """Whether graphs may know ranks or numbers of replicas, so that a change makes them wrong.

        They do if anything but tfdist has read such a number while they were traced. Set it to
        False when all of them will be traced again.
        """
        return self.spans_workers and traces.know_group()

    @traces_know_group.setter
    def traces_know_group(self, know: bool) -> None:
        (traces.note_stale if know else traces.forget)()

    def place(self, device: Any = 0) -> tuple[Any, Any]:
        """A replica's number among all, and their number, as the graph finds them when it runs.

        Args:
            device: the number of the replica's device among this worker's.
        """
        worker, workers = self._workers.place()
        return worker * len(self._devices) + device, workers * len(self._devices)

    def place_here(self) -> tuple[Any, Any]:
        """The same for the calling replica."""
        return self.place(get_current_replica_id_as_int())

    @property
    def workers(self) -> Communicator:
        """The communicator with one participant per worker."""
        return self._workers

    @property
    def worker_count(self) -> int:
        """The number of workers in the group."""
        return self._workers.size

    @property
    def worker_rank(self) -> int:
        """This worker's position in the group."""
        return self._workers.rank

    def _in_multi_worker_mode(self) -> bool:
        return self.spans_workers

    # KerasTuner names its temporary folders by these.

    @property
    def _task_type(self) -> str:
        return "worker"

    @property
    def _task_id(self) -> int:
        return self._workers.rank

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        with traces.unnoted():  # It is noted when a replica's context is asked for it.
            return self._workers.rank * len(self._devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        with traces.unnoted():
            return replica_id_in_sync_group - self._workers.rank * len(self._devices)

    @property
    def experimental_between_graph(self) -> bool:
        return self.spans_workers

    @property
    def should_checkpoint(self) -> bool:
        return self._workers.rank == 0

    @property
    def should_save_summary(self) -> bool:
        if in_global_step():
            return True  # All workers trace the same program; the first one writes.
        return self._workers.rank == 0


def _note_replica_id(strategy: Any) -> None:
    extended = strategy.extended
    if isinstance(extended, PlacedExtended) and extended.spans_workers:
        traces.note_read()
