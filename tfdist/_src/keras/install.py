"""Installs all hooks into Keras, once."""

from __future__ import annotations

import importlib
import threading

from tfdist._src.internals.contract import TARGETS, check_targets
from tfdist._src.keras.patching import LAYERS

_lock = threading.Lock()
_installed = False


def install() -> None:
    """Makes Keras train correctly under tfdist strategies; otherwise it is unchanged.

    Raises:
        UnsupportedError: this version of Keras or TensorFlow is unknown; nothing is replaced.
    """
    global _installed
    with _lock:
        if _installed:
            return
        check_targets(TARGETS)
        for layer in LAYERS:
            importlib.import_module(f"tfdist._src.keras.{layer}").install()
        _installed = True
