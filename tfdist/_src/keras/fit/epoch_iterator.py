"""Makes the workers begin and end each pass of Keras's loops over a dataset together.

If a worker joins in the middle of an epoch, its next batch is compared with the batch of the other
workers. This reveals, for example, random numbers that the dataset draws in Python and that differ
on the new worker.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._src.comm import native_ops
from tfdist._src.comm.native_communicator import CoreCommunicator
from tfdist._src.data.call_context import current_context, entered
from tfdist._src.data.distribute import distribute_nothing, form_of_batches
from tfdist._src.data.first_batch import FirstBatch, different_data
from tfdist._src.internals.extended import end_of
from tfdist._src.internals.iterators import last_of, replace_dataset, rows_of_batches
from tfdist._src.internals.keras import TFEpochIterator, made_under
from tfdist._src.internals.tensorflow import end_in_background
from tfdist._src.keras.fit.call_checks import only_tfdist_reads_batches
from tfdist._src.keras.fit.position import SeparateBatches
from tfdist._src.keras.fit.reentry import Reentry, Step
from tfdist._src.keras.fit.training_data import TrainingData, current_data
from tfdist._src.keras.fit.validation_data import ValidationData
from tfdist._src.keras.patching import patch
from tfdist._src.strategy.extended import ReplicatedExtended, extended_if_ours, extended_of


def advance_compared(
    batches: FirstBatch | None, data: TrainingData, advance: Callable[[], Step]
) -> Step:
    """Returns the next step of an epoch, and compares its batch if workers have just joined.

    Args:
        batches: the object that compares batches of the training data; None if there are no other
            workers.
        data: the training data.
        advance: returns the next step, or raises StopIteration at the end of the epoch.

    Raises:
        ProgramMismatchError: this worker has just joined, and its batch differs from the batch of
            the other workers.
    """
    reentry = data.reentry
    if reentry is None or not reentry.compares or batches is None:
        return advance()
    try:
        step = advance()
    except StopIteration:
        _compare(batches, reentry, None)
        raise
    _compare(batches, reentry, step[-1])
    return step


def _compare(batches: FirstBatch, reentry: Reentry, iterator: Any) -> None:
    batches.compare_next(iterator, reentry.replay, is_new=reentry.came_later)
    if iterator is not None:
        iterator.whole = batches.whole
    reentry.compares = False


def install() -> None:
    """Extends Keras's epoch iterator, which `fit`, `evaluate` and `predict` use."""
    begin, reset = TFEpochIterator.__init__, TFEpochIterator.reset
    enter = TFEpochIterator.__iter__
    advance, catch = TFEpochIterator.__next__, TFEpochIterator.catch_stop_iteration

    @functools.wraps(begin)
    def begin_together(self: Any, distribute_strategy: Any = None, *args: Any, **kw: Any) -> None:
        extended = extended_if_ours(distribute_strategy)
        data = current_data()
        self._training_data = data if data is not None and data.belongs_to(self) else None
        if extended is None or not (extended.communicates or extended.process_count > 1):
            begin(self, distribute_strategy, *args, **kw)
            return
        reentry = self._training_data.reentry if self._training_data is not None else None
        if reentry is not None and reentry.take_over(self):
            return
        _distribute(self, extended, lambda: begin(self, distribute_strategy, *args, **kw))

    @functools.wraps(reset)
    def reset_agreed(self: Any) -> None:
        data: TrainingData | None = getattr(self, "_training_data", None)
        if data is not None and data.reentry is not None and data.reentry.goes_on:
            return
        reset(self)
        self._num_batches = getattr(self, "_agreed", self._num_batches)

    @functools.wraps(enter)
    def enter_epoch(self: Any) -> Any:
        data: TrainingData | None = getattr(self, "_training_data", None)
        if data is not None and data.reentry is not None and data.separate is not None:
            _follow_group(self, data, data.reentry, data.separate)
        if (validation := _validation(self)) is not None:
            running = current_data()
            assert running is not None
            reentry = running.reentry
            validation.begins(self, running, reentry.epoch if reentry is not None else 0)
        return enter(self)

    @functools.wraps(advance)
    def next_compared(self: Any) -> Any:
        data: TrainingData | None = getattr(self, "_training_data", None)

        def begun(iterator: Any) -> None:
            if hasattr(self, "_first_batch"):
                if data is not None and data.joins:
                    self._first_batch.skip(iterator)
                else:
                    later = (
                        data is not None and data.reentry is not None and data.reentry.came_later
                    )
                    self._first_batch.compare(iterator, is_new=later)
                if data is not None and data.reentry is not None and data.reentry.replay.keeps_rows:
                    self._first_batch.refuse_unlike_rows()
                iterator.whole = self._first_batch.whole
                if iterator is not self._begun:
                    end_in_background(iterator)
                    self._begun = iterator

        if data is not None:
            compared = getattr(self, "_first_batch", None)
            return advance_compared(
                compared, data, lambda: data.advance(lambda: advance(self), begun)
            )
        step = advance(self)
        if (validation := _validation(self)) is not None:
            validation.step(self, step[-1])
        begun(step[-1])
        rows = rows_of_batches(self, last_of(self, step))
        current_context().next_form = form_of_batches(step[-1], rows)
        return step

    @functools.wraps(catch)
    @contextlib.contextmanager
    def end_together(self: Any) -> Iterator[None]:
        with catch(self):
            yield
        data: TrainingData | None = getattr(self, "_training_data", None)
        if data is not None and data.reentry is not None:
            data.reentry.end()
        if hasattr(self, "_first_batch"):
            _check_all_ended(extended_of(made_under(self)))

    patch("TFEpochIterator.__init__", lambda _: begin_together)
    patch("TFEpochIterator.reset", lambda _: reset_agreed)
    patch("TFEpochIterator._get_iterator", _counted)
    patch("TFEpochIterator.__iter__", lambda _: enter_epoch)
    patch("TFEpochIterator.__next__", lambda _: next_compared)
    patch("TFEpochIterator.catch_stop_iteration", lambda _: end_together)
    patch("IteratorSpec._serialize", _with_end)
    patch("IteratorSpec.sanity_check_type", _of_one_end)


def _with_end(serialize: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
    """Makes `tf.function` retrace for an iterator that detects the end of its data differently.

    By default, TensorFlow ignores this difference. With a trace that was made for an endless
    dataset, a finite dataset would then lose its last batches if it ends within an execution of
    several steps.
    """

    @functools.wraps(serialize)
    def serialize_end(self: Any) -> tuple[Any, ...]:
        return (*serialize(self), end_of(self))

    return serialize_end


def _of_one_end(check: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Makes iterator specs compatible only if the iterators detect their ends in the same way."""

    @functools.wraps(check)
    def check_end(self: Any, other: Any) -> None:
        check(self, other)
        if end_of(self) != end_of(other):
            raise ValueError(f"The ends of {self} and {other} are detected in different ways.")

    return check_end


def _validation(self: Any) -> ValidationData | None:
    """Returns the tracker of the validation data if `self` is Keras's epoch iterator over it."""
    data = current_data()
    validation = data.validation if data is not None else None
    return validation if validation is not None and validation.belongs_to(self) else None


def _distribute(self: Any, extended: ReplicatedExtended, distribute: Callable[[], object]) -> None:
    """Distributes the data of Keras's epoch iterator; all workers call this together."""
    data: TrainingData | None = self._training_data
    reentry = None if data is None else data.reentry
    self._begun = None
    replay = reentry.replay if reentry is not None else None
    tells_rows = extended.spans_workers and only_tfdist_reads_batches()
    self._first_batch = FirstBatch(extended.group, tells_rows=tells_rows)
    context = current_context()
    with entered(dataclasses.replace(context, first_batch=self._first_batch, replay=replay)):
        distribute()
    # Workers with separate data may have different numbers of batches. Their epoch ends when no
    # worker has any batches left.
    last = None
    with contextlib.suppress(AttributeError, NotImplementedError):
        last = self.data_adapter.partial_batch_size
    texts = extended.group.exchange("batches of an epoch", json.dumps([self._num_batches, last]))
    sizes = [json.loads(text) for text in texts]
    for rank, size in enumerate(sizes):
        # In an elastic job, a worker that joins in the middle of an epoch has no batches of this
        # epoch, so the numbers are not compared.
        if self._first_batch.watches and reentry is None and size != sizes[0]:
            raise different_data(
                extended.group, rank, *map(_described, (sizes[0], size)), per_worker_hint=True
            )
    counts = [count for count, _ in sizes]
    self._agreed = None if None in counts else max(counts)
    self._num_batches = self._agreed
    if data is not None:
        data.separate = None if self._first_batch.watches else _separate_batches(self, extended)
    if reentry is not None:
        reentry.batch_size.dataset_batches = self._agreed


def _described(size: tuple[int | None, int | None]) -> str:
    batches, last = size
    count = "an unknown number of batches" if batches is None else f"{batches} batches"
    return f"{count}, the last one of {last} rows" if last else count


def _separate_batches(self: Any, extended: ReplicatedExtended) -> SeparateBatches:
    given = self.data_adapter.get_tf_dataset()
    is_ours = not (extended.in_stages or isinstance(given, tf.distribute.DistributedDataset))
    return SeparateBatches(extended.group.generation, self._agreed, is_shared_out=is_ours)


def _follow_group(
    self: Any, data: TrainingData, reentry: Reentry, separate: SeparateBatches
) -> None:
    """Divides separate data among the workers of the group that exists when an epoch begins.

    A worker that joins in the middle of an epoch reads no data until the next epoch, because the
    other workers have already divided the data of this epoch.
    """
    strategy = made_under(self)
    is_current = separate.generation == extended_of(strategy).group.generation
    if not separate.is_shared_out or is_current or reentry.read >= reentry.epoch:
        return
    dataset = self.data_adapter.get_tf_dataset()
    if not data.joins:
        self._num_batches = self.data_adapter.num_batches
        share = strategy.experimental_distribute_dataset
        _distribute(self, extended_of(strategy), lambda: replace_dataset(self, share(dataset)))
        return
    with entered(dataclasses.replace(current_context(), replay=reentry.replay)):
        replace_dataset(self, distribute_nothing(extended_of(strategy), dataset))
    self._agreed = self._num_batches = separate.count


def _counted(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get)
    def get_counted(self: Any) -> Any:
        data: TrainingData | None = getattr(self, "_training_data", None)
        if data is not None and data.reentry is not None:
            iterator = data.reentry.iterator()
            if iterator is not None:
                return iterator
        if data is not None:
            data.iterators += 1
        elif (validation := _validation(self)) is not None:
            running = current_data()
            assert running is not None
            validation.iterator_is_made(running)
        return get(self)

    return get_counted


def _check_all_ended(extended: ReplicatedExtended) -> None:
    """Raises an error on all workers if only some of them have ended the epoch.

    For example, `stop_training` may have been set on one worker within the epoch. The other workers
    then wait for this worker in their next step. The native collectives report an error, because
    the workers call different collectives. TensorFlow's collectives cannot detect this.
    """
    if extended.in_stages or isinstance(extended.workers, CoreCommunicator):
        workers = extended.group.native()
        with extended.group.naming_lost_workers(), tf.device(workers.device):
            native_ops.all_reduce(workers.token, [tf.zeros([])], "sum", workers.name, _END)


# `_check_all_ended` gives its collective this name, which appears in the error message.
_END = "the end of an epoch, by its data or by stop_training"
