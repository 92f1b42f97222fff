"""Runs one script in this process: by itself, or all of it inside a strategy's scope."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np


def run(script: str, distributed: bool, results: str) -> None:
    """Runs a script, and writes what its trainings gave, or its error, as JSON.

    Args:
        script: the path of the script.
        distributed: whether it runs under a `tfdist.MultiWorkerMirroredStrategy`.
        results: the file to write, with the worker's rank added to its name.
    """
    import keras
    import tensorflow as tf

    from tests.guides import made_up

    strategy: Any = None
    if distributed:
        import tfdist

        strategy = tfdist.MultiWorkerMirroredStrategy()
        # What a script would make for itself.
        tf.distribute.MirroredStrategy = lambda *args, **kwargs: strategy
    found: dict[str, Any] = {"logs": [], "error": None, "normalizes": False}

    def record(name: str, logs: Any) -> None:
        found["logs"].append([name, json.loads(json.dumps(logs, default=_plain))])

    made_up.install(record)
    _note_normalization(keras, found)
    keras.utils.set_random_seed(1)
    sys.argv = [script]
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            found["error"] = f"SystemExit: {end.code}"
    except BaseException as error:
        traceback.print_exc()
        found["error"] = one_line(error)
    rank = strategy.extended.worker_rank if strategy else 0
    Path(f"{results}.{rank}").write_text(json.dumps(found))
    sys.stdout.flush()
    if found["error"]:
        os._exit(1)


def one_line(error: BaseException) -> str:
    """What an error says, on one line and without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if text.startswith("in user code:"):
        lines = lines[-1:]
    said = [line for line in lines if not line.startswith("Exception encountered when calling")]
    return f"{type(error).__name__}: {' '.join((said or lines)[:2])}"[:300]


def _plain(value: Any) -> Any:
    return np.asarray(value).tolist()


def _note_normalization(keras: Any, found: dict[str, Any]) -> None:
    init = keras.layers.BatchNormalization.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        found["normalizes"] |= not self.synchronized

    keras.layers.BatchNormalization.__init__ = noted


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2] == "distributed", sys.argv[3])
