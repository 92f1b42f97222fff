"""What TensorFlow says when it is imported, kept from the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_tensorflows_words() -> Iterator[None]:
    """Drops what this process writes to stderr, below Python too; exceptions go their way."""
    # And later, when absl looks into TensorFlow's modules.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
