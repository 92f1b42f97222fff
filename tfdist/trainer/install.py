"""Installs all hooks into Keras, once."""

from __future__ import annotations

import importlib
import threading

from tfdist.internals.contract import TARGETS, check_targets
from tfdist.trainer.patching import LAYERS

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
            importlib.import_module(f"tfdist.trainer.{layer}").install()
        _installed = True
