"""Which training step stands on this worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist._src.comm import step_ops

# The steps of this process, of whatever strategy, that Python knows to stand.
_counted = 0


class Progress:
    """The number of training steps whose results this worker holds.

    A step counts when all that it communicates has arrived and all variables have been updated. If
    it fails before, everything is restored to the values before it, so that after an error of `fit`
    the model, the optimizer and the metrics are those of `standing` steps.

    Steps of `fit` and `train_on_batch` are counted, not those of loops that call `strategy.run`.

    Attributes:
        torn: whether a step has failed in the middle of its update, so that the state is neither
            that before it nor that after it. Only an error of this worker alone can cause this,
            such as lack of memory.
        redoable: whether a step that is taken back can be redone, for the state that this worker
            alone holds; others may have it.
    """

    def __init__(self) -> None:
        self._standing = 0
        self.torn = False
        self.redoable = False
        self._undone = False

    @property
    def standing(self) -> int:
        """The number of steps that count; exact while no step is running."""
        return self._standing

    @property
    def has_undone(self) -> bool:
        """Whether the step behind the last one that counts can be redone."""
        return self._undone

    def redo(self) -> None:
        """Puts back what the step behind the last one has written before it communicated last.

        That is right for what this worker alone holds, if the step stands on another worker. The
        rest must be taken from that one; `restore` declares that it has been.
        """
        step_ops.redo()
        self._undone = False

    def restore(self, standing: int) -> None:
        """Declares that this worker's whole state is now that after so many steps."""
        self._standing = standing
        self.torn = self._undone = False

    def add(self, steps: int, *, logged: bool) -> None:
        """Counts steps that have succeeded.

        Args:
            steps: how many.
            logged: whether they were run inside `undoing`.
        """
        global _counted
        self._standing += steps
        _counted += steps if logged else 0

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """Takes back the step that fails within this context, and counts those before it."""
        try:
            yield
        except BaseException:
            committed, whole = step_ops.roll_back(redoable=self.redoable)
            self.torn |= not whole
            self.add(committed - _counted, logged=True)
            self._undone = self.redoable
            raise
