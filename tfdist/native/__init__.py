"""The C++ core and TensorFlow ops: compiled on first use, kept, and loaded.

Nothing here imports TensorFlow but `load_ops`, so that the launcher can build ahead of its workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist.native.build import Build
from tfdist.native.builder import clean, ensure
from tfdist.native.status import Status, status
from tfdist.native.store import PACKAGE

if TYPE_CHECKING:
    from tfdist.native.loading import Core

__all__ = ["PACKAGE", "Build", "Status", "clean", "ensure", "load", "load_ops", "status"]


def load() -> Core:
    """The core and its C functions; see `loading.load`."""
    from tfdist.native import loading

    return loading.load()


def load_ops() -> Any:
    """The module of TensorFlow's ops; see `loading.load_ops`."""
    from tfdist.native import loading

    return loading.load_ops()
