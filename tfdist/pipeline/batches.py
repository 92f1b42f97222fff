"""The next batch of a pipeline's input: the same rows on all its ranks, or an error on all.

Those ranks read the dataset that need its values: for the model's inputs, or with the last stage
for the targets. The others learn from them how many rows there are, and the form of the targets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ProgramMismatchError, UnsupportedError
from tfdist.internals.keras import unpack_x_y_sample_weight
from tfdist.pipeline.strategy import HybridStrategy
from tfdist.trainer.functions import share_out, without_optionals
from tfdist.trainer.replica_step import count_rows


@dataclass(frozen=True)
class Batch:
    """This replica's part of a global batch.

    Attributes:
        x: the inputs; None on a rank that does not read.
        targets: targets and sample weights; None on a rank that does not read.
        rows: for each replica the number of its rows, an int32 tensor.
        form: another number for other forms of targets and sample weights; the same on all ranks.
    """

    x: Any
    targets: Any
    rows: tf.Tensor
    form: int


def next_batch(strategy: HybridStrategy, iterator: Iterator[Any], reads: bool) -> Batch:
    """Takes the next batch; all ranks of the job call this together.

    Args:
        strategy: the pipeline's.
        iterator: yields batches.
        reads: whether this rank needs the values; the others take nothing of the iterator.

    Raises:
        StopIteration: all ranks have come to the end.
        ProgramMismatchError: the ranks of a pipeline have different rows.
        UnsupportedError: a component is not dense.
    """
    if not reads:
        rows, form = _agree(strategy, _UNREAD, 0)
        if int(rows[0]) == _END:
            raise StopIteration
        return Batch(None, (None, None), rows, form)
    try:
        data = next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError) as end:
        _agree(strategy, _END, 0)
        raise StopIteration from end
    return take(strategy, data)


def take(strategy: HybridStrategy, data: Any) -> Batch:
    """A batch that a rank has; all ranks of the job call this together.

    Raises:
        ProgramMismatchError: the ranks of a pipeline have different rows.
        UnsupportedError: a component is not dense.
    """
    # A list that a generator yields stands for a tuple.
    data = share_out(strategy, tuple(data) if isinstance(data, list) else data)
    data = keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], data)
    data = without_optionals(data)
    for leaf in keras.tree.flatten(data):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise UnsupportedError(
                "A batch for a pipeline is made of dense tensors. Received: a "
                f"{type(leaf).__name__}. Pad it or make it dense in the dataset."
            )
    data = keras.tree.map_structure(lambda v: v if v is None else tf.convert_to_tensor(v), data)
    x, *targets = unpack_x_y_sample_weight(data)
    form = zlib.crc32(repr(keras.tree.map_structure(form_of, targets)).encode())
    return Batch(x, tuple(targets), *_agree(strategy, int(count_rows(data)), form))


def form_of(leaf: Any) -> tf.TensorSpec | None:
    """Of any number of rows."""
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


_END = -1
_UNREAD = -2


def _agree(strategy: HybridStrategy, rows: int, form: int) -> tuple[tf.Tensor, int]:
    """For each replica the number of its rows; and the form of targets and sample weights."""
    extended = strategy.extended
    group, mesh = extended.group, extended.mesh
    if group.topology.size == 1:
        return tf.constant([rows]), form
    with group.naming_lost_workers():
        gathered = group.native().all_gather(tf.constant([[rows, form]], tf.int64))
    everyones = [tuple(pair) for pair in gathered.numpy().tolist()]
    found = []
    for ranks in mesh.pipelines:
        readers = [rank for rank in ranks if everyones[rank][0] != _UNREAD]
        found.append(everyones[readers[0]])
        for rank in readers:
            if everyones[rank] != found[-1]:
                first, other = group.topology.workers[readers[0]], group.topology.workers[rank]
                raise ProgramMismatchError(
                    "The workers of a pipeline read the same batches: "
                    f"{first} has {_describe(*found[-1])} where {other} has "
                    f"{_describe(*everyones[rank])}. Give all workers the same dataset."
                )
    return tf.constant([count for count, _ in found], tf.int32), max(form for _, form in found)


def _describe(rows: int, form: int) -> str:
    return "no more" if rows == _END else f"one of {rows} rows, targets of form {form:08x}"
