"""Hides the messages that TensorFlow prints when it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_tensorflows_words() -> Iterator[None]:
    """Discards everything that Python and C++ code write to stderr in this context."""
    # Also hides the messages that TensorFlow prints later, when absl inspects its modules.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
