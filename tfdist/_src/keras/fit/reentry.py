"""Continues with the same training data when a call of `fit` is entered again."""

from collections.abc import Callable
from typing import Any

from tfdist._src.data.shares import Replay, RowsRead
from tfdist._src.internals import iterators
from tfdist._src.keras.fit.position import BatchSize

Step = tuple[Any, ...]
"""A step of Keras's loop: the number of its first batch, in newer versions also of its last one,
and the iterator."""


class Reentry:
    """Lets Keras's loops continue with the same iterators when `fit` is entered again.

    Args:
        keeps_rows: whether each worker keeps its number of rows per batch when the group changes.
        workers: returns the current number of workers.

    Attributes:
        replay: returns a batch again if its step was not committed.
        batch_size: the size of batches.
        epoch: the epoch that Keras's loop is in.
        read: the epoch that was read last; -1 if none.
        batches_before: the number of batches of the epoch before `read`.
        logs: the logs of the last step.
        batches_done: the number of batches of the next step of Keras's loop that are already
            trained.
        came_later: whether this worker joined others that were already training.
        compares: whether to compare the next batch, since a worker has joined.
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
        """Whether all batches of the loop's epoch have been read."""
        return self.read > self.epoch or (self.read == self.epoch and self._ended)

    @property
    def last_batch(self) -> tuple[int, int] | None:
        """The epoch and number of the last step, as passed to callbacks; None if there is none."""
        return None if self._step is None else (self.read, self._step[-2])

    @property
    def taken(self) -> int:
        """The number of batches of the epoch taken up to and including the last step."""
        return 0 if self._step is None else self._step[0] + self._epochs.steps_per_execution

    @property
    def uncounted(self) -> int:
        """The number of batches of the last step if `advance` failed to return it; else 0."""
        return self._epochs.steps_per_execution if self._is_uncounted else 0

    @property
    def goes_on(self) -> bool:
        """Whether `fit` has been entered again and has not read a batch since."""
        return self._goes_on is not None

    def go_on(self, batches: int, ready: Callable[[], object]) -> None:
        """Continues from the current position when `fit` is entered again.

        Args:
            batches: the number of trained batches of the epoch that was read last.
            ready: called before the next batch of that epoch.
        """
        self._goes_on = batches, ready
        if self.has_untrained(batches):
            self.replay.request()
        if not batches and not self.replay.is_used and self.read == self.epoch:
            # If workers read separate data, they all take new shares when an epoch begins.
            self.read, self._ended, self._step = self.epoch - 1, True, None

    def has_untrained(self, batches: int) -> bool:
        """Whether a batch of the epoch has been read but not trained.

        Args:
            batches: the number of trained batches of the epoch that was read last.
        """
        return self._step is not None and self.replay.given - self._given > batches

    def batches_to_count(self) -> int | None:
        """The number of batches at which Keras ends the epoch's iterator; None if unknown."""
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
        """Makes Keras's new epoch iterator continue an earlier one, if any; returns whether so."""
        earlier, self._epochs = self._epochs, epochs
        if earlier is not None:
            iterators.take_over(epochs, earlier)
        return earlier is not None

    def iterator(self) -> Any:
        """Returns, once, the iterator that an epoch continues to read; None to make a new one."""
        iterator, self._iterator = self._iterator, None
        return iterator

    def advance(
        self, advance: Callable[[], Step], begun: Callable[[Step], object]
    ) -> tuple[Step, bool]:
        """Returns the next step of an epoch, and whether it is new to Keras's loop.

        Args:
            advance: Keras's function for the next step.
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
        """Whether a re-entered epoch has no more batches."""
        return self.goes_on and self.has_ended

    def resume(self, step: Step, batches: int) -> None:
        """Records an epoch that another process has begun.

        Args:
            step: the first step in this process.
            batches: the number of trained batches of the epoch.
        """
        self.read, self._ended, self._step = self.epoch, False, step
        self._seen = iterators.batches_seen(self._epochs)
        self._given = self.replay.given - batches
        self._goes_on = None
        self.batches_done = batches % self._epochs.steps_per_execution

    def resume_behind(self, epoch: int, batches: int) -> None:
        """Continues after the batches of an epoch that other processes have trained.

        Args:
            epoch: the epoch.
            batches: the number of these batches.
        """
        self.read, self._ended, self._goes_on = epoch, True, (0, lambda: None)
        self._given = self.replay.given - batches

    def end(self) -> None:
        """Records that the loop leaves its epoch."""
        if self.read <= self.epoch:
            self.read, self._ended = self.epoch, True

    def _go_to(self, batches: int, iterator: Any, advance: Callable[[], Step]) -> Step:
        """Makes Keras count up to its previous position, without taking batches."""
        # Keras starts counting from this number if an iterator is read over several epochs.
        iterators.set_batches_seen(self._epochs, self._seen - self.taken)
        self._iterator = iterator
        with iterators.within_epoch(self._epochs):
            step = self._next(advance)
        self._iterator = None  # Unused if Keras has kept its own iterator.
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
