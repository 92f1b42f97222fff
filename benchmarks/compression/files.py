"""Writes files atomically, so that a file is complete even if the benchmark is interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def has_folder(file: str | None) -> bool:
    """Whether the folder of a file exists. True if the file is None."""
    return file is None or Path(file).absolute().parent.is_dir()


def write_rows(rows: Sequence[Any], file: str) -> None:
    """Writes rows as JSON. If the file exists, replaces it atomically."""
    part = f"{file}.part"
    Path(part).write_text(json.dumps(rows, indent=1, allow_nan=False) + "\n")
    os.replace(part, file)
