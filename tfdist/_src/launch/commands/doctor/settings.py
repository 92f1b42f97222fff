"""The settings that decide which backend Keras uses and how tfdist waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.options import Options

_BACKEND = "tensorflow"
_PREFIX = "TFDIST_"


def check(context: Context) -> Section:
    """Reads KERAS_BACKEND, keras.json, TF_USE_LEGACY_KERAS and the TFDIST_* variables."""
    section = Section()
    environment = context.environment
    backend, source, remedy = _backend(environment)
    section.add("Keras backend", f"{backend} ({source})")
    if backend != _BACKEND:
        section.problems.append(f"Keras's backend is {backend!r} ({source}): {remedy}")
    if environment.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        section.add("tf.keras", "Keras 2 (TF_USE_LEGACY_KERAS)")
        section.problems.append("TF_USE_LEGACY_KERAS selects Keras 2: unset it")
    for name in sorted(name for name in environment if name.startswith(_PREFIX)):
        section.add(name, "set" if "SECRET" in name else environment[name])
    try:
        Options.from_environment(dict(environment))
    except ValueError as error:
        section.problems.append(str(error))
    return section


def _backend(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """The backend, where it is set, and how to correct it."""
    if backend := environment.get("KERAS_BACKEND"):
        return backend, "KERAS_BACKEND", f"unset KERAS_BACKEND, or set it to {_BACKEND}"
    home = environment.get("KERAS_HOME")
    file = (Path(home) if home else Path.home() / ".keras") / "keras.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return _BACKEND, "default", ""
    backend = config.get("backend", _BACKEND) if isinstance(config, dict) else _BACKEND
    return str(backend), str(file), f'set "backend" to "{_BACKEND}" there, or KERAS_BACKEND'
