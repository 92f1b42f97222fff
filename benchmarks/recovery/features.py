"""The features to compare, and functions that turn them on and off between steps."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

# `none_again` is the same as `none`. It shows how much two measurements of equal steps differ.
FEATURES = ("none", "none_again", "agreement", "snapshots", "elastic", "sharded", "copies")
# Each of these features applies to a whole call of `fit`, and so has separate processes.
ALONE = ("elastic", "sharded", "copies")


def make_backup(folder: str) -> Any:
    """Returns a `BackupAndRestore` callback that saves on request.

    The callback saves at the end of a batch if its attribute `asked` is True then. It then sets
    `asked` to False.
    """
    import tfdist

    class OnRequest(tfdist.callbacks.BackupAndRestore):
        asked = False

        def _is_due(self) -> bool:
            due, self.asked = self.asked, False
            return due

        def wait(self) -> None:
            self._series.wait()

    return OnRequest(folder, save_every=1)


def tracing(feature: str) -> AbstractContextManager[Any]:
    """Returns the context in which the training step of a feature must be traced.

    With `none` and `none_again`, the workers do not agree on the end of each step.
    """
    from tfdist._src.keras.fit import atomic_step

    if not feature.startswith("none"):
        return contextlib.nullcontext()
    return mock.patch.object(atomic_step, "applies", lambda strategy: False)
