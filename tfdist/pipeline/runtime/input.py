"""The next batch of a pipeline's input: the same rows on all its ranks, or an error on all.

Those ranks read the dataset that need its values: for the model's inputs, or with the last stage
for the targets. The others learn from them how many rows there are, and the form of the targets.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ProgramMismatchError, UnsupportedError
from tfdist.internals.keras import unpack_x_y_sample_weight
from tfdist.pipeline.placement.strategy import HybridStrategy
from tfdist.pipeline.runtime.error_propagation import Alike
from tfdist.trainer.fit.replica_step import count_rows
from tfdist.trainer.fit.step_functions import share_out, without_optionals


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


def next_batch(
    strategy: HybridStrategy, iterator: Iterator[Any], reads: bool, check: Callable[[Any], None]
) -> Batch:
    """Takes the next batch; all ranks of the job call this together.

    Args:
        strategy: the pipeline's.
        iterator: yields batches.
        reads: whether this rank needs the values; the others take nothing of the iterator.
        check: raises what is wrong with inputs.

    Raises:
        StopIteration: all ranks have come to the end.
        ProgramMismatchError: the ranks of a pipeline have different rows.
        Alike: this rank's batch is not what the model takes; all ranks have failed.
    """
    if not reads:
        rows, form = _agree(strategy, _Description(_UNREAD))
        if int(rows[0]) == _END:
            raise StopIteration
        return Batch(None, (None, None), rows, form)
    try:
        data = next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError) as end:
        _agree(strategy, _Description(_END))
        raise StopIteration from end
    return take(strategy, data, check)


def take(strategy: HybridStrategy, data: Any, check: Callable[[Any], None]) -> Batch:
    """A batch that a rank has; all ranks of the job call this together.

    Args:
        strategy: the pipeline's.
        data: the global batch.
        check: raises what is wrong with inputs.

    Raises:
        ProgramMismatchError: the ranks of a pipeline have different rows.
        Alike: this rank's batch is not what the model takes; all ranks have failed.
    """
    try:
        x, targets, rows = _dense(strategy, data)
        check(x)
    except Exception as error:
        with contextlib.suppress(ProgramMismatchError):
            _agree(strategy, _Description(_FAILED))
        raise Alike(error) from error
    form = zlib.crc32(repr(keras.tree.map_structure(form_of, targets)).encode())
    # One rank by itself has nobody to compare with.
    content = _content(targets) if strategy.pipeline_size > 1 else 0
    return Batch(x, targets, *_agree(strategy, _Description(rows, form, content)))


def _dense(strategy: HybridStrategy, data: Any) -> tuple[Any, tuple[Any, Any], int]:
    """This replica's inputs, targets with sample weights, and the number of its rows."""
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
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    return x, (y, sample_weight), int(count_rows(data))


def form_of(leaf: Any) -> tf.TensorSpec | None:
    """Of any number of rows."""
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


# In the place of the number of rows.
_END = -1
_UNREAD = -2
_FAILED = -3

# Of targets that are larger, some rows stand for all.
_COMPARED_BYTES = 2**20


@dataclass(frozen=True)
class _Description:
    """What a rank says of its batch.

    Attributes:
        rows: their number, or one of the above.
        form: of targets and sample weights.
        content: another number for other targets and sample weights.
    """

    rows: int
    form: int = 0
    content: int = 0


def _agree(strategy: HybridStrategy, own: _Description) -> tuple[tf.Tensor, int]:
    """For each replica the number of its rows; and a number for the forms of all targets."""
    extended = strategy.extended
    group, mesh = extended.group, extended.mesh
    if group.topology.size == 1:
        return tf.constant([own.rows]), own.form
    with group.naming_lost_workers():
        numbers = tf.constant([[own.rows, own.form, own.content]], tf.int64)
        gathered = group.native().all_gather(numbers)
    everyones = [_Description(*numbers) for numbers in gathered.numpy().tolist()]
    workers = group.topology.workers
    for worker, one in zip(workers, everyones, strict=True):
        if one.rows == _FAILED:
            raise ProgramMismatchError(f"{worker} could not take its batch, and says there why.")
    found = []
    for ranks in mesh.pipelines:
        readers = [rank for rank in ranks if everyones[rank].rows != _UNREAD]
        found.append(everyones[readers[0]])
        for rank in readers:
            if everyones[rank] != found[-1]:
                difference = _difference(found[-1], everyones[rank])
                raise ProgramMismatchError(
                    f"The workers of a pipeline read the same batches: {workers[readers[0]]} has "
                    f"{difference[0]} where {workers[rank]} has {difference[1]}. Give all workers "
                    "the same dataset in the same order: make it after the strategy, and shuffle "
                    "with a seed."
                )
    rows = tf.constant([one.rows for one in found], tf.int32)
    # One number for all, as all build their programs together.
    return rows, zlib.crc32(repr([one.form for one in found]).encode())


def _difference(one: _Description, other: _Description) -> tuple[str, str]:
    if (one.rows, one.form) == (other.rows, other.form):
        return f"one of {one.rows} rows", "one of as many rows with other targets"
    first, second = (
        "no more" if it.rows == _END else f"one of {it.rows} rows, targets of form {it.form:08x}"
        for it in (one, other)
    )
    return first, second


def _content(targets: Any) -> int:
    """A number that tells targets and sample weights from others."""
    total = 0
    for leaf in keras.tree.flatten(targets):
        if leaf is not None:
            values = leaf.numpy()
            values = values[:: values.nbytes // _COMPARED_BYTES + 1] if values.ndim else values
            # Strings are objects.
            words = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
            total = zlib.crc32(words, total)
    return total
