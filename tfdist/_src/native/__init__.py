"""Compiles, caches and loads the C++ core and the TensorFlow operations that use it.

In this package, a build is a directory with the compiled libraries. The ops are the TensorFlow
operations that call the core. Only `load_ops` imports TensorFlow, so the launcher can quickly make
a build before it starts workers.
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
    """Whether this process has loaded the TensorFlow operations."""
    from tfdist._src.native import loading

    return loading.has_ops()


def load() -> Core:
    """Returns the core with its C functions; see `loading.load`."""
    from tfdist._src.native import loading

    return loading.load()


def load_ops() -> Any:
    """Returns the module with the TensorFlow operations; see `loading.load_ops`."""
    from tfdist._src.native import loading

    return loading.load_ops()
