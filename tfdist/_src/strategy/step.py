"""The step of a replica: its rows of the batch, its place among all replicas, and its updates.

Graphs outlive a change of the group. So tfdist's graphs contain operations that read the rank when
the graph runs (`place`). If other code reads a rank or a number of replicas during a trace, the
graph may contain this number as a constant, so the read is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfdist._src.comm import registry
from tfdist._src.comm.communicator_interface import Alone, Communicator
from tfdist._src.comm.tracing import GraphSpan
from tfdist._src.global_view.rules import CONTRIBUTION, EQUAL
from tfdist._src.internals.extended import LocalExtended, on_replica_id
from tfdist._src.internals.graphs import marking_operations
from tfdist._src.internals.tensorflow import get_current_replica_id_as_int


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """The numbers of rows of a batch, and other data that replicas exchange with these numbers.

    Attributes:
        rows: the number of rows of this replica, an int32 scalar.
        counts: the number of rows of each replica, an int32 vector.
        total: the number of rows of the global batch, an int32 scalar.
        first_row: the index of this replica's first row in the global batch, an int32 scalar.
        some_are_empty: whether at least one replica has no rows, a bool scalar.
        heard: the other data that was received with the numbers of rows, an int32 vector.
    """

    rows: tf.Tensor
    counts: tf.Tensor
    total: tf.Tensor
    first_row: tf.Tensor
    some_are_empty: tf.Tensor
    heard: tf.Tensor


class Step:
    """A step over a global batch, as a context manager.

    Attributes:
        key: distinguishes traces of functions in this step from their traces in other steps.
        agreed_on_overflow: whether the replicas have exchanged whether their gradients overflow.
            If so, either all replicas have non-finite gradients, or none of them has.
        late_in: the graph of the step, if the optimizer's update may be deferred to the end of the
            step; else None.
        late: the deferred update, or None. The module that performs the update defines its type.
    """

    clips_together = False  # Whether workers communicate to clip by the global norm.

    def __init__(self) -> None:
        self.agreed_on_overflow = False
        self.key = object()
        self.late_in: Any = None
        self.late: Any = None
        self._turns = UpdateOrder()

    def own_parts(self, values: Sequence[Any]) -> list[Any]:
        """Returns this replica's contributions to sums of values, such as gradients.

        The method is idempotent.

        Args:
            values: dense tensors, `tf.IndexedSlices` or None.
        """
        return list(values)

    def contributions(self, values: Sequence[Any]) -> list[Any]:
        """Returns this replica's contributions to sums, right before they are communicated.

        See `own_parts`.
        """
        return self.own_parts(values)

    def largest_over_replicas(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the elementwise maximum over the replicas that have rows.

        Args:
            values: non-negative tensors.
        """
        return list(values)

    def clip_by_global_norm(
        self, gradients: Sequence[Any], variables: Sequence[Any], norm: float
    ) -> list[Any]:
        """Clips the summed gradients by their global norm.

        Args:
            gradients: dense or `tf.IndexedSlices`.
            variables: their variables.
            norm: the maximum norm.
        """
        return clip_by_norm(gradients, norm, tf.linalg.global_norm(gradients))

    def sums(self, variable: Any) -> bool:
        """Whether this replica sums the gradients of a variable.

        If pipeline stages share the variable, a worker of another stage may sum them instead.
        """
        return True

    def sum_gradients_of_part(
        self,
        add_up: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        gradients: Sequence[Any],
        variables: Sequence[Any],
    ) -> list[Any]:
        """Sums the gradients of the part of the model that this replica trains.

        Args:
            add_up: a function that takes gradients and their variables, and sums the gradients
                over the replicas.
            gradients: dense or `tf.IndexedSlices`.
            variables: their variables.
        """
        return add_up(gradients, variables)

    def squares(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tf.Tensor:
        """Returns the sum of squares of all gradient elements, over all parts of the model.

        Args:
            gradients: the gradients of this replica's part, dense or `tf.IndexedSlices`.
            variables: their variables.
        """
        return sum_of_squares(gradients)

    def before_update(self, variable: Any) -> list[tf.Tensor]:
        """Returns the tensors, besides the gradient, that the update of a variable waits for."""
        return self._turns.before(variable) if self.late is not None else []

    def updated(self, variable: Any) -> None:
        """Records that a variable's update has been added to the graph."""
        if self.late is not None:
            self._turns.after(variable)

    def __enter__(self) -> Step:
        this_thread.steps.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        this_thread.steps.pop()


class OptimizerUpdate:
    """An optimizer's update of variables, once the summed gradients are available.

    Args:
        variables: the variables.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = variables
        self.span: GraphSpan | None = None

    def end(self) -> None:
        """Ends the update's span in the timeline, after the variables have been written."""
        if self.span is not None:
            self.span.end("optimizer", "update")


class _ThreadState(threading.local):
    """The steps and updates that a thread runs or traces, usually as a replica.

    Attributes:
        steps: the steps that the thread is in; each is nested in the previous one.
        creates_local_variables: whether the thread creates plain variables, even in a strategy's
            scope.
        optimizers: the number of nested optimizers that the thread is applying.
        gradients_are_summed: whether the gradients of these optimizers are already summed.
        summations: how often the thread has summed gradients so far.
        update: the optimizer's update that is running.
        adds_slices_in_order: whether the running update adds sparse gradients in a fixed order.
            The update sets this itself, because in a merge call, updates do not run in the
            replicas' threads.
    """

    creates_local_variables = False
    optimizers = 0
    gradients_are_summed = False
    summations = 0
    adds_slices_in_order = False

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.update = OptimizerUpdate(())


this_thread = _ThreadState()


class UpdateOrder:
    """Orders the updates of variables that could otherwise all begin together.

    Large variables are updated one after the other, so that the temporary tensors of their updates
    are not in memory together.
    """

    def __init__(self) -> None:
        self._last: tf.Tensor | None = None

    def before(self, variable: Any) -> list[tf.Tensor]:
        """Returns the tensors that a variable's update waits for."""
        # An update in a branch of a conditional cannot wait for a tensor of another branch.
        here = self._last is not None and self._last.graph is tf.compat.v1.get_default_graph()
        return [self._last] if here and _is_large(variable) else []

    def after(self, variable: Any) -> None:
        """Records that a variable's update has been added to the graph."""
        if _is_large(variable):
            self._last = variable.read_value()


def _is_large(variable: Any) -> bool:
    return bool(variable.shape.num_elements() * variable.dtype.size >= 2**20)


class GlobalStep(Step):
    """A step that is traced for the whole batch, and partitioned afterwards.

    The method `contributions` marks the gradients that an optimizer sums, so that the partitioned
    program communicates them.

    Args:
        static_rows: the number of rows of the batch, if the program knows it.
        own_statistics: whether each replica normalizes with the statistics of its own rows.
        assigns_own_statistics: with `own_statistics`, whether each replica updates the moving
            statistics with its own statistics, instead of the average over the replicas.
        gathers_statistics: whether the statistics of the whole batch are computed from the gathered
            statistics of the replicas.

    Attributes:
        static_rows: see Args.
        own_statistics: see Args.
        assigns_own_statistics: see Args.
        gathers_statistics: see Args.
    """

    def __init__(
        self,
        static_rows: int | None = None,
        *,
        own_statistics: bool = False,
        assigns_own_statistics: bool = False,
        gathers_statistics: bool = False,
    ) -> None:
        super().__init__()
        self.static_rows = static_rows
        self.own_statistics = own_statistics
        self.assigns_own_statistics = assigns_own_statistics
        self.gathers_statistics = gathers_statistics

    def contributions(self, values: Sequence[Any]) -> list[Any]:
        """Marks values of the whole batch as sums that are communicated next.

        In the partitioned program, a marked value is the worker's contribution to the sum.

        Args:
            values: dense tensors, `tf.IndexedSlices` or None. Only dense tensors are marked.
        """
        return _marked(values, CONTRIBUTION)


def gathered_parts(values: Sequence[Any]) -> list[Any]:
    """Marks values in a `GlobalStep` as this worker's own parts, which are gathered later.

    A value that does not depend on the worker must be zero, because the partitioned program keeps
    such a value on one worker only.

    Args:
        values: dense tensors, `tf.IndexedSlices` or None. Only dense tensors are marked.
    """
    return _marked_in_graph(values, CONTRIBUTION)


def equal_everywhere(values: Sequence[Any]) -> list[Any]:
    """Marks communicated values in a `GlobalStep`, because they are equal on all workers.

    Args:
        values: dense tensors, `tf.IndexedSlices` or None. Only dense tensors are marked.
    """
    return _marked_in_graph(values, EQUAL)


class EagerGlobalStep(GlobalStep):
    """A step that every replica runs eagerly, on the whole batch.

    Only the first replica contributes to sums, since all replicas have computed the same values.

    Args:
        leads: whether this is the first replica, a bool scalar.
    """

    def __init__(self, leads: tf.Tensor) -> None:
        super().__init__()
        self._leads = leads

    def own_parts(self, values: Sequence[Any]) -> list[Any]:
        return [v if v is None or self._leads else _nothing(v) for v in values]

    def contributions(self, values: Sequence[Any]) -> list[Any]:
        return self.own_parts(values)


def _nothing(value: Any) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(value.values[:0], value.indices[:0], value.dense_shape)
    return tf.zeros_like(value)


def _marked_in_graph(values: Sequence[Any], mark: str) -> list[Any]:
    traced = in_global_step() and not tf.executing_eagerly()
    return _marked(values, mark) if traced else list(values)


def _marked(values: Sequence[Any], mark: str) -> list[Any]:
    results = list(values)
    dense = [i for i, v in enumerate(results) if isinstance(v, tf.Tensor)]
    if dense:
        with marking_operations(mark):
            marked = tf.raw_ops.IdentityN(input=[results[i] for i in dense])
        for i, value in zip(dense, marked, strict=True):
            results[i] = tf.identity(value)  # Each value can be used before the others exist.
    return results


def clip_by_norm(gradients: Sequence[Any], norm: float, found: tf.Tensor) -> list[Any]:
    """Clips gradients by their global norm, which is given.

    As in Keras, sparse gradients become dense.

    Args:
        gradients: dense or `tf.IndexedSlices`.
        norm: the maximum norm.
        found: the global norm of the gradients.
    """
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return list(tf.clip_by_global_norm(dense, norm, use_norm=found)[0])


def sum_of_squares(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of squares of all elements, as a float32 scalar."""
    values = [tf.cast(getattr(g, "values", g), tf.float32) for g in gradients]
    return tf.add_n([tf.zeros([]), *(tf.reduce_sum(v * v) for v in values)])


def current_step() -> Step | None:
    """Returns the step that the calling replica is in; None outside of a step."""
    steps = this_thread.steps
    return steps[-1] if steps else None


def in_global_step() -> bool:
    """Whether the calling replica traces a program for the whole batch."""
    return isinstance(current_step(), GlobalStep)


@contextlib.contextmanager
def updating(variable: Any, arguments: Sequence[Any]) -> Iterator[None]:
    """Makes operations that update a variable wait for the update's arguments.

    Otherwise all operations of an update rule that depend only on its slots would run at the start
    of the step, and their results would stay in memory until the gradients are available.

    Args:
        variable: a variable of the strategy.
        arguments: the gradient and the other arguments of the update.
    """
    step = current_step()
    before = [a for a in arguments if isinstance(a, (tf.Tensor, tf.IndexedSlices))]
    if step is not None:
        before += step.before_update(variable)
    with tf.control_dependencies(before):
        yield
    if step is not None:
        step.updated(variable)


class PlacedExtended(LocalExtended):
    """The engine of a strategy with replicas on the devices of this process, one of the workers.

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
            return 1  # The program for the whole batch is written for one replica.
        return len(self._devices) * self._workers.size

    @property
    def communicates(self) -> bool:
        """Whether there are other replicas, or may be after a change of the group.

        Graphs outlive such a change, so they contain communication in both cases.
        """
        return len(self._devices) > 1 or self.spans_workers

    @property
    def spans_workers(self) -> bool:
        """Whether there are other workers, or may be after a change of the group."""
        return not isinstance(self._workers, Alone)

    @property
    def traces_know_group(self) -> bool:
        """Whether graphs may contain a rank or a replica count, and break if the group changes.

        This is the case if any code outside of tfdist has read such a number during a trace. Set
        this property to False when all graphs will be traced again.
        """
        return self.spans_workers and registry.know_group()

    @traces_know_group.setter
    def traces_know_group(self, know: bool) -> None:
        (registry.note_stale if know else registry.forget)()

    def place(self, device: Any = 0) -> tuple[Any, Any]:
        """Returns a replica's global ID and the number of replicas, read when the graph runs.

        Args:
            device: the index of the replica's device on this worker.
        """
        worker, workers = self._workers.place()
        return worker * len(self._devices) + device, workers * len(self._devices)

    def place_here(self) -> tuple[Any, Any]:
        """Returns the calling replica's global ID and the number of replicas; see `place`."""
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

    # KerasTuner uses these names for its temporary folders.

    @property
    def _task_type(self) -> str:
        return "worker"

    @property
    def _task_id(self) -> int:
        return self._workers.rank

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        with registry.unnoted():  # `_note_replica_id` records the read instead.
            return self._workers.rank * len(self._devices) + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        with registry.unnoted():
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
            return True  # All workers trace the write, but only the first worker runs it.
        return self._workers.rank == 0


def _note_replica_id(strategy: Any) -> None:
    extended = strategy.extended
    if isinstance(extended, PlacedExtended) and extended.spans_workers:
        registry.note_read()
