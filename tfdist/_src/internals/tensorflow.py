"""Private APIs of TensorFlow: strategies, distributed input, functions, and profiles."""

import contextlib
import functools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.distribute import distribute_lib, distribute_utils
from tensorflow.python.distribute.cross_device_ops import simple_broadcast
from tensorflow.python.distribute.input_lib import (
    DistributedDataset,
    DistributedDatasetAndIteratorSpec,
)
from tensorflow.python.distribute.input_util import (
    get_distributed_dataset,
    get_distributed_datasets_from_function,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.values import (
    DistributedValues,
    Mirrored,
    MirroredVariable,
    PerReplicaSpec,
    SyncOnReadVariable,
)
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int
from tensorflow.python.eager import context as _context
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import auto_control_deps_utils as _control_dependencies
from tensorflow.python.framework import dtypes as _dtypes
from tensorflow.python.framework import ops as _ops
from tensorflow.python.framework import random_seed as _random_seed
from tensorflow.python.ops import handle_data_util as _handle_data
from tensorflow.python.ops import summary_ops_v2 as _summaries
from tensorflow.python.ops.op_selector import UnliftableError
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    default_variable_creator_v2,
)
from tensorflow.python.trackable.base import CheckpointInitialValue
from tensorflow.python.util import tf_stack as _tf_stack
from tensorflow.tsl.profiler.protobuf import xplane_pb2

__all__ = ["ProfiledOp", "read_threads"]

_DEVICE = "/device:"
_PICOSECONDS = 1000  # in a nanosecond


class ProfiledOp(NamedTuple):
    """One execution of an operation, or of a kernel on a GPU, in a profile.

    Attributes:
        name: the name and type of an operation, as `name:type`, or the name of a kernel.
        begin: the start time, in nanoseconds since 1970.
        end: the end time, in nanoseconds since 1970.
    """

    name: str
    begin: int
    end: int


def read_threads(profile: bytes) -> Iterator[tuple[str, list[ProfiledOp]]]:
    """Yields the operations in a profile, for each thread and for each stream of a device.

    Args:
        profile: the content of an `.xplane.pb` file.

    Yields:
        The name of a thread pool or stream, and the operations that it has executed. Threads of the
        same pool have the same name. Threads and streams without operations are omitted.

    Raises:
        google.protobuf.message.DecodeError: the content is not a profile.
    """
    space = xplane_pb2.XSpace()
    space.ParseFromString(profile)
    start = _start(space)
    for plane in space.planes:
        is_device = plane.name.startswith(_DEVICE)
        for line in plane.lines:
            ops = []
            for event in line.events:
                about = plane.event_metadata[event.metadata_id]
                # The host's remaining events are calls of functions inside TensorFlow.
                if is_device or (
                    about.display_name and about.name.endswith(f":{about.display_name}")
                ):
                    begin = start + line.timestamp_ns + event.offset_ps // _PICOSECONDS
                    end = begin + event.duration_ps // _PICOSECONDS
                    ops.append(ProfiledOp(about.name, begin, end))
            if ops:
                pool = line.name.partition("/")[0]
                yield (
                    (f"{plane.name.removeprefix(_DEVICE)} {line.name}" if is_device else pool),
                    ops,
                )


def _start(space: xplane_pb2.XSpace) -> int:
    """Returns the start time of the profiler, to which the times in the profile are relative."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value)
    return 0


__all__ = [
    "DEFAULT_SEED",
    "CheckpointInitialValue",
    "DatasetOfBatches",
    "DistributedDatasetAndIteratorSpec",
    "DistributedValues",
    "Mirrored",
    "MirroredExtended",
    "MirroredVariable",
    "PerReplicaSpec",
    "ResourceVariable",
    "SyncOnReadVariable",
    "abort_collectives",
    "concrete_functions",
    "default_variable_creator",
    "discard_next",
    "distribute_lib",
    "distribute_utils",
    "end_in_background",
    "function_context",
    "functions_operations",
    "get_current_replica_id_as_int",
    "get_distributed_dataset",
    "get_distributed_datasets_from_function",
    "global_seed",
    "initialized",
    "on_function_call",
    "only_reads_resources",
    "set_default_seed",
    "simple_broadcast",
    "start_server",
    "staying_in_scope",
    "traced",
    "traced_stack",
    "tracing_summaries",
    "with_callers_lines",
]


class DatasetOfBatches(DistributedDataset):  # type: ignore[misc]
    """A distributed dataset that knows the number of rows in a global batch.

    Args:
        dataset: a dataset of the rows for this worker's replicas.
        input_workers: the devices that receive the rows.
        strategy: the strategy.
        options: a `tf.distribute.InputOptions`, or None.
        batch_rows: the number of rows in each global batch; None if it is unknown.

    Attributes:
        batch_rows: see the argument. Iterators over this dataset have the same attribute.
    """

    def __init__(
        self,
        dataset: Any,
        input_workers: Any,
        strategy: Any,
        options: Any,
        *,
        batch_rows: int | None,
    ) -> None:
        super().__init__(input_workers, strategy, dataset=dataset, options=options)
        self.batch_rows = batch_rows

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        iterator.batch_rows = self.batch_rows
        return iterator


def default_variable_creator(**arguments: Any) -> Any:
    """Creates a variable as `tf.Variable` does outside of strategies and of traced functions."""
    return default_variable_creator_v2(None, **arguments)


def only_reads_resources(operation: str) -> None:
    """Declares that operations of a type only read resources.

    TensorFlow then does not order them with other operations that read the same resources.
    """
    _control_dependencies.register_read_only_resource_op(operation)


@contextlib.contextmanager
def staying_in_scope() -> Iterator[None]:
    """Keeps the scopes that this thread has entered, even if the default graph is reset."""
    before = _ops.get_default_graph()
    yield
    _ops.get_default_graph()._thread_local = before._thread_local


def start_server(
    cluster: dict[str, list[str]], task_type: str, task_index: int, leader: str
) -> None:
    """Starts the TensorFlow server of this process, which TensorFlow's collectives need.

    Args:
        cluster: for each job of TensorFlow's cluster, the addresses of its tasks.
        task_type: the job to which this process belongs.
        task_index: the index of this process in the job.
        leader: the device name of the task that leads collectives, as `/job:…/replica:0/task:…`.

    Raises:
        RuntimeError: TensorFlow has already run an operation in this process.
    """
    import tensorflow as tf

    eager = _context.context()
    eager.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(f"/job:{task_type}/task:{task_index}",),
    )
    eager.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=tf.train.ClusterSpec(cluster).as_cluster_def(),
            default_session_config=eager.config,
            job_name=task_type,
            task_index=task_index,
            protocol="grpc",
        )
    )
    eager.ensure_initialized()


def abort_collectives(message: str) -> None:
    """Makes all pending and later TensorFlow collectives of this process fail.

    They raise `tf.errors.UnavailableError`.
    """
    import tensorflow as tf

    _context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def on_function_call(
    before: Callable[[], Any], after: Callable[[Any, BaseException | None, Any], None]
) -> None:
    """Registers functions to call before and after each call of a `tf.function`.

    Calls inside other `tf.function`s do not count.

    Args:
        before: a function without arguments that is called before each call.
        after: a function that is called after each call. Its arguments are the `tf.function`, the
            exception that the call has raised (None if it succeeded), and the result of `before`.
    """
    original = Function.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _context.executing_eagerly():
            return original(self, *args, **kwargs)
        found = before()
        try:
            result = original(self, *args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            after(self, error, found)
            raise
        after(self, None, found)
        return result

    Function.__call__ = call


def concrete_functions(function: Any) -> list[Any]:
    """Returns the concrete functions that a `tf.function` has traced so far."""
    return list(function._list_all_concrete_functions())


def traced(function: Any, *arguments: Any) -> tuple[Any, Any]:
    """Traces a `tf.function`.

    Returns:
        The concrete function, and None or a second concrete function. The second one is needed if
        the function creates variables, and TensorFlow can compute their initial values only by
        running it. Call the second function while `initialized` is false, and then the first one.
    """
    late = False
    initialize = function._initialize_uninitialized_variables

    def initialize_if_possible(initializers: Any) -> None:
        nonlocal late
        try:
            initialize(initializers)
        except UnliftableError:
            late = True

    function._initialize_uninitialized_variables = initialize_if_possible
    try:
        concrete = function.get_concrete_function(*arguments)
    finally:
        del function._initialize_uninitialized_variables
    return concrete, function._concrete_variable_creation_fn if late else None


@contextlib.contextmanager
def tracing_summaries() -> Iterator[None]:
    """Makes `tf.summary` add its operations on all replicas, instead of only on the first one."""
    state = _summaries._summary_state
    before = state.is_recording_distribution_strategy
    state.is_recording_distribution_strategy = True
    try:
        yield
    finally:
        state.is_recording_distribution_strategy = before


def initialized(function: Any) -> Any:
    """Returns a bool tensor: whether all variables created by a `tf.function` have values."""
    import tensorflow as tf

    made = [variable for ref in function._created_variables if (variable := ref()) is not None]
    return tf.reduce_all([tf.raw_ops.VarIsInitializedOp(resource=v.handle) for v in made])


def functions_operations(function: Any) -> set[str]:
    """Returns the types of all operations in the graphs that a `tf.function` has traced so far."""
    names: set[str] = set()
    for concrete in concrete_functions(function):
        names.update(operation.type for operation in concrete.graph.get_operations())
        # This fails if the graph and its function library are too large to serialize.
        with contextlib.suppress(ValueError):
            library = concrete.graph.as_graph_def().library
            names.update(node.op for called in library.function for node in called.node_def)
    return names


def traced_stack() -> list[tuple[str, int]]:
    """Returns the file and line of each frame on the stack, the innermost first.

    Lines of code that AutoGraph has generated are mapped to the original lines.
    """
    return [(frame.filename, frame.lineno) for frame in reversed(_tf_stack.extract_stack())]


def with_callers_lines(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that its operations have the user's source lines in another thread.

    If the current thread runs code that AutoGraph has generated, only this thread has the map from
    generated lines to the user's lines. The wrapper passes the map on to the thread that calls it.
    """
    map_here = _tf_stack._source_mapper_stacks[threading.get_ident()][-1]
    lines = dict(map_here.get_effective_source_map())
    if not lines:
        return function

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _SameLines(lines):
            return function(*args, **kwargs)

    return wrapped


class _SameLines(_tf_stack.StackTraceMapper):  # type: ignore[misc]
    """Adds the source map of another thread to the one of the current thread.

    A source map converts the lines that AutoGraph has generated to the user's lines.
    """

    def __init__(self, lines: dict[Any, Any]) -> None:
        super().__init__()
        self._lines = lines

    def get_effective_source_map(self) -> dict[Any, Any]:
        return {**self.parent.get_effective_source_map(), **self._lines}


def global_seed() -> Any:
    """Returns the seed that was passed to `tf.random.set_seed`; None if there is none."""
    return _context.global_seed()


DEFAULT_SEED = _random_seed.DEFAULT_GRAPH_SEED
"""The seed that TensorFlow combines with the seed of an operation if the program sets no seed."""


def set_default_seed(drawn: int) -> None:
    """Makes operations without a seed draw common numbers, and keeps the numbers of the others.

    Args:
        drawn: determines the seeds of eager operations without a seed.
    """
    _random_seed.set_seed(DEFAULT_SEED)
    _context.context()._rng = random.Random(drawn)


def element_type(tensor: Any) -> Any:
    """Returns the element type of a `TensorList`; None if the tensor is not a `TensorList`."""
    known = _handle_data.get_resource_handle_data(tensor)
    if not known.is_set or len(known.shape_and_type) != 1:
        return None
    return _dtypes.as_dtype(known.shape_and_type[0].dtype)


def are_results_watched() -> bool:
    """Whether a callback of TensorFlow inspects the results of all operations.

    An example is the callback of `tf.debugging.enable_check_numerics`.
    """
    return bool(_context.context().op_callbacks)


def end_in_background(iterator: Any) -> None:
    """Makes a background thread destroy a distributed iterator when it is no longer used.

    The destruction waits for the iterator's autotuning thread, which may be asleep and not notice
    that it has been canceled. It can take as long as the iterator has existed, but at most a
    minute. In the main thread, this would delay all workers.
    """
    finalizer = weakref.finalize(iterator, _drop_in_background, iterator._iterators)
    finalizer.atexit = False


def _drop_in_background(parts: list[Any]) -> None:
    threading.Thread(target=parts.clear, name="tfdist-iterators", daemon=True).start()


def discard_next(iterator: Any) -> None:
    """Takes the next element of a distributed iterator on this worker only, and discards it."""
    take_next(iterator)


def take_next(iterator: Any) -> list[Any]:
    """Takes the next element of a distributed iterator without involving other workers.

    Returns:
        For each device of this worker, its part of the element. The list is empty at the end of the
        data.
    """
    parts = [one for part in iterator._iterators for one in part.get_next_as_optional_list()]
    return [part.get_value() for part in parts] if all(p.has_value() for p in parts) else []
