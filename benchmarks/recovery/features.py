"""The features to compare: steps with a feature, and steps without it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

# `none_again` shows by how much equal steps differ.
FEATURES = ("none", "none_again", "agreement", "snapshots", "elastic", "sharded", "copies")
# The features that apply to a whole `fit`, and so have separate processes.
ALONE = ("elastic", "sharded", "copies")


def make_backup(folder: str) -> Any:
    """Returns a `BackupAndRestore` that saves at the end of a batch if `asked` is set before it."""
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
    """Returns a context in which steps are traced with the feature, and without the others."""
    from tfdist._src.keras.fit import atomic_step

    if not feature.startswith("none"):
        return contextlib.nullcontext()
    return mock.patch.object(atomic_step, "applies", lambda strategy: False)
