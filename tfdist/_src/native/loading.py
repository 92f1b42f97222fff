"""Loads the core and the TensorFlow operations into this process, at most once."""

import ctypes
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist._src.native import api, builder
from tfdist._src.native.compilation import SOURCE, Build
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError


@dataclass(frozen=True)
class Core:
    """The loaded core.

    Attributes:
        library: the loaded library, with declared C functions.
        build: the build from which the library was loaded.
    """

    library: ctypes.CDLL
    build: Build


# The libraries are loaded only once, because TensorFlow refuses to register an operation twice.
_lock = threading.RLock()
_core: Core | None = None
_ops: Any = None


def load() -> Core:
    """Loads the core, and compiles it first if necessary.

    Returns:
        The core. All calls in a process return the same object.

    Raises:
        NativeUnavailableError: the core is disabled, or cannot be compiled or loaded.
        ValueError: a setting is invalid.

    Example:
        >>> load().library.tfd_segment_bytes(2)  # doctest: +SKIP
        6340608
    """
    global _core
    with _lock:
        if _core is None:
            _core = load_core(_options())
        return _core


def load_ops() -> Any:
    """Loads the core and the TensorFlow operations. This imports TensorFlow.

    Returns:
        The module that `tf.load_op_library` returns. All calls in a process return the same object.

    Raises:
        NativeUnavailableError: the operations are disabled, or cannot be compiled or loaded.
        ValueError: a setting is invalid.
    """
    global _ops
    with _lock:
        if _ops is None:
            _ops = load_op_library(load().build)
        return _ops


def has_ops() -> bool:
    """Whether this process has loaded the TensorFlow operations."""
    return _ops is not None


def load_core(options: NativeOptions, source: Path = SOURCE) -> Core:
    """Finds a build of the core, or compiles one, and loads it.

    A library cannot be loaded if it is damaged, or was compiled for a newer system. In this case,
    this function tries the next build. If no build can be loaded, it compiles a new one.
    """
    start = time.time()
    rejected: list[str] = []
    while True:
        build = builder.ensure(options, source, rejected=rejected)
        try:
            library = api.declare(ctypes.CDLL(str(build.core)))
        except AttributeError as error:
            raise NativeUnavailableError(
                f"{build.core} lacks a function ({error}): reinstall tfdist."
            ) from error
        except OSError as error:
            # If a new build cannot be loaded, another compilation would not help.
            if build.finished >= start or build.stamp in rejected:
                raise NativeUnavailableError(
                    f"The native collectives cannot be loaded: {error}. If {build.folder} is on a "
                    f"file system mounted noexec, set TFDIST_CACHE to another directory."
                ) from error
            rejected.append(build.stamp)
        else:
            chosen = options.vector_unit.encode()
            if chosen and library.tfd_use_vector_unit(chosen):
                message = library.tfd_error().decode(errors="replace")
                raise ValueError(f"TFDIST_VECTOR_UNIT: {message}")
            return Core(library, build)


def load_op_library(build: Build) -> Any:
    """Loads the TensorFlow operations of a build. Its core must be loaded already."""
    if build.ops is None:
        raise NativeUnavailableError(f"{build.folder} has no ops for TensorFlow: reinstall tfdist.")
    import tensorflow as tf

    try:
        return tf.load_op_library(str(build.ops))
    except (tf.errors.OpError, OSError) as error:
        raise NativeUnavailableError(
            f"TensorFlow {tf.__version__} cannot load {build.ops}, which was built for "
            f"{build.tensorflow} ({error}): run tfdist build --force."
        ) from error


def _options() -> NativeOptions:
    options = NativeOptions.from_environment()
    if not options.enabled:
        raise NativeUnavailableError(
            "The native collectives are switched off by TFDIST_NATIVE=0: unset it to use them."
        )
    return options
