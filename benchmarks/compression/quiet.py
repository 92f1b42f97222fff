"""Keeps TensorFlow's messages at import out of the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_tensorflows_words() -> Iterator[None]:
    """Discards this process's output to stderr, including that of C++ code, in this context."""
    # Also suppresses later messages, when absl inspects TensorFlow's modules.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
