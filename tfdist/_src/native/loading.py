"""Loads the libraries, at most once per process."""

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
        library: its C functions, with their types.
        build: the build they were loaded from.
    """

    library: ctypes.CDLL
    build: Build


# Loading a library twice would return the same one, and TensorFlow refuses to register ops twice.
_lock = threading.RLock()
_core: Core | None = None
_ops: Any = None


def load() -> Core:
    """Loads the core, compiling it first if necessary.

    Returns:
        The core, always the same object in a process.

    Raises:
        NativeUnavailableError: it is disabled, or cannot be compiled or loaded.
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
    """Loads the core and then the TensorFlow ops; imports TensorFlow.

    Returns:
        The module returned by `tf.load_op_library`, always the same object in a process.

    Raises:
        NativeUnavailableError: they are disabled, or cannot be compiled or loaded.
        ValueError: a setting is invalid.
    """
    global _ops
    with _lock:
        if _ops is None:
            _ops = load_op_library(load().build)
        return _ops


def has_ops() -> bool:
    """Whether this process has loaded the ops."""
    return _ops is not None


def load_core(options: NativeOptions, source: Path = SOURCE) -> Core:
    """Finds or compiles a core, and loads it.

    A library that does not load, because it is damaged or built for a newer system, is skipped:
    the next build is tried, and finally a new one is compiled.
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
            # Recompiling a new build would not help.
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
    """Loads the ops of a build; its core must be loaded."""
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
