"""Builds, caches and loads the C++ core and TensorFlow ops.

Only `load_ops` imports TensorFlow, so that the launcher can build before its workers start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfdist._src.native.builder import Status, clean, ensure, status
from tfdist._src.native.compilation import Build
from tfdist._src.native.store import PACKAGE

if TYPE_CHECKING:
    from tfdist._src.native.loading import Core

__all__ = ["PACKAGE", "Build", "Status", "clean", "ensure", "has_ops", "load", "load_ops", "status"]


def has_ops() -> bool:
    """Whether this process has loaded the TensorFlow ops."""
    from tfdist._src.native import loading

    return loading.has_ops()


def load() -> Core:
    """The core and its C functions; see `loading.load`."""
    from tfdist._src.native import loading

    return loading.load()


def load_ops() -> Any:
    """The module with the TensorFlow ops; see `loading.load_ops`."""
    from tfdist._src.native import loading

    return loading.load_ops()
