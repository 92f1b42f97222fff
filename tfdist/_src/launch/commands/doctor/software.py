"""Doctor's checks of versions, settings and the native library."""

import json
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tfdist._src import native
from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._src.options import PREFIX, NativeOptions, Options
from tfdist._version import NEWEST_TESTED, __version__, is_newer

# For each package, the oldest supported version, and the first later version that is no longer
# supported. "" means that there is no such bound. A test compares these versions with setup.cfg.
SUPPORTED = {"tensorflow": ("2.18", "2.22"), "keras": ("3.8", ""), "numpy": ("", "")}
_TITLES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-intel", "tf-nightly")}


def check_versions(context: Context) -> Section:
    """Reads the versions from package metadata, without importing anything."""
    section = Section([("tfdist", __version__), ("Python", platform.python_version())])
    for package, (oldest, too_new) in SUPPORTED.items():
        title = _TITLES[package]
        wanted = ",".join(
            sign + number for sign, number in ((">=", oldest), ("<", too_new)) if number
        )
        found = _installed(package, *_OTHER_NAMES.get(package, ()))
        tested = NEWEST_TESTED.get(package)
        newer = bool(tested and found and is_newer(found, tested))
        note = f" (newer than {tested}, which tfdist was tested with)" if newer else ""
        section.add(title, f"{found or 'not installed'}{note}")
        if not found:
            section.problems.append(f"{title} is missing: pip install '{package}{wanted}'")
        elif not supported(found, oldest, too_new):
            section.problems.append(
                f"{title} {found} is not supported: pip install '{package}{wanted}'"
            )
    return section


def supported(found: str, oldest: str, too_new: str) -> bool:
    """Whether a version is supported.

    Args:
        found: the version.
        oldest: the oldest supported version; "" if all old versions are supported.
        too_new: the first version that is too new; "" if all new versions are supported.

    Example:
        >>> supported("2.22.0rc1", "2.18", "2.22"), supported("2.21.0", "2.18", "2.22")
        (False, True)
    """
    number = _numbers(found)
    return number >= _numbers(oldest) and (not too_new or number < _numbers(too_new))


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]*", text)
    return tuple(int(part) for part in (release[0] if release else "").split(".") if part)


def _installed(*packages: str) -> str:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


_BACKEND = "tensorflow"


def check_settings(context: Context) -> Section:
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
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        section.add(name, "set" if "SECRET" in name else environment[name])
    try:
        Options.from_environment(dict(environment))
    except ValueError as error:
        section.problems.append(str(error))
    return section


def _backend(environment: Mapping[str, str]) -> tuple[str, str, str]:
    """Returns Keras's backend, where it is set, and how to set it to TensorFlow."""
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


_NAME = "native"


def check_native(context: Context) -> Section:
    """Checks whether the native collectives are compiled, or a compiler for them is installed.

    The check neither compiles nor loads the libraries.
    """
    try:
        status = native.status(NativeOptions.from_environment(dict(context.environment)))
    except ValueError as error:
        return Section([(_NAME, "a setting is invalid")], [str(error)])
    section = Section([(_NAME, str(status))])
    if status.problem:
        section.problems.append(f"{status.problem} Or set TFDIST_NATIVE=0 to disable them")
    return section
