"""Puts all hooks into Keras, once."""

from __future__ import annotations

import importlib
import threading

from tfdist.internals.contract import TARGETS, check_targets
from tfdist.trainer.patching import LAYERS

_installing = threading.Lock()
_installed = False


def install() -> None:
    """Makes Keras's training right under tfdist strategies; elsewhere it stays as it is.

    Raises:
        UnsupportedError: Keras or TensorFlow are not as they are known; nothing is replaced.
    """
    global _installed
    with _installing:
        if _installed:
            return
        check_targets(TARGETS)
        for layer in LAYERS:
            importlib.import_module(f"tfdist.trainer.{layer}").install()
        _installed = True
