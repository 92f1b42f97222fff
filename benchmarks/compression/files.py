"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def has_folder(file: str | None) -> bool:
    """Whether a file, if there is to be one, has a folder to lie in."""
    return file is None or Path(file).absolute().parent.is_dir()


def write_rows(rows: Sequence[Any], file: str) -> None:
    """Writes rows as JSON, in the place of what a file held before."""
    part = f"{file}.part"
    Path(part).write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
    os.replace(part, file)
