"""Gets the next batch of a pipeline: the same rows on all its ranks, or an error on all.

Only some ranks read the dataset: the ranks that use the model's inputs, and the rank with the last
stage, which uses the targets. They send the others the number of rows and a hash of the targets'
specs.
"""

import contextlib
import functools
import operator
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._src.data.distribute import without_none_components
from tfdist._src.internals.keras import unpack_x_y_sample_weight
from tfdist._src.keras.fit.step_exchange import Request, count_rows, step_exchange
from tfdist._src.keras.fit.step_functions import received, shard_batch, wait_for
from tfdist._src.pipeline.placement.strategy import HybridStrategy, pipeline_extended_of
from tfdist._src.pipeline.runtime.channels import AllRanksFailed
from tfdist.errors import ProgramMismatchError, UnsupportedError


@dataclass(frozen=True)
class Batch:
    """This replica's part of a global batch.

    Attributes:
        x: the inputs; None on a rank that does not read.
        targets: targets and sample weights; None on a rank that does not read.
        rows: the number of rows of each replica, an int32 tensor.
        spec_hash: a hash of the specs of targets and sample weights, identical on all ranks.
        asked: the ranks' requests for the end of the step; see `keras.fit.step_exchange`.
    """

    x: Any
    targets: Any
    rows: tf.Tensor
    spec_hash: int
    asked: Request | None = None


class State(NamedTuple):
    """A rank's state between steps.

    Attributes:
        shared: a number derived from the part of the state that must be equal on all ranks.
        of_stages: a number derived from the part of the state that must be equal on ranks with the
            same stages.
        check: compares the whole state, and raises an error that names a difference; collective
            over all ranks.
    """

    shared: int
    of_stages: int
    check: Callable[[], None]


def next_batch(
    strategy: HybridStrategy,
    iterator: Iterator[Any],
    reads: bool,
    check: Callable[[Any], None],
    state: State,
) -> Batch:
    """Returns the next batch; collective over all ranks of the job.

    Args:
        strategy: the pipeline's strategy.
        iterator: yields batches.
        reads: whether this rank needs the values; otherwise it does not advance the iterator.
        check: raises an error for invalid inputs.
        state: this rank's state, to compare.

    Raises:
        StopIteration: the data is exhausted on all ranks.
        ProgramMismatchError: the ranks of a pipeline have different rows, or another rank has
            rejected its batch.
        ReplicaMismatchError: the ranks have different states.
        AllRanksFailed: this rank rejects its batch; the other ranks raise an error as well.
    """
    if not reads:
        received(wait_for(lambda: None))
        rows, spec_hash, asked = _agree(strategy, _Description(_NOT_READ), state)
        if int(rows[0]) == _END:
            raise StopIteration
        return Batch(None, (None, None), rows, spec_hash, asked)
    try:
        data = received(wait_for(lambda: next(iterator)))
    except (StopIteration, tf.errors.OutOfRangeError) as end:
        _agree(strategy, _Description(_END), state)
        raise StopIteration from end
    return agree_on_batch(strategy, data, check, state)


def agree_on_batch(
    strategy: HybridStrategy, data: Any, check: Callable[[Any], None], state: State
) -> Batch:
    """Returns this replica's part of a batch; collective over all ranks of the job.

    Args:
        strategy: the pipeline's strategy.
        data: the global batch.
        check: raises an error for invalid inputs.
        state: this rank's state, to compare.

    Raises:
        ProgramMismatchError: the ranks of a pipeline have different rows, or another rank has
            rejected its batch.
        ReplicaMismatchError: the ranks have different states.
        AllRanksFailed: this rank rejects its batch; the other ranks raise an error as well.
    """
    try:
        x, targets, rows = _local_batch(strategy, data)
        check(x)
    except Exception as error:
        with contextlib.suppress(ProgramMismatchError):
            _agree(strategy, _Description(_FAILED), state)
        raise AllRanksFailed(error) from error
    spec_hash = zlib.crc32(repr(keras.tree.map_structure(spec_of, targets)).encode())
    # A single rank has no other rank to compare with.
    value_hash = _hash_values(targets) if strategy.pipeline_size > 1 else 0
    return Batch(x, targets, *_agree(strategy, _Description(rows, spec_hash, value_hash), state))


def _local_batch(strategy: HybridStrategy, data: Any) -> tuple[Any, tuple[Any, Any], int]:
    """Returns this replica's inputs, its targets with sample weights, and its number of rows."""
    # A list, as generators may yield, is treated as a tuple.
    data = shard_batch(strategy, tuple(data) if isinstance(data, list) else data)
    data = keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], data)
    data = without_none_components(data)
    for leaf in keras.tree.flatten(data):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise UnsupportedError(
                "A batch for a pipeline must consist of dense tensors. Received: a "
                f"{type(leaf).__name__}. Pad it or convert it to dense in the dataset."
            )
    data = keras.tree.map_structure(lambda v: v if v is None else tf.convert_to_tensor(v), data)
    shapes = [v.shape for v in keras.tree.flatten(data) if v is not None and v.shape.rank]
    if len({shape[0] for shape in shapes}) > 1:
        found = ", ".join(str(tuple(shape)) for shape in shapes)
        raise UnsupportedError(
            "All components of a batch for a pipeline must have the same number of rows. Received: "
            f"{found} on this worker. Pad them, or use tfdist.MultiWorkerMirroredStrategy."
        )
    x, y, sample_weight = unpack_x_y_sample_weight(data)
    return x, (y, sample_weight), int(count_rows(data))


def spec_of(leaf: Any) -> tf.TensorSpec | None:
    """Returns the spec of a tensor, for any number of rows."""
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


# Codes sent instead of the number of rows.
_END = -1
_NOT_READ = -2
_FAILED = -3

# For larger targets, only a sample of the rows is compared.
_COMPARED_BYTES = 2**20


@dataclass(frozen=True)
class _Description:
    """A rank's description of its batch.

    Attributes:
        rows: the number of rows, or one of the codes above.
        spec_hash: a hash of the specs of targets and sample weights.
        value_hash: a hash of the values of targets and sample weights.
    """

    rows: int
    spec_hash: int = 0
    value_hash: int = 0


def _agree(
    strategy: HybridStrategy, mine: _Description, state: State
) -> tuple[tf.Tensor, int, Request]:
    """Returns each replica's number of rows, a hash of all targets' specs, and the requests."""
    extended = pipeline_extended_of(strategy)
    group, mesh = extended.group, extended.mesh
    if group.topology.size == 1:
        return tf.constant([mine.rows]), mine.spec_hash, step_exchange.wanted
    with group.naming_lost_workers():
        numbers = [mine.rows, mine.spec_hash, mine.value_hash, step_exchange.wanted, *state[:2]]
        gathered = group.native().all_gather(tf.constant([numbers], tf.int64))
    everyone = gathered.numpy().tolist()
    descriptions = [_Description(*numbers[:3]) for numbers in everyone]
    asked = functools.reduce(operator.or_, (Request(numbers[3]) for numbers in everyone))
    workers = group.topology.workers
    for worker, one in zip(workers, descriptions, strict=True):
        if one.rows == _FAILED:
            raise ProgramMismatchError(f"{worker} rejected its batch; its own error says why.")
    shared = [numbers[4] for numbers in everyone]
    of_stages = [numbers[5] for numbers in everyone]
    same_stages = [
        [of_stages[rank] for rank in ranks] for ranks in zip(*mesh.pipelines, strict=True)
    ]
    if any(len(set(numbers)) > 1 for numbers in (shared, *same_stages)):
        state.check()
    found = []
    for ranks in mesh.pipelines:
        readers = [rank for rank in ranks if descriptions[rank].rows != _NOT_READ]
        found.append(descriptions[readers[0]])
        for rank in readers:
            if descriptions[rank] != found[-1]:
                difference = _difference(found[-1], descriptions[rank])
                raise ProgramMismatchError(
                    f"The workers of a pipeline must read the same batches: {workers[readers[0]]} "
                    f"has {difference[0]} where {workers[rank]} has {difference[1]}. Give all "
                    "workers the same dataset in the same order: create it after the strategy, and "
                    "shuffle with a seed."
                )
    rows = tf.constant([one.rows for one in found], tf.int32)
    # One hash for all pipelines, as all ranks build their programs together.
    return rows, zlib.crc32(repr([one.spec_hash for one in found]).encode()), asked


def _difference(one: _Description, other: _Description) -> tuple[str, str]:
    if (one.rows, one.spec_hash) == (other.rows, other.spec_hash):
        return f"a batch of {one.rows} rows", "as many rows with other targets"
    first, second = (
        "no more batches"
        if it.rows == _END
        else f"a batch of {it.rows} rows with targets of structure {it.spec_hash:08x}"
        for it in (one, other)
    )
    return first, second


def _hash_values(targets: Any) -> int:
    """Hashes the values of targets and sample weights."""
    total = 0
    for leaf in keras.tree.flatten(targets):
        if leaf is not None:
            values = leaf.numpy()
            values = values[:: values.nbytes // _COMPARED_BYTES + 1] if values.ndim else values
            # String arrays have dtype object.
            words = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
            total = zlib.crc32(words, total)
    return total
