"""Private APIs of TensorFlow: mirrored strategies, distributed input, eager context, profiles."""

import contextlib
import functools
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
    """One run of an operation, or of a kernel on a GPU.

    Attributes:
        name: `name:type` for an operation, or a kernel's name.
        begin: nanoseconds since 1970.
        end: nanoseconds since 1970.
    """

    name: str
    begin: int
    end: int


def read_threads(profile: bytes) -> Iterator[tuple[str, list[ProfiledOp]]]:
    """The operations in a profile, for each thread and device stream that ran any.

    Args:
        profile: the content of an `.xplane.pb` file.

    Yields:
        The name of a thread pool or stream, and its operations; names may repeat.

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
                # Other events of the host are TensorFlow's own functions.
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
    """The start time of the profiler; the times in the profile are relative to it."""
    for plane in space.planes:
        for stat in plane.stats:
            if plane.stat_metadata[stat.metadata_id].name == "profile_start_time":
                return int(stat.uint64_value)
    return 0


__all__ = [
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
    "simple_broadcast",
    "start_server",
    "staying_in_scope",
    "traced",
    "traced_stack",
    "tracing_summaries",
    "with_callers_lines",
]


class DatasetOfBatches(DistributedDataset):  # type: ignore[misc]
    """A distributed dataset with iterators that know the number of rows of a global batch.

    Args:
        dataset: the rows of this worker's replicas.
        input_workers: the devices.
        strategy: the strategy.
        options: a `tf.distribute.InputOptions` or None.
        batch_rows: the number of rows of each global batch; None if it is unknown.

    Attributes:
        batch_rows: the number of rows of each global batch, or None; the iterators have the same
            attribute.
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
    """Creates a variable as `tf.Variable` does outside of strategies and traced functions."""
    return default_variable_creator_v2(None, **arguments)


def only_reads_resources(operation: str) -> None:
    """Declares that operations of a type only read resources and need no ordering with others."""
    _control_dependencies.register_read_only_resource_op(operation)


@contextlib.contextmanager
def staying_in_scope() -> Iterator[None]:
    """Keeps this thread's scopes while the default graph is reset."""
    before = _ops.get_default_graph()
    yield
    _ops.get_default_graph()._thread_local = before._thread_local


def start_server(
    cluster: dict[str, list[str]], task_type: str, task_index: int, leader: str
) -> None:
    """Starts this process's TensorFlow server, through which collectives reach its peers.

    Args:
        cluster: addresses by job.
        task_type: this process's job.
        task_index: its index in the job.
        leader: the collective leader's device name, `/job:…/replica:0/task:…`.

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
    """Fails every pending and later collective of this process with `UnavailableError`."""
    import tensorflow as tf

    _context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def on_function_call(
    before: Callable[[], Any], after: Callable[[Any, BaseException | None, Any], None]
) -> None:
    """Listens for outermost calls of `tf.function`s.

    Args:
        before: called before each call.
        after: called with the function, the exception that it raised, if any, and the result of
            `before`.
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
    """The traces of a `tf.function` so far."""
    return list(function._list_all_concrete_functions())


def traced(function: Any, *arguments: Any) -> tuple[Any, Any]:
    """Traces a `tf.function`.

    Returns:
        The concrete function, and None. If the function creates variables with initial values that
        only a run can compute, the second element is instead the concrete function for that run;
        see `initialized`.
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
    """Makes `tf.summary` add its operations on every replica, not only on the first one."""
    state = _summaries._summary_state
    before = state.is_recording_distribution_strategy
    state.is_recording_distribution_strategy = True
    try:
        yield
    finally:
        state.is_recording_distribution_strategy = before


def initialized(function: Any) -> Any:
    """Whether the variables created by a `tf.function` have values; a bool scalar."""
    import tensorflow as tf

    made = [variable for ref in function._created_variables if (variable := ref()) is not None]
    return tf.reduce_all([tf.raw_ops.VarIsInitializedOp(resource=v.handle) for v in made])


def functions_operations(function: Any) -> set[str]:
    """The operation types in a `tf.function`'s traces so far."""
    names: set[str] = set()
    for concrete in concrete_functions(function):
        names.update(operation.type for operation in concrete.graph.get_operations())
        # A graph and its function library may be too large to serialize.
        with contextlib.suppress(ValueError):
            library = concrete.graph.as_graph_def().library
            names.update(node.op for called in library.function for node in called.node_def)
    return names


def traced_stack() -> list[tuple[str, int]]:
    """File and line of each frame, innermost first; autograph frames are mapped to the source."""
    return [(frame.filename, frame.lineno) for frame in reversed(_tf_stack.extract_stack())]


def with_callers_lines(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function for another thread, so that its operations keep the user's source lines.

    The calling thread runs code that autograph has generated, and only this thread has the map from
    the generated lines to the user's lines.
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
    """Adds another thread's map from the lines that AutoGraph generated to the user's lines."""

    def __init__(self, lines: dict[Any, Any]) -> None:
        super().__init__()
        self._lines = lines

    def get_effective_source_map(self) -> dict[Any, Any]:
        return {**self.parent.get_effective_source_map(), **self._lines}


def global_seed() -> Any:
    """The seed passed to `tf.random.set_seed`, or None."""
    return _context.global_seed()


def element_type(tensor: Any) -> Any:
    """Returns the element type of a list of tensors; None if the tensor is not a list."""
    known = _handle_data.get_resource_handle_data(tensor)
    if not known.is_set or len(known.shape_and_type) != 1:
        return None
    return _dtypes.as_dtype(known.shape_and_type[0].dtype)


def are_results_watched() -> bool:
    """Whether a callback inspects the results of operations, as for `enable_check_numerics`."""
    return bool(_context.context().op_callbacks)


def end_in_background(iterator: Any) -> None:
    """Destroys a distributed iterator in a background thread once it is no longer used.

    Destruction may take as long as the iterator has existed, up to a minute, since its autotuning
    thread can miss the cancellation and keep sleeping. In the main thread, this would delay all
    workers.
    """
    finalizer = weakref.finalize(iterator, _drop_in_background, iterator._iterators)
    finalizer.atexit = False


def _drop_in_background(parts: list[Any]) -> None:
    threading.Thread(target=parts.clear, name="tfdist-iterators", daemon=True).start()


def discard_next(iterator: Any) -> None:
    """Consumes the next element of a distributed iterator, if any, on this worker only."""
    take_next(iterator)


def take_next(iterator: Any) -> list[Any]:
    """Takes the next element of a distributed iterator on this worker only.

    Returns:
        One part for each of this worker's devices; empty at the end of the data.
    """
    parts = [one for part in iterator._iterators for one in part.get_next_as_optional_list()]
    return [part.get_value() for part in parts] if all(p.has_value() for p in parts) else []
