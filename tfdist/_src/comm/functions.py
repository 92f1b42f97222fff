"""Collectives that user code can call, eagerly and in a `tf.function`.

Most functions accept a tensor or a nest of tensors. All ranks of a communicator must call the same
functions in the same order. A strategy that uses the native collectives creates the communicator
`"workers"`, with one rank for each worker. `NativeCommunicator.split` creates further
communicators.

All ranks must call a collective with the same name. By default, the name is the file and line of
the call. If ranks call a collective at different lines of the program, pass the same `name` at each
of these lines.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from tfdist._src.comm import native_ops, registry, tokens
from tfdist._src.comm.communicator_interface import NativeCommunicator, Traffic
from tfdist._src.comm.native_ops import REDUCTIONS
from tfdist._src.comm.registry import OneRank, invalid

_WORKERS = "workers"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_written(function: _Function) -> _Function:
    """Keeps AutoGraph from converting a function.

    In a converted function, `tokens.of_call` would not find the line of the user's call.
    """
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def communicator(name: str = _WORKERS) -> NativeCommunicator:
    """Returns the communicator with this name.

    Its `rank` and `size` describe this process's place in the group. `split` creates communicators
    for subsets of the ranks, `traffic` counts bytes, and `close` leaves the group.

    Args:
        name: the name of the communicator.

    Raises:
        ValueError: no communicator has this name.
    """
    return registry.get(name)  # type: ignore[no-any-return]


@_as_written
def all_reduce(value: Any, op: str = "sum", *, communicator: str = _WORKERS, name: str = "") -> Any:
    """Reduces a value over all ranks. The results are bitwise identical on all ranks.

    Args:
        value: a tensor or a nest of tensors, with the same shapes and types on all ranks. The types
            can be bool, uint8, int8, int32, int64, float16, bfloat16, float32 and float64. Values
            of float16 and bfloat16 are summed in float32.
        op: `"sum"`, `"mean"` (for floating-point types), `"min"`, `"max"` or `"product"`. For bool,
            the sum is true if the value of at least one rank is true.
        communicator: the name of the communicator.
        name: a name for this call, which must be the same on all ranks. By default, it is the file
            and line of the call.

    Returns:
        The reduced value, with the same structure as `value`. The results of `"sum"` and `"mean"`
        are differentiable.

    Raises:
        ValueError: `op` is unknown, or no communicator has this name.
        tf.errors.FailedPreconditionError: the ranks called different collectives.
        tf.errors.UnavailableError: a rank is lost.

    Example:
        >>> tfdist.collective.all_reduce({"loss": loss, "rows": rows})  # doctest: +SKIP
    """
    _check_op(op)
    group = registry.get(communicator)
    tensors = [_summable(v, "all_reduce", op) for v in tf.nest.flatten(value)]
    if isinstance(group, OneRank) or not tensors:
        _check(group)
        return tf.nest.pack_sequence_as(value, tensors)
    results: list[Any] = [None] * len(tensors)
    key = name or tokens.of_call()
    with tf.device(group.device):
        for dtype in sorted({t.dtype for t in tensors}, key=lambda d: d.name):
            indices = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            reduced = native_ops.all_reduce(
                group.token, [tensors[i] for i in indices], op, communicator, key
            )
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
    return tf.nest.pack_sequence_as(value, results)


@_as_written
def reduce_scatter(
    value: Any, op: str = "sum", *, communicator: str = _WORKERS, name: str = ""
) -> Any:
    """Reduces a value over all ranks, and returns a different part of the rows on each rank.

    Args:
        value: a tensor or a nest of tensors, as for `all_reduce`. The first dimension must be a
            multiple of the number of ranks.
        op: as for `all_reduce`.
        communicator: the name of the communicator.
        name: a name for this call, which must be the same on all ranks. By default, it is the file
            and line of the call.

    Returns:
        Rows `rank * n` to `(rank + 1) * n - 1` of the reduced value, where `n` is the number of
        rows divided by the number of ranks. The results of `"sum"` and `"mean"` are differentiable.

    Raises:
        ValueError: `op` is unknown, or no communicator has this name.
        tf.errors.FailedPreconditionError: the ranks called different collectives.
        tf.errors.InvalidArgumentError: the first dimension is not divisible by the number of ranks.
        tf.errors.UnavailableError: a rank is lost.
    """
    _check_op(op)
    return _map(
        tf.nest.map_structure(lambda v: _summable(v, "reduce_scatter", op, rows=True), value),
        communicator,
        name,
        lambda group, t, key: native_ops.reduce_scatter(group.token, t, op, communicator, key),
    )


@_as_written
def all_gather(value: Any, *, communicator: str = _WORKERS, name: str = "") -> Any:
    """Concatenates the tensors of all ranks along the first axis, in rank order.

    Args:
        value: a tensor or a nest of tensors, with the types that `all_reduce` accepts. The size of
            the first axis may differ between ranks.
        communicator: the name of the communicator.
        name: a name for this call, which must be the same on all ranks. By default, it is the file
            and line of the call.

    Returns:
        The rows of all ranks. The result is differentiable.
    """
    return _map(
        tf.nest.map_structure(lambda v: _sendable(v, "all_gather", rows=True), value),
        communicator,
        name,
        lambda group, t, key: native_ops.all_gather(group.token, t, communicator, key),
    )


@_as_written
def broadcast(value: Any, root: int = 0, *, communicator: str = _WORKERS, name: str = "") -> Any:
    """Sends the root's value to all ranks.

    Args:
        value: a tensor or a nest of tensors, with the same shapes and types on all ranks.
        root: the rank that provides the value.
        communicator: the name of the communicator.
        name: a name for this call, which must be the same on all ranks. By default, it is the file
            and line of the call.

    Returns:
        The root's value. The result is differentiable.
    """
    root = operator.index(root)
    if isinstance(registry.get(communicator), OneRank) and root != 0:
        raise invalid(f"The root of a broadcast must be a rank from 0 to 0. Received: {root}.")
    return _map(
        tf.nest.map_structure(lambda v: _sendable(v, "broadcast"), value),
        communicator,
        name,
        lambda group, t, key: native_ops.broadcast(group.token, t, root, communicator, key),
    )


@_as_written
def all_to_all(
    tensor: Any, rows: Any = None, *, communicator: str = _WORKERS, name: str = ""
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends different rows of a tensor to each rank.

    Args:
        tensor: a tensor that contains the rows for rank 0, followed by the rows for rank 1, and so
            on.
        rows: an int64 vector with the number of rows to send to each rank. By default, each rank
            receives the same number of rows.
        communicator: the name of the communicator.
        name: a name for this call, which must be the same on all ranks. By default, it is the file
            and line of the call.

    Returns:
        A tensor with the received rows, in the order of the senders' ranks, and an int64 vector
        with the number of rows received from each rank. The received rows are differentiable.
    """
    group = registry.get(communicator)
    tensor = _sendable(tensor, "all_to_all", rows=True)
    if rows is None:
        _, size = group.place()
        rows = tf.fill([size], tf.shape(tensor, tf.int64)[0] // tf.cast(size, tf.int64))
    rows = tf.cast(rows, tf.int64)
    if isinstance(group, OneRank):
        group.check()
        return group.all_to_all(tensor, rows)
    with tf.device(group.device):
        key = name or tokens.of_call()
        return native_ops.all_to_all(group.token, tensor, rows, communicator, key)


@_as_written
def send(value: Any, rank: int, *, communicator: str = _WORKERS, name: str = "") -> None:
    """Sends a tensor to another rank, which must call `receive`.

    Args:
        value: the tensor to send.
        rank: the rank of the receiver.
        communicator: the name of the communicator.
        name: a name for this message. The receiver must pass the same name.
    """
    tensor = _sendable(value, "send")
    group = _with_peer(communicator, rank)
    with tf.device(group.device):
        native_ops.send(group.token, tensor, rank, communicator, name)


@_as_written
def receive(
    shape: Sequence[int] | tf.Tensor,
    dtype: Any,
    rank: int,
    *,
    communicator: str = _WORKERS,
    name: str = "",
) -> tf.Tensor:
    """Receives a tensor from another rank, which must call `send`.

    Args:
        shape: the tensor's shape. It must equal the shape of the sender's tensor.
        dtype: the tensor's type. It must equal the type of the sender's tensor.
        rank: the rank of the sender.
        communicator: the name of the communicator.
        name: a name for this message. The sender must pass the same name.

    Returns:
        The received tensor.
    """
    dtype = _known_type(tf.as_dtype(dtype), "receive")
    group = _with_peer(communicator, rank)
    with tf.device(group.device):
        return native_ops.receive(group.token, shape, dtype, rank, communicator, name)


@_as_written
def barrier(*, communicator: str = _WORKERS, name: str = "") -> None:
    """Waits until all ranks have called this function.

    Args:
        communicator: the name of the communicator.
        name: a name for this call, which must be the same on all ranks.
    """
    group = registry.get(communicator)
    if isinstance(group, OneRank):
        group.check()
    else:
        with tf.device(group.device):
            native_ops.barrier(group.token, communicator, name)


def statistics(communicator: str | None = None) -> Traffic:
    """Returns this process's traffic so far.

    Args:
        communicator: the name of a communicator, to return only the traffic of this communicator.
            By default, returns the total traffic of all communicators, including closed ones.

    Example:
        >>> tfdist.collective.statistics().sent_bytes  # doctest: +SKIP
        33554432
    """
    if communicator is None:
        return registry.traffic()
    traffic: Traffic = registry.get(communicator).traffic()
    return traffic


def _map(tensors: Any, communicator: str, name: str, collective: Any) -> Any:
    group = registry.get(communicator)
    if isinstance(group, OneRank):
        group.check()
        return tensors
    key = name or tokens.of_call()
    with tf.device(group.device):
        return tf.nest.map_structure(lambda tensor: collective(group, tensor, key), tensors)


def _check(group: Any) -> None:
    if isinstance(group, OneRank):
        group.check()


def _sendable(value: Any, function: str, *, rows: bool = False) -> tf.Tensor:
    """Converts a value to a tensor that the native collectives accept.

    Args:
        value: a value that TensorFlow can convert to a tensor.
        function: the name of the collective that will process the tensor, for error messages.
        rows: whether the collective needs a tensor with at least one axis.

    Raises:
        tf.errors.InvalidArgumentError: the collective does not support the tensor's type or shape.
    """
    tensor = tf.convert_to_tensor(value)
    _known_type(tensor.dtype, function)
    if rows and tensor.shape.rank == 0:
        raise invalid(
            f"{function} needs a tensor with a first axis. Received: a scalar. Reshape it to [1]."
        )
    return tensor


def _summable(value: Any, function: str, op: str, *, rows: bool = False) -> tf.Tensor:
    """Converts a value as `_sendable` does, and checks that `op` can reduce it."""
    tensor = _sendable(value, function, rows=rows)
    if op == "mean" and not tensor.dtype.is_floating:
        raise invalid(
            f"A mean is defined for floating types. Received: {tensor.dtype.name}. Cast the "
            "tensor, or take the sum."
        )
    return tensor


def _known_type(dtype: tf.DType, function: str) -> tf.DType:
    if dtype not in native_ops.TYPES:
        known = ", ".join(sorted(one.name for one in native_ops.TYPES))
        raise invalid(
            f"{function} takes tensors of {known}. Received: {dtype.name}. Cast or encode it."
        )
    return dtype


def _with_peer(communicator: str, rank: int) -> Any:
    """Returns the communicator for a message; raises an error if this process is its only rank."""
    group = registry.get(communicator)
    if isinstance(group, OneRank):
        group.check()
        raise invalid(
            "Rank 0 of 1 can exchange messages with other ranks of its group only. Received: rank "
            f"{rank}."
        )
    return group


def _check_op(op: str) -> None:
    if op not in REDUCTIONS:
        raise ValueError(
            f"`op` must be one of {', '.join(map(repr, REDUCTIONS))}. Received: {op!r}."
        )
