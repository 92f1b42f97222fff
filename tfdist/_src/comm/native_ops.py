"""The native collectives as TensorFlow operations, and the gradients of these operations.

Each function takes a token, which makes operations run in program order (see `tokens`), and the
name of a communicator. The ranks compare `key`, to detect that they call different collectives.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm import registry
from tfdist._src.native.api import Encoding

REDUCIBLE = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
_BITS = {8: tf.int64, 4: tf.int32, 2: tf.int16, 1: tf.int8}


def to_summable(tensor: tf.Tensor) -> tf.Tensor:
    """Converts a tensor to a type that collectives can sum.

    For example, bfloat16 is converted to float32, int8 is converted to int32, and a complex number
    is converted to a pair of real numbers.

    Raises:
        ValueError: values of this type cannot be summed, such as strings and resources.
    """
    dtype = tensor.dtype
    if dtype in REDUCIBLE:
        return tensor
    if dtype.is_complex:
        return tf.bitcast(tensor, dtype.real_dtype)
    if dtype.is_floating:
        return tf.cast(tensor, tf.float32)
    if dtype.is_integer or dtype.is_bool:
        return tf.cast(tensor, tf.int64 if dtype.size >= 4 else tf.int32)
    raise ValueError(f"A tensor of type {dtype.name} cannot be summed over workers.")


def to_native_summable(tensor: tf.Tensor) -> tf.Tensor:
    """Converts a tensor like `to_summable`, but keeps bfloat16.

    The native core sums bfloat16 in float32.
    """
    return tensor if tensor.dtype == tf.bfloat16 else to_summable(tensor)


def from_summable(value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Converts a sum back to the type of `like`, the tensor that was passed to `to_summable`."""
    dtype = like.dtype
    if dtype == value.dtype:
        return value
    if dtype.is_complex:
        return tf.bitcast(value, dtype)
    return tf.cast(value, dtype)


def to_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Reinterprets the bits of a tensor as int32 or int64.

    Unlike a float, an integer keeps its bits if a collective adds zeros to it.
    """
    dtype = tensor.dtype
    if dtype.is_bool:
        return tf.cast(tensor, tf.int32)
    bits = tf.bitcast(tensor, tf.int64 if dtype == tf.complex128 else _BITS[dtype.size])
    return bits if bits.dtype in REDUCIBLE else tf.cast(bits, tf.int32)


def from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts the result of `to_bits` back to a tensor of type `dtype`."""
    if dtype.is_bool:
        return tf.cast(bits, tf.bool)
    if dtype.size < 4:
        bits = tf.cast(bits, _BITS[dtype.size])
    return tf.bitcast(bits, dtype)


# The data types that the core's collectives support.
TYPES = frozenset(
    {
        tf.bool,
        tf.uint8,
        tf.int8,
        tf.int32,
        tf.int64,
        tf.float16,
        tf.bfloat16,
        tf.float32,
        tf.float64,
    }
)
REDUCTIONS = ("sum", "mean", "min", "max", "product")


def all_reduce(
    token: tf.Tensor,
    tensors: Sequence[tf.Tensor],
    op: str,
    communicator: str,
    key: str,
    *,
    overlaps: bool = False,
    gpu: int = 0,
    awaited: bool = False,
) -> list[tf.Tensor]:
    """Reduces tensors in one collective. All tensors must have the same type.

    Args:
        overlaps: whether the step runs other operations at the same time. Only the flight recorder
            uses this information.
        gpu: the index, among the communicator's GPUs, of the GPU that holds the tensors; 0 if the
            communicator uses no GPUs.
        awaited: whether the operation may end before the GPU has computed the result. Pass the
            result to `await_launched` before any other operation uses it.
    """
    return list(
        _ops().tfdist_all_reduce(
            token=token,
            tensors=tensors,
            op=op,
            communicator=communicator,
            key=key,
            overlaps=overlaps,
            gpu=gpu,
            awaited=awaited,
        )
    )


def await_launched(
    token: tf.Tensor, tensors: Sequence[tf.Tensor], communicator: str, key: str, *, gpu: int = 0
) -> list[tf.Tensor]:
    """Waits until the GPU has computed the results of `awaited` operations, and returns them."""
    return list(
        _ops().tfdist_await(
            token=token, tensors=tensors, communicator=communicator, key=key, gpu=gpu
        )
    )


def compressed_all_reduce(
    token: tf.Tensor,
    tensors: Sequence[tf.Tensor],
    errors: Sequence[tf.Tensor],
    seed: tf.Tensor,
    encoding: Encoding,
    within_hosts: bool,
    communicator: str,
    key: str,
    *,
    overlaps: bool = False,
    gpu: int = 0,
    awaited: bool = False,
) -> list[tf.Tensor]:
    """Sums float32 tensors in one collective, which encodes the values that it sends.

    Args:
        errors: the resources of the variables for error feedback, one float32 variable for each
            tensor; empty if there is no error feedback.
        seed: an int64 scalar, the seed of encodings that round at random.
        overlaps: as for `all_reduce`.
        gpu: as for `all_reduce`.
        awaited: as for `all_reduce`. The variables of `errors` are also not final before
            `await_launched` has ended.
    """
    return list(
        _ops().tfdist_compressed_all_reduce(
            token=token,
            tensors=tensors,
            errors=errors,
            seed=seed,
            **dataclasses.asdict(encoding),
            within_hosts=within_hosts,
            communicator=communicator,
            key=key,
            overlaps=overlaps,
            gpu=gpu,
            awaited=awaited,
        )
    )


def reduce_scatter(
    token: tf.Tensor, tensor: tf.Tensor, op: str, communicator: str, key: str, *, gpu: int = 0
) -> tf.Tensor:
    """Reduces a tensor like `all_reduce`, and returns only this rank's rows of the result."""
    return _ops().tfdist_reduce_scatter(
        token=token, tensor=tensor, op=op, communicator=communicator, key=key, gpu=gpu
    )


def all_gather(
    token: tf.Tensor, tensor: tf.Tensor, communicator: str, key: str, *, gpu: int = 0
) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first axis.

    The size of the first axis may differ between ranks.
    """
    gathered = _ops().tfdist_all_gather(
        token=token, tensor=tensor, communicator=communicator, key=key, gpu=gpu
    )
    if tensor.shape.rank is None:
        return gathered
    return tf.ensure_shape(gathered, [None, *tensor.shape[1:]])


def broadcast(
    token: tf.Tensor,
    tensor: tf.Tensor,
    root: int,
    communicator: str,
    key: str,
    *,
    gpu: int = 0,
) -> tf.Tensor:
    """Returns the root's tensor. All ranks must pass tensors of the same shape."""
    return _ops().tfdist_broadcast(
        token=token, tensor=tensor, root=root, communicator=communicator, key=key, gpu=gpu
    )


def all_to_all(
    token: tf.Tensor, tensor: tf.Tensor, rows: tf.Tensor, communicator: str, key: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends `rows[r]` rows of the tensor to each rank `r`.

    Returns:
        The received rows, and the number of rows received from each rank.
    """
    received, received_rows = _ops().tfdist_all_to_all(
        token=token, tensor=tensor, rows=rows, communicator=communicator, key=key
    )
    return received, received_rows


def send(token: tf.Tensor, tensor: tf.Tensor, rank: int, communicator: str, key: str) -> Any:
    """Sends a tensor to one rank. That rank must receive its messages in the order of the sends."""
    return _ops().tfdist_send(
        token=token, tensor=tensor, rank=rank, communicator=communicator, key=key
    )


def receive(
    token: tf.Tensor, shape: Any, dtype: tf.DType, rank: int, communicator: str, key: str
) -> tf.Tensor:
    """Receives a tensor from one rank. Its shape and type must be known."""
    return _ops().tfdist_receive(
        token=token,
        shape=tf.cast(shape, tf.int64),
        T=dtype,
        rank=rank,
        communicator=communicator,
        key=key,
    )


def barrier(token: tf.Tensor, communicator: str, key: str) -> Any:
    """Waits until all ranks have called this function."""
    return _ops().tfdist_barrier(token=token, communicator=communicator, key=key)


def _ops() -> Any:
    return native.load_ops()


def _settings(op: Any) -> tuple[str, str]:
    name = op.get_attr("communicator").decode()
    return name, op.get_attr("key").decode() + "/gradient"


def _gpu(op: Any) -> int:
    return int(op.get_attr("gpu"))


def _rank(op: Any) -> Any:
    """Returns the index, among all participants, of the one that called an operation."""
    communicator = registry.get(op.get_attr("communicator").decode())
    return communicator.on_gpu(_gpu(op)).place()[0]


@tf.RegisterGradient("TfdistAllReduce")  # type: ignore[untyped-decorator]
def _all_reduce_gradient(op: Any, *gradients: tf.Tensor) -> list[Any]:
    kind = op.get_attr("op").decode()
    if kind not in ("sum", "mean"):
        raise LookupError(
            f"all_reduce is differentiable for 'sum' and 'mean'. Received: {kind!r}. "
            "Apply tf.stop_gradient to its input."
        )
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return [None, *all_reduce(op.inputs[0], dense, kind, *_settings(op), gpu=_gpu(op))]


@tf.RegisterGradient("TfdistAwait")  # type: ignore[untyped-decorator]
def _await_gradient(_: Any, *gradients: tf.Tensor) -> list[Any]:
    return [None, *gradients]


@tf.RegisterGradient("TfdistReduceScatter")  # type: ignore[untyped-decorator]
def _reduce_scatter_gradient(op: Any, gradient: tf.Tensor) -> list[Any]:
    kind = op.get_attr("op").decode()
    if kind not in ("sum", "mean"):
        raise LookupError(
            f"reduce_scatter is differentiable for 'sum' and 'mean'. Received: {kind!r}. "
            "Apply tf.stop_gradient to its input."
        )
    full = all_gather(op.inputs[0], gradient, *_settings(op), gpu=_gpu(op))
    if kind == "mean":
        size = tf.shape(op.inputs[1])[0] / tf.maximum(tf.shape(gradient)[0], 1)
        full /= tf.cast(size, full.dtype)
    return [None, tf.reshape(full, tf.shape(op.inputs[1]))]


@tf.RegisterGradient("TfdistAllGather")  # type: ignore[untyped-decorator]
def _all_gather_gradient(op: Any, gradient: tf.Tensor) -> list[Any]:
    token, tensor = op.inputs
    name, key = _settings(op)
    rows = tf.shape(tensor, tf.int64)[:1]
    every = all_gather(token, rows, name, f"{key}/rows", gpu=_gpu(op))
    before = tf.cumsum(every, exclusive=True)
    dense = [tf.convert_to_tensor(gradient)]
    (total,) = all_reduce(token, dense, "sum", name, key, gpu=_gpu(op))
    rank = _rank(op)
    return [None, total[before[rank] : before[rank] + rows[0]]]


@tf.RegisterGradient("TfdistBroadcast")  # type: ignore[untyped-decorator]
def _broadcast_gradient(op: Any, gradient: tf.Tensor) -> list[Any]:
    dense = [tf.convert_to_tensor(gradient)]
    (total,) = all_reduce(op.inputs[0], dense, "sum", *_settings(op), gpu=_gpu(op))
    return [None, tf.where(_rank(op) == op.get_attr("root"), total, tf.zeros_like(total))]


@tf.RegisterGradient("TfdistAllToAll")  # type: ignore[untyped-decorator]
def _all_to_all_gradient(op: Any, gradient: tf.Tensor, _: Any) -> list[Any]:
    back, _ = all_to_all(op.inputs[0], gradient, op.outputs[1], *_settings(op))
    return [None, tf.reshape(back, tf.shape(op.inputs[1])), None]
