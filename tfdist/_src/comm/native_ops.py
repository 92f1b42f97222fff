"""The native collectives as TensorFlow operations, with their gradients and data types.

Each collective takes a token (see `tokens`) and the name of a communicator. The ranks compare
`key` to detect calls in a different order.
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
    """Converts to a type that can be summed without loss of range.

    bfloat16 becomes float32, small integers int32, complex numbers pairs of floats.

    Raises:
        ValueError: values of the type cannot be summed (strings, resources).
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
    """As `to_summable`, but keeps bfloat16, which the native core sums in float32."""
    return tensor if tensor.dtype == tf.bfloat16 else to_summable(tensor)


def from_summable(value: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Converts a sum back to the type of the tensor passed to `to_summable`."""
    dtype = like.dtype
    if dtype == value.dtype:
        return value
    if dtype.is_complex:
        return tf.bitcast(value, dtype)
    return tf.cast(value, dtype)


def to_bits(tensor: tf.Tensor) -> tf.Tensor:
    """The bit pattern as int32 or int64, which a sum with zeros preserves."""
    dtype = tensor.dtype
    if dtype.is_bool:
        return tf.cast(tensor, tf.int32)
    bits = tf.bitcast(tensor, tf.int64 if dtype == tf.complex128 else _BITS[dtype.size])
    return bits if bits.dtype in REDUCIBLE else tf.cast(bits, tf.int32)


def from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The inverse of `to_bits`."""
    if dtype.is_bool:
        return tf.cast(bits, tf.bool)
    if dtype.size < 4:
        bits = tf.cast(bits, _BITS[dtype.size])
    return tf.bitcast(bits, dtype)


# The types that the core supports.
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
    """Reduces tensors of one type in one collective.

    Args:
        overlaps: whether the step continues concurrently; used only by the recorder.
        gpu: the index of the tensors' GPU among the communicator's GPUs; 0 without GPUs.
        awaited: whether the operation may end while a GPU still executes it; the result is then
            available only after `await_launched`.
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
    """Returns the results of all `awaited` all-reduces together, once they are available."""
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
    """Sums float32 tensors in one collective that sends encoded values.

    Args:
        errors: resources of float32 variables, one for each tensor, or none.
        seed: an int64 scalar.
        overlaps: as for `all_reduce`.
        gpu: as for `all_reduce`.
        awaited: as for `all_reduce`; the variables of `errors` may also change until
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
    """This rank's shard, along the first axis, of the result of `all_reduce`."""
    return _ops().tfdist_reduce_scatter(
        token=token, tensor=tensor, op=op, communicator=communicator, key=key, gpu=gpu
    )


def all_gather(
    token: tf.Tensor, tensor: tf.Tensor, communicator: str, key: str, *, gpu: int = 0
) -> tf.Tensor:
    """Concatenates along the first axis; the numbers of rows may differ."""
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
    """The root's tensor; the shapes must agree."""
    return _ops().tfdist_broadcast(
        token=token, tensor=tensor, root=root, communicator=communicator, key=key, gpu=gpu
    )


def all_to_all(
    token: tf.Tensor, tensor: tf.Tensor, rows: tf.Tensor, communicator: str, key: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends `rows[r]` rows to each rank r; returns the received rows, and their number by rank."""
    received, received_rows = _ops().tfdist_all_to_all(
        token=token, tensor=tensor, rows=rows, communicator=communicator, key=key
    )
    return received, received_rows


def send(token: tf.Tensor, tensor: tf.Tensor, rank: int, communicator: str, key: str) -> Any:
    """Sends to one rank, which must receive in the same order."""
    return _ops().tfdist_send(
        token=token, tensor=tensor, rank=rank, communicator=communicator, key=key
    )


def receive(
    token: tf.Tensor, shape: Any, dtype: tf.DType, rank: int, communicator: str, key: str
) -> tf.Tensor:
    """Receives a tensor of known shape and type from one rank."""
    return _ops().tfdist_receive(
        token=token,
        shape=tf.cast(shape, tf.int64),
        T=dtype,
        rank=rank,
        communicator=communicator,
        key=key,
    )


def barrier(token: tf.Tensor, communicator: str, key: str) -> Any:
    """Waits for all ranks."""
    return _ops().tfdist_barrier(token=token, communicator=communicator, key=key)


def _ops() -> Any:
    return native.load_ops()


def _settings(op: Any) -> tuple[str, str]:
    name = op.get_attr("communicator").decode()
    return name, op.get_attr("key").decode() + "/gradient"


def _gpu(op: Any) -> int:
    return int(op.get_attr("gpu"))


def _rank(op: Any) -> Any:
    """The index of the participant that called an operation."""
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
