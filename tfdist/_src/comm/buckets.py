"""Packs tensors into buckets, each reduced by one collective."""

from collections.abc import Callable, Sequence

import tensorflow as tf


def reduce_in_buckets(
    tensors: Sequence[tf.Tensor],
    all_reduce: Callable[[tf.Tensor], tf.Tensor],
    bucket_bytes: int,
) -> list[tf.Tensor]:
    """Reduces tensors bucket by bucket, the last tensors first.

    Gradients become available in backward order, so a bucket of the last tensors can be reduced
    while the backward pass still computes the first.

    Args:
        tensors: dense tensors of summable types, in the order of the forward pass.
        all_reduce: reduces one flat tensor.
        bucket_bytes: a bucket is closed once it holds at least this many bytes.

    Returns:
        The reduced tensors, in the given order.
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


# Packing a tensor of at least this size costs more than a separate collective.
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
        bucket_bytes: a bucket is closed once it holds at least this many bytes.
        first_bytes: the limit of the first bucket instead of `bucket_bytes`; a lower limit makes
            communication start earlier.
        alone_bytes: a tensor of at least this many bytes gets a separate bucket.

    Returns:
        Buckets of indices, in backward order; the tensors of a bucket have the same type.
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
    """Splits a flat tensor into parts with the shapes of `tensors`; drops any surplus values."""
    sizes = [tf.size(t) for t in tensors]
    rest = tf.size(flat) - tf.add_n(sizes)
    parts = tf.split(flat, [*sizes, rest], num=len(sizes) + 1)
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(t)), t.shape)
        for part, t in zip(parts, tensors, strict=False)
    ]
