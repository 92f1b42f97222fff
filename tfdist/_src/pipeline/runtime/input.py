"""Gets the next batch, and checks that all ranks of a pipeline use the same rows.

If the batches of the ranks differ, all ranks raise an error. In general, only some ranks read the
dataset: the ranks that use the model's inputs, and the rank that holds the last stage and uses the
targets. They tell the other ranks the number of rows and a hash of the specs of the targets.
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
        x: the inputs; None on a rank that does not read the dataset.
        targets: the pair of targets and sample weights. Both are None on a rank that does not read
            the dataset.
        rows: an int32 tensor with the number of rows of each replica.
        spec_hash: a hash of the specs of the targets and sample weights of all replicas. It has the
            same value on all ranks.
        asked: the requests that any rank has made for the end of this step, such as a request to
            save and exit; see `keras.fit.step_exchange`.
    """

    x: Any
    targets: Any
    rows: tf.Tensor
    spec_hash: int
    asked: Request | None = None


class State(NamedTuple):
    """Numbers with which ranks check, before a step, that their states are equal.

    Attributes:
        shared: a hash of the state that must be equal on all ranks.
        of_stages: a hash of the state that must be equal on all ranks with the same stages.
        check: a function that compares the complete states of all ranks, and raises an error that
            names the first difference. All ranks must call it together.
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
    """Returns the next batch; all ranks of the job must call it together.

    Args:
        strategy: the pipeline's strategy.
        iterator: yields global batches.
        reads: whether this rank reads the batch. If not, the rank does not advance the iterator.
        check: a function of the model's inputs that raises an error if they are invalid.
        state: this rank's state, which is compared with the states of the other ranks.

    Raises:
        StopIteration: the dataset is exhausted on all ranks.
        ProgramMismatchError: the ranks of a pipeline have read different batches, or another rank
            has rejected its batch.
        ReplicaMismatchError: ranks have different states that should be equal.
        AllRanksFailed: this rank has rejected its batch, so the other ranks also raise an error.
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
    """Returns this replica's part of a batch; all ranks of the job must call it together.

    Args:
        strategy: the pipeline's strategy.
        data: the global batch.
        check: a function of the model's inputs that raises an error if they are invalid.
        state: this rank's state, which is compared with the states of the other ranks.

    Raises:
        ProgramMismatchError: the ranks of a pipeline have different batches, or another rank has
            rejected its batch.
        ReplicaMismatchError: ranks have different states that should be equal.
        AllRanksFailed: this rank has rejected its batch, so the other ranks also raise an error.
    """
    try:
        x, targets, rows = _local_batch(strategy, data)
        check(x)
    except Exception as error:
        with contextlib.suppress(ProgramMismatchError):
            _agree(strategy, _Description(_FAILED), state)
        raise AllRanksFailed(error) from error
    spec_hash = zlib.crc32(repr(keras.tree.map_structure(spec_of, targets)).encode())
    # The only rank of a pipeline need not hash its targets, since it cannot compare the hash.
    value_hash = _hash_values(targets) if strategy.pipeline_size > 1 else 0
    return Batch(x, targets, *_agree(strategy, _Description(rows, spec_hash, value_hash), state))


def _local_batch(strategy: HybridStrategy, data: Any) -> tuple[Any, tuple[Any, Any], int]:
    """Returns this replica's part of a batch: `x`, `(y, sample_weight)` and the number of rows."""
    # A generator may yield a list instead of a tuple, which means the same.
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
    """Returns the spec of a tensor, which leaves the number of rows open."""
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


# Codes that a rank sends instead of the number of rows: the dataset is exhausted, the rank does not
# read the dataset, or the rank has rejected its batch.
_END = -1
_NOT_READ = -2
_FAILED = -3

# If the targets have more bytes, only some of their rows are compared.
_COMPARED_BYTES = 2**20


@dataclass(frozen=True)
class _Description:
    """A short description of a rank's batch, which ranks exchange to compare their batches.

    Attributes:
        rows: the number of rows, or one of the codes `_END`, `_NOT_READ` and `_FAILED`.
        spec_hash: a hash of the specs of the targets and sample weights.
        value_hash: a hash of the values of the targets and sample weights.
    """

    rows: int
    spec_hash: int = 0
    value_hash: int = 0


def _agree(
    strategy: HybridStrategy, mine: _Description, state: State
) -> tuple[tf.Tensor, int, Request]:
    """Exchanges descriptions of batches, hashes of states, and requests among all ranks.

    Args:
        strategy: the pipeline's strategy.
        mine: the description of this rank's batch.
        state: this rank's state.

    Returns:
        The number of rows of each replica, a hash of the specs of the targets of all replicas, and
        the requests of all ranks; see `Batch`.

    Raises:
        ProgramMismatchError: the ranks of a pipeline have different batches, or another rank has
            rejected its batch.
        ReplicaMismatchError: ranks have different states that should be equal.
    """
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
    # The hash covers all pipelines, since it decides whether a rank builds a new program, and all
    # ranks must build new programs together.
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
    """Returns a hash of the values of the targets and sample weights, or of a sample of them."""
    total = 0
    for leaf in keras.tree.flatten(targets):
        if leaf is not None:
            values = leaf.numpy()
            values = values[:: values.nbytes // _COMPARED_BYTES + 1] if values.ndim else values
            # Arrays of strings have the dtype `object`, so their bytes are only pointers.
            words = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
            total = zlib.crc32(words, total)
    return total
