"""The code of a notebook's cells, for Python without a shell, and for Keras 3."""

from __future__ import annotations

import json
import re
from pathlib import Path

# Names of Keras 2, and paths as Keras 3 requires them.
_KERAS_3 = (
    ("/keras-model'", "/keras-model.keras'"),
    ("tf.keras.losses.Reduction.NONE", "'none'"),
    ("reset_states()", "reset_state()"),
)


def cells(notebook: Path, folder: Path) -> list[str]:
    """Returns the code of each cell, in the notebook's order.

    Args:
        notebook: the path of the notebook.
        folder: replaces `/tmp`.
    """
    found = json.loads(notebook.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]
    return [_python(source.replace("/tmp/", f"{folder}/")) for source in sources]


def makes_strategy(sources: list[str]) -> bool:
    """Returns whether a cell creates a strategy of several replicas."""
    return any(re.search(r"\w*MirroredStrategy\(", source) for source in sources)


def _python(source: str) -> str:
    for old, new in _KERAS_3:
        source = source.replace(old, new)
    # The same batches in one process and on two workers.
    source = re.sub(r"\w+\.num_replicas_in_sync", "2", source)
    if source.startswith("%%bash"):
        return _script(source)
    if match := re.match(r"%%writefile (\S+)\n", source):
        return f"open({match[1]!r}, 'w').write({source[match.end() :]!r})"
    lines = [re.sub(r"^(\s*)[!%].*", r"\1pass", line) for line in source.splitlines()]
    # The launcher describes the cluster. A notebook's own description is of another one.
    description = r"^(\s*)os\.environ(\.pop\('TF_CONFIG'|\['TF_CONFIG'\] =).*"
    return "\n".join(re.sub(description, r"\1pass", line) for line in lines)


def _script(source: str) -> str:
    """Runs the script that a cell of the shell runs.

    A script in the background is another worker of the same job, which the launcher starts.
    """
    match = re.search(r"^python (\S+\.py)$", source, re.MULTILINE)
    if match is None or "--bg" in source:
        return "pass"
    return f"import runpy\nrunpy.run_path({match[1]!r}, run_name='__main__')"
