"""Runs notebooks cell by cell: by themselves, and on two workers with a working folder each.

Strategies of TensorFlow become `tfdist.MultiWorkerMirroredStrategy`. A cell that runs by itself
must run on both workers, and what it trains must have the same losses. For example with a copy of
the `tutorials/distribute` of https://github.com/tensorflow/docs:

    python -m tests.guides.notebooks path/to/notebooks
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Returns 1 if a cell differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.guides.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("notebooks", type=Path, nargs="+", help="*.ipynb")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one run (600)")
    options = parser.parse_args()
    different = 0
    for notebook in options.notebooks:
        expected = _launch(notebook, "alone", options.timeout)[0]
        for rank, cells in enumerate(_launch(notebook, "distributed", options.timeout)):
            for number, (own, others) in enumerate(zip(expected, cells, strict=True)):
                found = _difference(own, others)
                different += bool(found)
                print(f"{notebook.stem}, cell {number}, worker {rank}: {found or 'same'}")
    return 1 if different else 0


def _difference(own: dict[str, Any], others: dict[str, Any]) -> str:
    import numpy as np

    if own["error"]:
        return ""  # It does not run at all.
    if others["error"]:
        return f"{others['error']}\n    in {others['source'][:300]!r}"
    for (name, logs), (_, other) in zip(own["logs"], others["logs"], strict=True):
        for one, two in zip(_numbers(logs), _numbers(other), strict=True):
            if not np.allclose(one, two, rtol=1e-4, atol=1e-5):
                return f"{name} gives {two} instead of {one}"
    return ""


def _numbers(logs: Any) -> list[Any]:
    if isinstance(logs, dict):
        return [number for part in logs.values() for number in _numbers(part)]
    return [logs]


def _launch(notebook: Path, way: str, timeout: float) -> list[list[dict[str, Any]]]:
    workers = 2 if way == "distributed" else 1
    folder = Path(tempfile.mkdtemp(prefix="notebook-"))
    launch = ["-m", "tfdist", "run", "-n", "2"] if workers > 1 else []
    command = [sys.executable, *launch, __file__, str(notebook.absolute()), way, str(folder)]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TFDIST_COLLECTIVE_TIMEOUT": str(timeout / 2),
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with (folder / "output").open("wb") as output:
        subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=timeout)
    files = [folder / f"cells.{rank}" for rank in range(workers)]
    assert all(file.exists() for file in files), (folder / "output").read_text()[-3000:]
    return [json.loads(file.read_text()) for file in files]


def run(notebook: str, way: str, folder: str) -> None:
    """Runs a notebook in this process, and writes the outcome of each cell as JSON.

    Args:
        notebook: its path.
        way: "alone" or "distributed".
        folder: where to write; files that cells write to `/tmp` are written here, too.
    """
    import keras
    import tensorflow as tf

    import tfdist
    from tests.guides import made_up
    from tests.guides.runner import one_line

    rank = tfdist.rank()
    (own := Path(folder) / str(rank)).mkdir()
    os.chdir(own)
    sys.path.insert(0, str(own))
    strategy = tf.distribute.get_strategy()
    if way == "distributed":
        strategy = tfdist.MultiWorkerMirroredStrategy()
    for name in ("MirroredStrategy", "MultiWorkerMirroredStrategy"):
        original = getattr(tf.distribute, name)
        given = type(name, (original,), {"__new__": lambda *args, **kwargs: strategy})
        setattr(tf.distribute, name, given)
    logs: list[Any] = []
    made_up.install(
        lambda name, found: logs.append([name, json.loads(json.dumps(found, default=float))])
    )
    sys.modules["tensorflow_datasets"] = _datasets()
    keras.utils.set_random_seed(1)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for source in _cells(notebook, folder):
        logs.clear()
        error = ""
        try:
            exec(compile(source, notebook, "exec"), names)
        except BaseException as problem:
            traceback.print_exc()
            error = one_line(problem)
        cells.append({"source": source, "error": error, "logs": list(logs)})
    (Path(folder) / f"cells.{rank}").write_text(json.dumps(cells))


def _cells(notebook: str, folder: str) -> list[str]:
    """The code of each cell, without commands of the shell."""
    cells = []
    for cell in json.loads(Path(notebook).read_text())["cells"]:
        source = "".join(cell["source"]).replace("/tmp/", f"{folder}/")
        source = source.replace("/keras-model'", "/keras-model.keras'")  # As Keras 3 wants.
        source = re.sub(r"\w+\.num_replicas_in_sync", "2", source)  # The same batches in both.
        if cell["cell_type"] != "code" or source.startswith("%%bash"):
            continue
        if match := re.match(r"%%writefile (\S+)\n", source):
            source = f"open({match[1]!r}, 'w').write({source[match.end() :]!r})"
        lines = (re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in source.splitlines())
        # It describes another cluster.
        cells.append("\n".join(lines).replace("os.environ.pop('TF_CONFIG', None)", "pass"))
    return cells


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
    if len(sys.argv) == 4 and sys.argv[2] in ("alone", "distributed"):
        run(*sys.argv[1:])
    else:
        sys.exit(main())
