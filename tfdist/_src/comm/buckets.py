"""Packs tensors into buckets, so that one collective reduces all tensors of a bucket."""

from collections.abc import Callable, Sequence

import tensorflow as tf


def reduce_in_buckets(
    tensors: Sequence[tf.Tensor],
    all_reduce: Callable[[tf.Tensor], tf.Tensor],
    bucket_bytes: int,
) -> list[tf.Tensor]:
    """Reduces tensors in buckets, and starts with the last tensors.

    The backward pass computes the gradients of the last layers first. Their bucket can therefore be
    reduced while the backward pass still computes the gradients of the first layers.

    Args:
        tensors: dense tensors of types that collectives can sum, in the order of the forward pass.
        all_reduce: a function that reduces one flat tensor over all participants.
        bucket_bytes: the number of bytes at which a bucket is full. The next tensor starts a new
            bucket.

    Returns:
        The reduced tensors, in the same order as `tensors`.
    """
    reduced: list[tf.Tensor | None] = [None] * len(tensors)
    for bucket in plan(tensors, bucket_bytes):
        if len(bucket) == 1:
            reduced[bucket[0]] = all_reduce(tensors[bucket[0]])
            continue
        members = [tensors[i] for i in bucket]
        for i, tensor in zip(bucket, unpack(all_reduce(pack(members)), members), strict=True):
            reduced[i] = tensor
    return [t for t in reduced if t is not None]


# For a tensor of at least this many bytes, copying it into a bucket takes longer than running a
# separate collective.
_ALONE_BYTES = 1 << 20


def plan(
    tensors: Sequence[tf.Tensor],
    bucket_bytes: int,
    *,
    first_bytes: int | None = None,
    alone_bytes: int = _ALONE_BYTES,
) -> list[list[int]]:
    """Groups tensors into buckets.

    Args:
        tensors: the tensors, in the order of the forward pass.
        bucket_bytes: the number of bytes at which a bucket is full. The next tensor of the same
            type starts a new bucket.
        first_bytes: if given, replaces `bucket_bytes` for the first bucket. A smaller first bucket
            is full sooner, so that communication starts earlier.
        alone_bytes: a tensor of this many bytes or more gets a bucket of its own.

    Returns:
        For each bucket, the indices of its tensors. All tensors of a bucket have the same type. The
        first bucket contains the last tensors.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(tensors))):
        dtype = tensors[i].dtype
        size = (tensors[i].shape.num_elements() or 0) * dtype.size
        if size >= alone_bytes:
            buckets.append([i])
            continue
        bucket, filled = open_buckets.get(dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(i)
        filled += size
        first = first_bytes is not None and bucket is buckets[0]
        full = filled >= (first_bytes if first else bucket_bytes)
        open_buckets[dtype] = ([], 0) if full else (bucket, filled)
    return buckets


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one type into a flat tensor."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def unpack(flat: tf.Tensor, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Splits a flat tensor into parts with the shapes of `tensors`; drops padding at the end."""
    sizes = [tf.size(t) for t in tensors]
    rest = tf.size(flat) - tf.add_n(sizes)
    parts = tf.split(flat, [*sizes, rest], num=len(sizes) + 1)
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape)
        for part, t in zip(parts, tensors, strict=False)
    ]
