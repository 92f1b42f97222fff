"""Continues with the same training data when a call of `fit` is entered again."""

from collections.abc import Callable
from typing import Any

from tfdist._src.data.shares import Replay, RowsRead
from tfdist._src.internals import iterators
from tfdist._src.keras.fit.position import BatchSize

Step = tuple[Any, ...]
"""A step of Keras's training loop: the index of its first batch, then, in newer versions of Keras,
the index of its last batch, and finally the iterator."""


class Reentry:
    """Lets Keras's loops continue with the same iterators when `fit` is entered again.

    Args:
        keeps_rows: whether the number of rows per worker stays the same when the group changes.
        workers: returns the current number of workers.

    Attributes:
        replay: makes the iterator return a batch again if its step was not committed.
        batch_size: the current size of the batches.
        epoch: the current epoch of Keras's loop.
        read: the last epoch from which a batch was read; -1 if there is none.
        batches_before: the number of batches that were read in the epoch before `read`.
        logs: the logs of the last step.
        batches_done: the number of batches in the next step of Keras's loop that are already
            trained, if the step runs several batches.
        came_later: whether this worker has joined other workers that were already training.
        compares: whether the workers must compare their next batch, because a worker has joined.
    """

    def __init__(self, *, keeps_rows: bool, workers: Callable[[], int]) -> None:
        self.replay = Replay(keeps_rows=keeps_rows)
        if keeps_rows:
            self.replay.keep_rows(workers())
        self.batch_size = BatchSize(self.replay, workers)
        self.epoch = 0
        self.batches_done = 0
        self.came_later = self.compares = False
        self._epochs: Any = None  # Keras's epoch iterator
        self.read = -1
        self.logs: dict[str, Any] = {}
        self._ended = False  # whether `_epochs` is exhausted
        self._step: Step | None = None  # the last step taken from `_epochs`
        self._is_uncounted = False  # see `uncounted`
        self._seen = self._given = self.batches_before = 0
        self._goes_on: tuple[int, Callable[[], object]] | None = None
        self._iterator: Any = None

    @property
    def has_ended(self) -> bool:
        """Whether all batches of the current epoch have been read."""
        return self.read > self.epoch or (self.read == self.epoch and self._ended)

    @property
    def last_batch(self) -> tuple[int, int] | None:
        """The epoch and batch index of the last step, as in callbacks; None if there is none."""
        return None if self._step is None else (self.read, self._step[-2])

    @property
    def taken(self) -> int:
        """The number of batches that have been taken from the epoch, including the last step."""
        return 0 if self._step is None else self._step[0] + self._epochs.steps_per_execution

    @property
    def uncounted(self) -> int:
        """The number of batches of the last step if `advance` failed after it took them; else 0."""
        return self._epochs.steps_per_execution if self._is_uncounted else 0

    @property
    def goes_on(self) -> bool:
        """Whether `fit` is being entered again, and has not read a batch since then."""
        return self._goes_on is not None

    def go_on(self, batches: int, ready: Callable[[], object]) -> None:
        """Makes the next entry of `fit` continue from the current position.

        Args:
            batches: the number of batches of the epoch `read` that have been trained.
            ready: called before the next batch of that epoch is trained.
        """
        self._goes_on = batches, ready
        if self.has_untrained(batches):
            self.replay.request()
        if not batches and not self.replay.is_used and self.read == self.epoch:
            # No batch of this epoch has been trained. If the workers read separate batches, the
            # data is divided again when the epoch begins again, so the batches that were read do
            # not count.
            self.read, self._ended, self._step = self.epoch - 1, True, None

    def has_untrained(self, batches: int) -> bool:
        """Whether a batch of the epoch has been read but not trained.

        Args:
            batches: the number of batches of the epoch `read` that have been trained.
        """
        return self._step is not None and self.replay.given - self._given > batches

    def batches_to_count(self) -> int | None:
        """Returns the count of batches at which Keras must end the epoch; None if it is unknown."""
        if self.batch_size.dataset_batches is None:
            return None
        if self.has_ended:
            given = self.replay.given - self._given
            return given if self.read == self.epoch else self.batches_before
        if self.read != self.epoch or self._step is None:
            seen = (
                iterators.batches_seen(self._epochs)
                if iterators.lasting_iterator(self._epochs)
                else 0
            )
            return seen + self.batch_size.left(self.replay.read() if seen else RowsRead())
        again = self._goes_on is not None and self.has_untrained(self._goes_on[0])
        given = self.replay.given - self._given - again
        left = self.batch_size.left(self.replay.read(before_last=again))
        return self._seen - self.taken + given + left

    def take_over(self, epochs: Any) -> bool:
        """Makes Keras's new epoch iterator continue the previous one; returns whether it did."""
        earlier, self._epochs = self._epochs, epochs
        if earlier is not None:
            iterators.take_over(epochs, earlier)
        return earlier is not None

    def iterator(self) -> Any:
        """Returns the iterator that an epoch must continue to read; None to create a new iterator.

        Each iterator is returned only once.
        """
        iterator, self._iterator = self._iterator, None
        return iterator

    def advance(
        self, advance: Callable[[], Step], begun: Callable[[Step], object]
    ) -> tuple[Step, bool]:
        """Returns the next step of an epoch, and whether it is the first time that it is returned.

        Args:
            advance: Keras's function that returns the next step.
            begun: called with the first step of an epoch.

        Raises:
            StopIteration: the epoch has no more steps.
        """
        goes_on, self._goes_on = self._goes_on, None
        if self.read != self.epoch:
            self.read, self._ended, self._step = self.epoch, False, None
            self.batches_before = self.replay.given - self._given
        if self._step is None:
            step, self._is_uncounted = self._next(advance), True
            try:
                begun(step)
            finally:  # Batches taken by `begun` do not belong to the epoch.
                self._given = self.replay.given
        elif goes_on is None:
            step = self._next(advance)
        else:
            batches, ready = goes_on
            last = self._step
            step = self._go_to(batches, last[-1], advance)
            ready()
            if step[0] <= last[0] and not self._is_uncounted:
                return step, False
        self._is_uncounted = False
        return step, True

    def stops(self) -> bool:
        """Whether `fit` enters an epoch again, and the epoch has no batches left."""
        return self.goes_on and self.has_ended

    def resume(self, step: Step, batches: int) -> None:
        """Records that this process continues an epoch that another process has begun.

        Args:
            step: the first step that this process takes.
            batches: the number of batches of the epoch that have been trained.
        """
        self.read, self._ended, self._step = self.epoch, False, step
        self._seen = iterators.batches_seen(self._epochs)
        self._given = self.replay.given - batches
        self._goes_on = None
        self.batches_done = batches % self._epochs.steps_per_execution

    def resume_behind(self, epoch: int, batches: int) -> None:
        """Records that other processes have trained all batches of an epoch.

        Args:
            epoch: the epoch.
            batches: the number of batches of this epoch.
        """
        self.read, self._ended, self._goes_on = epoch, True, (0, lambda: None)
        self._given = self.replay.given - batches

    def end(self) -> None:
        """Records that Keras's loop leaves the current epoch."""
        if self.read <= self.epoch:
            self.read, self._ended = self.epoch, True

    def _go_to(self, batches: int, iterator: Any, advance: Callable[[], Step]) -> Step:
        """Advances Keras's count of batches to the previous position, without taking batches."""
        # If an iterator is read over several epochs, Keras starts counting at this number.
        iterators.set_batches_seen(self._epochs, self._seen - self.taken)
        self._iterator = iterator
        with iterators.within_epoch(self._epochs):
            step = self._next(advance)
        self._iterator = None  # Unused if Keras has kept the iterator itself.
        self.batches_done = batches % self._epochs.steps_per_execution
        while step[0] + self.batches_done < batches:
            step = self._next(advance)
        return step

    def _next(self, advance: Callable[[], Step]) -> Step:
        try:
            self._step = advance()
        except StopIteration:
            self.end()
            raise
        self._seen = iterators.batches_seen(self._epochs)
        return self._step
