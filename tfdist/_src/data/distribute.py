"""Distributes datasets among workers.

If every worker can read the whole dataset, all workers read the same global batches, in the same
order as a single process. Each replica takes its share of the rows of each batch. If the rows do
not divide evenly, the first replicas take one row more.

In other cases, each worker reads separate batches: if the files of a dataset are sharded, if the
auto-shard policy is OFF, or if a function creates the dataset of each worker. The workers then
agree before each step on whether any worker has rows left. Users must not shard files by hand if
tfdist shards them as well, because each worker would then read only a share of its share.
"""

import functools
import json
import os
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf

from tfdist._src import native
from tfdist._src.comm.communicator_interface import Communicator
from tfdist._src.data.call_context import current_context
from tfdist._src.data.dataset_graph import make_deterministic
from tfdist._src.data.division import Division, divide
from tfdist._src.data.first_batch import different_data
from tfdist._src.data.shares import (
    BatchForm,
    WithRows,
    as_element,
    components_apart,
    not_ahead,
    of_share,
    split_batches,
)
from tfdist._src.group import Group
from tfdist._src.internals import datasets
from tfdist._src.internals.extended import set_batches
from tfdist._src.internals.tensorflow import (
    DatasetOfBatches,
    distribute_lib,
    get_distributed_dataset,
    get_distributed_datasets_from_function,
)
from tfdist._src.log import logger
from tfdist.errors import ProgramMismatchError


class Engine(Protocol):
    """The part of a strategy's `extended` object that is needed to distribute datasets.

    Attributes:
        group: the workers of the job.
        input_division: whether each worker preprocesses only its own rows: "auto" if the dataset
            allows it, "always" also if its maps call Python functions, or "never".
        division: the division of the dataset that was distributed last; None if it is not divided.
    """

    group: Group
    input_division: str
    division: Division | None

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """This worker's devices, one replica each."""

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy to which this object belongs."""

    @property
    def workers(self) -> Communicator:
        """The communicator with one participant per worker."""

    @property
    def worker_count(self) -> int:
        """The number of workers that divide the data."""

    @property
    def worker_rank(self) -> int:
        """This worker's position among the workers that divide the data."""

    @property
    def replica_count(self) -> int:
        """The number of replicas on all workers."""

    @property
    def communicates(self) -> bool:
        """Whether other replicas exist, or may exist later."""

    @property
    def spans_workers(self) -> bool:
        """Whether other workers exist, or may exist later."""

    def input_workers(self, options: Any) -> Any:
        """Returns the devices that receive the distributed data."""


def describe_files(dataset: Any) -> str:
    """Describes the files of a dataset without their folders, which may differ between workers."""
    return ", ".join(map(_described, datasets.dataset_sources(dataset)))


def check_same_files(group: Group, described: Sequence[str]) -> None:
    """Checks that all workers were given the same files in the same order.

    Args:
        group: the workers.
        described: the result of `describe_files` on each worker; "" for a worker that does not read
            a share of the files.

    Raises:
        ProgramMismatchError: the workers were given different files.
    """
    for rank, files in enumerate(described):
        if files != described[0]:
            workers = group.topology.workers
            chiefs, others = (
                text or "no files to read a share of" for text in (described[0], files)
            )
            raise ProgramMismatchError(
                f"The workers read different data: {workers[0]} has {chiefs} where "
                f"{workers[rank]} has {others}. Every worker must be given all files, in the same "
                "order: don't shard the data by hand, and sort the names of files. To shard files "
                "by hand, set the auto_shard_policy in the dataset's options to OFF."
            )


def _described(source: Any) -> str:
    if not isinstance(source, list):
        return f"shard {source}"
    names = [os.path.basename(name) for name in source]
    checksum = zlib.crc32("\n".join(names).encode())
    return (
        f"{len(names)} files starting with {names[0]!r} (checksum {checksum:x})"
        if names
        else "no files"
    )


def agree_on_end(
    extended: Engine,
    distributed: Any,
    batches: int,
    *,
    same_data: bool = False,
    per_worker_hint: bool = True,
    files: str = "",
) -> None:
    """Makes all workers agree on the number of batches and on how to detect the end of the data.

    If all workers have the same number of batches, they need not check before each step whether any
    worker has data left.

    Args:
        extended: the `extended` object of the strategy.
        distributed: the distributed dataset.
        batches: this worker's number of batches, or TensorFlow's constant for an unknown or
            infinite number.
        same_data: whether all workers must read the same batches.
        per_worker_hint: whether an error message suggests how to read separate data on each worker.
        files: the result of `describe_files`, if this worker reads a share of the dataset's files.

    Raises:
        ProgramMismatchError: the workers must read the same data, but do not.
    """
    texts = extended.group.exchange("number of batches", json.dumps([batches, same_data, files]))
    answers = [tuple(json.loads(text)) for text in texts]
    for rank, answer in enumerate(answers):
        if answer[:2] != answers[0][:2] and (same_data or answer[1]):
            both = _batches(*answers[0][:2]), _batches(*answer[:2])
            raise different_data(extended.group, rank, *both, per_worker_hint=per_worker_hint)
    check_same_files(extended.group, [answer[2] for answer in answers])
    counts = [count for count, _, _ in answers]
    known = min(counts) >= 0
    endless = set(counts) == {tf.data.INFINITE_CARDINALITY}
    same = endless or (known and len(set(counts)) == 1)
    count = max(counts) if known or endless else tf.data.UNKNOWN_CARDINALITY
    set_batches(distributed, count, ends_together=same or not extended.spans_workers)


def _batches(count: int, same_data: bool) -> str:
    if not same_data:
        return "separate batches"
    if count == tf.data.INFINITE_CARDINALITY:
        return "infinitely many batches"
    return "an unknown number of batches" if count < 0 else f"{count} batches"


_FILE_READERS = (
    "TFRecordDataset",
    "TextLineDataset",
    "FixedLengthRecordDataset",
    "CSVDataset",
    "SqlDataset",
)


def distribute_dataset(extended: Engine, dataset: Any, options: Any) -> Any:
    """Distributes a dataset of global batches.

    Raises:
        ValueError: the elements are not batches.
    """
    options = options or _default_options(extended)
    if not extended.communicates:
        if extended.group.topology.size > 1:  # The workers of a pipeline read the same dataset.
            dataset = make_deterministic(dataset)
        return get_distributed_dataset(
            dataset,
            extended.input_workers(options),
            extended.strategy,
            options=options,
        )
    _require_batches(dataset)
    if extended.spans_workers and not _splits_batches(extended, dataset):
        distributed = get_distributed_dataset(
            _with_none_components(dataset),
            extended.input_workers(options),
            extended.strategy,
            num_replicas_in_sync=extended.replica_count,
            input_context=_input_context(extended),
            options=options,
        )
        shares = _policy(dataset) != _Shard.OFF
        if _policy(dataset) == _Shard.AUTO:
            _say_that_files_are_shared_out(extended.group.topology.is_chief)
        files = describe_files(dataset) if shares else ""
        agree_on_end(extended, distributed, tf.data.UNKNOWN_CARDINALITY, files=files)
        return distributed
    division = extended.division = _division(extended, dataset)
    if extended.spans_workers and division is None:
        dataset = make_deterministic(dataset)
    context = current_context()
    per_worker_hint = not context.in_order
    replicas = None if extended.group.elastic else extended.replica_count
    if division is not None:
        shares = _divided(extended, dataset, division, replicas, per_worker_hint=per_worker_hint)
    else:
        watched = dataset
        if context.first_batch is not None:
            watched = context.first_batch.watch(dataset, replicas, per_worker_hint=per_worker_hint)
        shares = split_batches(
            _with_none_components(watched),
            extended.workers,
            len(extended.worker_devices),
            replicas,
            context.replay,
        )
    rows = None if _replay_draws_anew() else batch_rows(dataset.element_spec)
    distributed = DatasetOfBatches(
        shares, extended.input_workers(options), extended.strategy, options, batch_rows=rows
    )
    agree_on_end(
        extended,
        distributed,
        int(dataset.cardinality()),
        same_data=True,
        per_worker_hint=per_worker_hint,
    )
    return distributed


def _division(extended: Engine, dataset: Any) -> Division | None:
    """Divides the preprocessing of a dataset among the workers, if possible.

    The workers make the same decision, because it depends only on the program.
    """
    replay = current_context().replay
    if extended.input_division == "never" or not extended.spans_workers or not native.has_ops():
        return None
    if (replay is not None and replay.keeps_rows) or not tf.executing_eagerly():
        return None
    always = extended.input_division == "always"
    worker = extended.workers.rank
    is_alone = extended.worker_count == extended.group.topology.size
    if worker and extended.group.elastic and is_alone:
        # A worker that joins later may get the rank that this worker has now. The workers of one
        # pipeline must draw the same numbers.
        worker = random.SystemRandom().randrange(1, 2**31)
    division = divide(dataset, always=always, worker=worker)
    if isinstance(division, str):
        logger.debug(f"Each worker preprocesses all rows of a dataset, because {division}.")
        return None
    if not (division.is_exact or always or current_context().first_batch is not None):
        # Rounding errors may look like a difference. In a custom loop, this would be an error.
        return None
    return division


def _divided(
    extended: Engine,
    dataset: Any,
    division: Division,
    replicas: int | None,
    *,
    per_worker_hint: bool,
) -> Any:
    """Returns a dataset of the rows of this worker's replicas, whose maps process only these."""
    context = current_context()
    spec = tf.nest.map_structure(lambda one: of_share(one, replicas), dataset.element_spec)
    tells_rows = False
    if context.first_batch is not None:
        tells_rows = context.first_batch.watch_divided(
            dataset, division, replicas, per_worker_hint=per_worker_hint
        )
    if tells_rows:
        spec = WithRows(spec, tf.TensorSpec([4], tf.int32))
    if context.replay is not None:
        context.replay.is_used = context.replay.has_whole = True
    name = extended.workers.lasting_name
    shares = division.shares(
        spec,
        communicator=name,
        worker=0 if name else extended.workers.rank,
        workers=1 if name else extended.workers.size,
        replicas=len(extended.worker_devices),
        replay=0 if context.replay is None else context.replay.number,
        repeats_first=context.first_batch is not None,
        tells_rows=tells_rows,
    )
    return not_ahead(shares)


@functools.cache
def _say_that_files_are_shared_out(is_chief: bool) -> None:
    """Warns once that the batches differ from a single process, because AUTO shards the files."""
    if is_chief:
        logger.warning(
            "Each worker reads its share of the dataset's files (auto_shard_policy AUTO), so the "
            "batches differ from the batches of a single process. To keep these, set the policy to "
            "DATA: each worker then reads all files, and takes its rows of each batch."
        )


def distribute_nothing(extended: Engine, dataset: Any) -> Any:
    """Returns a distributed dataset without batches, for a worker that has no share of the data."""
    options = _default_options(extended)
    distributed = get_distributed_dataset(
        dataset.take(0), extended.input_workers(options), extended.strategy, options=options
    )
    # The other workers still have batches, so the workers must agree before each step on whether
    # any worker has data left.
    set_batches(distributed, tf.data.UNKNOWN_CARDINALITY, ends_together=False)
    return distributed


class NoneComponent(NamedTuple):
    """Represents None in distributed batches, in places where TensorFlow does not accept None."""


def without_none_components(batch: Any) -> Any:
    """Replaces `NoneComponent` and optionals in a batch or its spec by None."""
    stand_ins = (NoneComponent, tf.experimental.Optional, tf.OptionalSpec)

    def restored(part: Any) -> Any:
        return keras.tree.MAP_TO_NONE if isinstance(part, stand_ins) else None

    return keras.tree.traverse(restored, batch)


def _with_none_components(dataset: Any) -> Any:
    """Replaces None and empty optionals by `NoneComponent`, if Keras's loops read the dataset."""
    specs = tf.nest.flatten(dataset.element_spec)
    if current_context().first_batch is None or not any(map(datasets.is_for_none, specs)):
        return dataset

    def replace(*batch: Any) -> Any:
        element = as_element(dataset.element_spec, batch)
        return tf.nest.map_structure(
            lambda spec, part: NoneComponent() if datasets.is_for_none(spec) else part,
            dataset.element_spec,
            element,
        )

    return dataset.map(tf.autograph.experimental.do_not_convert(replace))


def distribute_datasets_from_function(
    extended: Engine, dataset_fn: Callable[[Any], Any], options: Any
) -> Any:
    """Distributes the per-worker datasets that the user's function returns."""
    options = options or _default_options(extended)
    distributed = get_distributed_datasets_from_function(
        dataset_fn,
        extended.input_workers(options),
        [_input_context(extended)],
        extended.strategy,
        options,
    )
    if extended.spans_workers:
        agree_on_end(extended, distributed, int(distributed.cardinality))
    return distributed


def _default_options(extended: Engine) -> Any:
    # TensorFlow's default iterator is made for several devices. It reads ahead, so batches would be
    # lost when the group changes. It also makes the process return memory to the kernel after each
    # step.
    devices = extended.worker_devices
    replays = current_context().replay is not None
    plain = replays or (len(devices) == 1 and "CPU" in devices[0])
    return datasets.plain_input() if plain else None


def as_tensors(batch: Any) -> Any:
    """Converts a batch to tensors; ragged and sparse tensors and None stay unchanged."""
    kept = (tf.RaggedTensor, tf.SparseTensor)
    return tf.nest.map_structure(
        lambda v: v if v is None or isinstance(v, kept) else tf.convert_to_tensor(v), batch
    )


def form_of(batch: Any) -> BatchForm:
    """Returns the known properties of a global batch, which is a nest of arrays and tensors."""
    sizes = {}
    for i, leaf in enumerate(tf.nest.flatten(batch)):
        shape = tf.TensorShape(getattr(leaf, "shape", ()))
        ours = not isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor))
        if ours and shape.rank and shape.is_fully_defined():
            sizes[i] = shape[0], shape.num_elements() * tf.as_dtype(leaf.dtype).size
    return BatchForm(batch_rows(batch), components_apart(sizes), shared=True)


def batch_rows(batch: Any) -> int | None:
    """Returns the number of rows of a batch if it is known, and equal for all dense components.

    Args:
        batch: a nest of tensors, or of their specs.
    """
    shapes = [tf.TensorShape(getattr(part, "shape", ())) for part in tf.nest.flatten(batch)]
    sizes = {shape[0] for shape in shapes if shape.rank}
    return sizes.pop() if len(sizes) == 1 else None


def _replay_draws_anew() -> bool:
    """Whether batches may have other row counts than the dataset's own batches."""
    replay = current_context().replay
    return replay is not None and replay.keeps_rows


def form_of_batches(iterator: Any, rows: int | None) -> BatchForm:
    """Returns the known properties of the batches of a distributed iterator.

    Args:
        iterator: an iterator over a dataset from this module.
        rows: the number of rows of the next global batches; None if unknown.
    """
    return BatchForm(rows, getattr(iterator, "whole", ()), hasattr(iterator, "batch_rows"))


_Shard = tf.data.experimental.AutoShardPolicy


def _splits_batches(extended: Engine, dataset: Any) -> bool:
    """Whether the workers split each batch. If not, each worker reads separate batches.

    As in TensorFlow, the auto-shard policy AUTO shards the files if the dataset reads files.
    """
    policy = _policy(dataset)
    if policy in (_Shard.DATA, _Shard.HINT) or current_context().in_order:
        return True
    if policy == _Shard.OFF:
        return False
    if policy == _Shard.AUTO and not _reads_files(dataset):
        return True
    files = [source for source in datasets.dataset_sources(dataset) if isinstance(source, list)]
    fewest = min(map(len, files), default=extended.worker_count)
    if fewest >= extended.worker_count:
        return False
    if extended.group.topology.is_chief:
        _say_that_files_are_too_few(extended.worker_count, fewest)
    return True


@functools.cache
def _say_that_files_are_too_few(workers: int, files: int) -> None:
    logger.warning(
        f"{workers} workers cannot share the files of a dataset, because it has only {files}. So "
        "each worker reads all files, and takes its rows of each batch (auto_shard_policy DATA)."
    )


def _input_context(extended: Engine) -> Any:
    return distribute_lib.InputContext(
        num_input_pipelines=extended.worker_count,
        input_pipeline_id=extended.worker_rank,
        num_replicas_in_sync=extended.replica_count,
    )


def _require_batches(dataset: Any) -> None:
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank == 0:
            raise ValueError(
                "A dataset must yield batches to be split among replicas: the first axis of every "
                f"component is the rows. Received: an element with a scalar, {spec}. "
                "Call `.batch(global_batch_size)` on the dataset."
            )


def _policy(dataset: Any) -> Any:
    return dataset.options().experimental_distribute.auto_shard_policy


def _reads_files(dataset: Any) -> bool:
    operations = datasets.dataset_operations(dataset)
    return any(reader in name for name in operations for reader in _FILE_READERS)
