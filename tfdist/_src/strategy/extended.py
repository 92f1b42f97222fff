"""The engine of the strategies: TensorFlow's local mirrored machinery plus communicators.

TensorFlow manages this process's devices; all communication between replicas or workers uses an
exchangeable `Communicator`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.comm.tracing import mark_stall
from tfdist._src.compression.compressor import Compressor
from tfdist._src.data.distribute import distribute_dataset, distribute_datasets_from_function
from tfdist._src.data.division import Division
from tfdist._src.group import Group
from tfdist._src.internals.extended import await_other_replicas
from tfdist._src.internals.keras import in_callers_state
from tfdist._src.internals.tensorflow import (
    DistributedValues,
    Mirrored,
    distribute_lib,
    distribute_utils,
    get_current_replica_id_as_int,
    simple_broadcast,
    with_callers_lines,
)
from tfdist._src.monitoring.server import serve
from tfdist._src.strategy import reduction
from tfdist._src.strategy.commit_point import Progress
from tfdist._src.strategy.step import GlobalStep, PlacedExtended, current_step, updating
from tfdist._src.strategy.step_failure import listen, running_step
from tfdist._src.strategy.variables import create_variable


def extended_of(strategy: tf.distribute.Strategy) -> ReplicatedExtended:
    """Returns the engine, `strategy.extended`, of one of tfdist's strategies."""
    extended: ReplicatedExtended = strategy.extended
    return extended


def extended_if_ours(strategy: Any) -> ReplicatedExtended | None:
    """Returns the engine of a strategy if the strategy is one of tfdist's; else None."""
    extended = getattr(strategy, "extended", None)
    return extended if isinstance(extended, ReplicatedExtended) else None


class ReplicatedExtended(PlacedExtended):
    """The engine of a strategy with a replica on each device of one or more workers.

    Between two steps, all replicas have identical copies of the model.

    Args:
        container: the strategy that owns this engine.
        devices: this worker's devices, one replica each.
        replicas: for each device, a communicator over all replicas of all workers.
        workers: a communicator with one participant per worker.
        group: the workers, with which this worker compares settings and exchanges data.
        cross_device_ops: the `tf.distribute.CrossDeviceOps` for reductions over this worker's
            devices that are called outside of replicas.

    Attributes:
        progress: the committed training steps of this worker.
        division: the division of the dataset that was distributed last; None if it is not divided.
        input_division: which datasets are preprocessed only for the rows of each worker; see
            `MultiWorkerMirroredStrategy`.
        batch_statistics: the rows that batch normalization computes statistics from in partitioned
            steps: "global" for the whole batch, or "replica" for each replica's rows.
    """

    explain: Callable[[Any, Any], Any]  # Prints the values that a model's step communicates.
    in_stages = False  # Whether the workers hold different stages of the model.

    def __init__(
        self,
        container: tf.distribute.Strategy,
        devices: Sequence[str],
        replicas: Sequence[Communicator],
        workers: Communicator,
        group: Group,
        cross_device_ops: Any = None,
    ) -> None:
        super().__init__(container, devices, workers)
        self._replicas = tuple(replicas)
        self.group = group
        self.batch_statistics = group.options.batch_statistics
        self.input_division = group.options.input_division
        self.division: Division | None = None
        self.compressor: Compressor | None = None
        self.progress = Progress()
        self._created: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.shards_optimizers = False
        self._local_ops = cross_device_ops
        if self.spans_workers or group.topology.size > 1:
            listen()
        serve(group.options, type(container).__name__)

    @property
    def replicas(self) -> tuple[Communicator, ...]:
        """For each of this worker's devices, a communicator over all replicas."""
        return self._replicas

    @property
    def process_count(self) -> int:
        """The number of processes that run the program, including those of all pipeline stages."""
        return self.group.topology.size

    def _use_merge_call(self) -> bool:
        # Eager replicas of one process run one after another, so a collective inside a replica
        # would wait forever. Instead, a merge call collects the values of all replicas before they
        # are communicated.
        return tf.executing_eagerly() and len(self._devices) > 1

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        # Each replica runs in a separate thread. A `tf.function` is traced outside these threads.
        compiled = isinstance(fn, tf.types.experimental.PolymorphicFunction)
        if not compiled:
            fn = in_callers_state(fn)
        if not tf.executing_eagerly():
            tokens.note_use()  # This must precede the operations that the replicas trace.
            return super()._call_for_each_replica(with_callers_lines(fn), args, kwargs)
        with running_step(self.group, eager=not compiled):
            return super()._call_for_each_replica(fn, args, kwargs)

    # Variables.

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = create_variable(self, next_creator, kwargs)
        self._created[id(variable)] = variable
        return variable

    @property
    def variables(self) -> list[Any]:
        """The variables that were created under the strategy and still exist."""
        return list(self._created.values())

    def agree_on_variable(self, description: str) -> None:
        self.group.agree("variable", description)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if isinstance(tensor, (float, int)):
            return tensor  # The variable converts a Python number to its own type.
        if not destinations:
            copies = []
            for device in self._devices:
                with tf.device(device):
                    copies.append(tf.identity(tensor))
            return distribute_utils.regroup(copies, wrap_class=Mirrored)
        return simple_broadcast(tensor, destinations, always_mirrored=True)

    # Input.

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute_dataset(self, dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return distribute_datasets_from_function(self, dataset_fn, options)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        first = self._get_replica_id_in_sync_group(0)
        contexts = [
            distribute_lib.ValueContext(first + i, self._num_replicas_in_sync)
            for i in range(len(self._devices))
        ]
        return distribute_utils.regroup([value_fn(c) for c in contexts], always_wrap=True)

    # Reductions inside replicas.

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        step = current_step()
        if isinstance(step, GlobalStep):
            return value  # The program is traced as if there were only one replica.
        called = tokens.of_tensorflow_call("all_reduce")
        if step is not None:
            flat = step.contributions(tf.nest.flatten(value))
            value = tf.nest.pack_sequence_as(value, flat)
        return self.reduce_over_replicas(reduce_op, value, options, called)

    def reduce_over_replicas(
        self, reduce_op: Any, value: Any, options: Any = None, called: str = ""
    ) -> Any:
        """Reduces a nest of a replica's tensors and `tf.IndexedSlices` over all replicas.

        Args:
            reduce_op: `tf.distribute.ReduceOp.SUM` or `MEAN`.
            value: the nest.
            options: a `tf.distribute.experimental.CommunicationOptions`.
            called: the call site in the user's code, or the name of an internal call.
        """
        if self._use_merge_call():
            return distribute_lib.StrategyExtendedV2._replica_ctx_all_reduce(
                self, reduce_op, value, options
            )
        self.await_other_replicas()
        communicator = self._replicas[get_current_replica_id_as_int()]
        return reduction.all_reduce(communicator, reduce_op, value, called)

    def sum_over_replicas(self, value: Any, name: str = "") -> Any:
        """Sums a nest of a replica's tensors and `tf.IndexedSlices` over all replicas.

        The sum is not differentiable, unlike `tf.distribute.ReplicaContext.all_reduce`: TensorFlow
        never releases the function that defines such a gradient, so the graph of the step would
        stay alive.

        Args:
            value: the nest.
            name: the name of this sum in messages and timelines.
        """
        return self.reduce_over_replicas(tf.distribute.ReduceOp.SUM, value, called=name)

    def note_stall(self, values: Sequence[tf.Tensor]) -> None:
        """Marks the point at which these values are computed, and the step waits for a sum."""
        if self._use_merge_call():
            return
        communicator = self._replicas[get_current_replica_id_as_int()]
        for name in communicator.across_workers:
            mark_stall(name, values)

    def gather_over_replicas(self, value: Any) -> Any:
        """Concatenates the rows of all replicas; each replica must call this method.

        Args:
            value: the replica's rows, a dense or ragged tensor.
        """
        self.await_other_replicas()
        return reduction.gather_rows(self._replicas[get_current_replica_id_as_int()], [value])

    def scatter_over_replicas(self, value: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Sums values with the rows of all replicas, and returns this replica's rows of the sum.

        Each replica must call this method.

        Args:
            value: the rows of all replicas, in order.
            counts: the number of rows of each replica, a vector.
        """
        self.await_other_replicas()
        communicator = self._replicas[get_current_replica_id_as_int()]
        return reduction.scatter_rows(communicator, value, counts)

    def await_other_replicas(self) -> None:
        """Waits until this process's other replicas have also been traced up to this point."""
        if len(self._devices) > 1:
            await_other_replicas()

    def gather_rows(self, parts: Sequence[Any]) -> Any:
        """Concatenates the rows of this worker's replicas, then the rows of all workers.

        Args:
            parts: one dense or ragged tensor per local replica.
        """
        return reduction.gather_rows(self._workers, parts)

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        with updating(var, args):
            return super()._replica_ctx_update(var, fn, args, kwargs, group)

    # Reductions outside of replicas.

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        flat = tf.nest.flatten(value)
        pairs = [(v, destinations) for v in flat]
        reduced = self._reduce_pairs(reduce_op, pairs, tokens.of_tensorflow_call("reduce"))
        return tf.nest.pack_sequence_as(value, reduced)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return self._reduce_pairs(reduce_op, value_destination_pairs, "", in_batch=True)

    def _reduce_pairs(
        self,
        reduce_op: Any,
        value_destination_pairs: Any,
        called: str,
        *,
        in_batch: bool = False,
    ) -> Any:
        results: list[Any] = []
        crossing: list[int] = []
        for value, destinations in value_destination_pairs:
            if distribute_utils.is_mirrored(value):
                results.append(reduction.reduce_mirrored(reduce_op, value, self.place()[1]))
            elif isinstance(value, DistributedValues) or self.spans_workers:
                crossing.append(len(results))
                results.append(reduction.sum_locally(value, self._local_ops))
            elif (
                reduce_op == tf.distribute.ReduceOp.MEAN
                or len(self._devices) == 1
                # As in TensorFlow, a gradient that was computed outside of the replicas is not
                # multiplied by the number of replicas.
                or (in_batch and tf.is_tensor(value))
            ):
                results.append(simple_broadcast(tf.convert_to_tensor(value), destinations))
            else:
                results.append(reduction.sum_plain(value, len(self._devices)))
        key = reduction.key_of(reduce_op, called)
        sums = reduction.sum_values(self._workers, [results[i] for i in crossing], key)
        for i, reduced in zip(crossing, sums, strict=True):
            value, destinations = value_destination_pairs[i]
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                per_worker = len(value.values) if isinstance(value, DistributedValues) else 1
                reduced = reduction.divide(reduced, per_worker * self._workers.place()[1])
            results[i] = simple_broadcast(reduced, destinations)
        return results

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        called = tokens.of_tensorflow_call("gather", "all_gather")

        def gather(value: Any) -> Any:
            parts = value.values if isinstance(value, DistributedValues) else [value]
            local = parts[0] if len(parts) == 1 else tf.concat(parts, axis)
            return simple_broadcast(
                reduction.all_gather(self._workers, tf.convert_to_tensor(local), axis, called),
                destinations,
            )

        return tf.nest.map_structure(gather, value)
