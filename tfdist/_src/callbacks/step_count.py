"""Counts the batches of a training run over all epochs, and checks arguments of callbacks."""

from typing import Any


def is_positive(value: Any) -> bool:
    """Whether a value is a positive integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class StepCount:
    """Counts the batches before and after each call of Keras's training function.

    The training function may run several batches in one call. The counts are computed from the
    batch indices that Keras passes to callbacks. So they are equal on all workers, even if a
    callback was not called for every batch on a worker.

    Attributes:
        begun: the number of batches before the current or last call.
        done: the number of batches up to the end of that call.

    Example:
        >>> count = StepCount()
        >>> count.begin_batch(0)
        >>> count.end_batch(4)
        >>> count.completes(5)
        True
    """

    def __init__(self) -> None:
        self.begun = self.done = self._before_epoch = 0

    def begin_batch(self, batch: int) -> None:
        """Records that a call of the training function begins.

        Args:
            batch: the index of the call's first batch in the epoch.
        """
        self.begun = self._before_epoch + batch

    def end_batch(self, batch: int) -> None:
        """Records that a call of the training function has ended.

        Args:
            batch: the index of the call's last batch in the epoch.
        """
        self.done = self._before_epoch + batch + 1

    def end_epoch(self) -> None:
        """Records that the epoch has ended."""
        self._before_epoch = self.begun = self.done

    def completes(self, every: int) -> bool:
        """Whether the last call has reached or passed another multiple of `every` batches."""
        return self.done // every > self.begun // every

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a worker needs when it joins or resumes from a snapshot."""
        return {"before_epoch": self._before_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over the state of another worker, or of an earlier process."""
        self._before_epoch = self.begun = self.done = int(state["before_epoch"])
