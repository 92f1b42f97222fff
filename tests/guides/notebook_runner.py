"""Runs the cells of one notebook in this process: by itself, or as a worker of a job.

What TensorFlow's strategies are in the notebook is a `tfdist.MultiWorkerMirroredStrategy` on the
workers, and no strategy in one process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The cluster in one process, for cells that read its size.
_CLUSTER = {"worker": ["localhost:1", "localhost:2"]}
_in_call: list[str] = []  # The outermost call that is recorded now.


def run(notebook: Path, way: str, folder: Path, rows: int, scoped: list[int]) -> None:
    """Runs a notebook in this process, and writes the outcome of each cell as JSON.

    Args:
        notebook: its path.
        way: "alone", "rounded" (alone, with initial weights that differ by rounding) or
            "distributed".
        folder: where to write, also what cells write to `/tmp`. The workers share it, and each has
            a working folder of its own inside.
        rows: of the training pictures in Keras's data sets of digits.
        scoped: the numbers of cells that run inside the strategy's scope.
    """
    import keras

    import tfdist
    from tests.guides import made_up
    from tests.guides.cells import cells, makes_strategy
    from tests.guides.runner import round_weights

    rank = tfdist.rank()
    (own := folder / str(rank)).mkdir()
    os.chdir(own)
    sys.path.insert(0, str(own))
    tempfile.tempdir = str(own)
    logs: list[Any] = []
    made_up.PICTURES[28, 28] = (rows, rows // 16)
    made_up.install_data()
    sys.modules["tensorflow_datasets"] = _datasets()
    if way == "rounded":
        round_weights(keras)
    _record_calls(logs)
    sources = cells(notebook, folder)
    strategy = _install_strategy(way, logs)
    keras.utils.set_random_seed(1)
    if not makes_strategy(sources):
        strategy()
    printed: list[str] = []
    names: dict[str, Any] = {
        "__name__": "__main__",
        "print": lambda *args, **kwargs: printed.append(" ".join(map(str, args))),
    }
    outcomes = []
    for number, source in enumerate(sources):
        logs.clear()
        printed.clear()
        error = ""
        before = _models(names)
        # AutoGraph reads the source of functions from a file.
        (file := own / "cells" / f"{number}.py").parent.mkdir(exist_ok=True)
        file.write_text(source)
        inside = number in scoped and way == "distributed"
        try:
            with strategy().scope() if inside else contextlib.nullcontext():
                exec(compile(source, file, "exec"), names)
        except BaseException as problem:
            traceback.print_exc()
            error = _message(problem)
        made = [name for name, model in _models(names).items() if before.get(name) is not model]
        text = "\n".join(printed).replace(str(own), ".").replace(str(folder), "/tmp")
        outcome = {"source": source, "error": error, "logs": list(logs)}
        outcomes.append({**outcome, "printed": text, "models": made})
    (folder / f"cells.{rank}").write_text(json.dumps(outcomes))


def _record_calls(logs: list[Any]) -> None:
    """Appends what each call of `fit` and `evaluate` gives, or its error, to a list."""
    import keras

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def record(*args: Any, **kwargs: Any) -> Any:
            if _in_call:
                return call(*args, **kwargs)
            _in_call.append(name)
            try:
                result = call(*args, **kwargs)
            except BaseException as error:
                logs.append([name, {"error": _message(error)}])
                raise
            finally:
                _in_call.clear()
            found = result.history if name == "fit" else result
            logs.append([name, json.loads(json.dumps(found, default=float))])
            return result

        return record

    for name in ("fit", "evaluate"):
        # On the class that defines it, where tfdist replaces it, too.
        owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        setattr(owner, name, recording(name, getattr(owner, name)))


def _install_strategy(way: str, logs: list[Any]) -> Callable[[], Any]:
    """Replaces TensorFlow's strategies of several replicas.

    Args:
        way: as for `run`.
        logs: where to record calls of `fit` and `evaluate`.

    Returns:
        A function that gives the strategy in their place, created at its first call.
    """
    import tensorflow as tf

    import tfdist

    default = tf.distribute.get_strategy()
    made: list[Any] = []
    if way != "distributed":
        task = {"type": "worker", "index": 0}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": _CLUSTER, "task": task})
        # Cells that ask which worker this is take it for the only one.
        default.extended._cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({})
        )
        made.append(default)

    originals = {
        name: getattr(tf.distribute, name)
        for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy")
    }
    given = {
        name: type(name, (original,), {"__new__": lambda *args, **kwargs: strategy()})
        for name, original in originals.items()
    }

    def replace(classes: dict[str, Any]) -> None:
        for name, kind in classes.items():
            setattr(tf.distribute, name, kind)

    def strategy() -> Any:
        if not made:
            replace(originals)  # tfdist uses them.
            made.append(tfdist.MultiWorkerMirroredStrategy())
            replace(given)
            _record_calls(logs)  # Also those that tfdist refuses.
        return made[0]

    replace(given)
    return strategy


def _models(names: dict[str, Any]) -> dict[str, Any]:
    import keras

    return {name: value for name, value in names.items() if isinstance(value, keras.Model)}


def _message(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _datasets() -> types.ModuleType:
    """Stands for tensorflow_datasets: small sets of pictures of digits."""
    import tensorflow as tf

    from tests.guides.made_up import images

    def load(name: str = "", split: Any = None, with_info: bool = False, **options: Any) -> Any:
        sets = {}
        for part, count in (("train", 512), ("test", 128)):
            x, y = images(count, (28, 28), 10, seed=count)
            sets[part] = tf.data.Dataset.from_tensor_slices((x[..., None], y[:, 0].astype("int64")))
        found = sets if split is None else sets[split]
        splits = {p: types.SimpleNamespace(num_examples=len(d)) for p, d in sets.items()}
        return (found, types.SimpleNamespace(splits=splits)) if with_info else found

    module = types.ModuleType("tensorflow_datasets")
    module.load = load
    module.disable_progress_bar = lambda: None
    return module


if __name__ == "__main__":
    path, way, folder, rows, scoped = sys.argv[1:]
    run(Path(path), way, Path(folder), int(rows), json.loads(scoped))
