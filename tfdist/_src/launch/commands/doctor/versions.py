"""The versions of tfdist's dependencies."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

from tfdist._src.launch.commands.doctor.section import Context, Section
from tfdist._version import NEWEST_TESTED, __version__, is_newer

# The oldest supported version, and the first that is too new ("" for none). A test compares them
# with setup.cfg.
SUPPORTED = {"tensorflow": ("2.18", "2.22"), "keras": ("3.8", ""), "numpy": ("", "")}
_TITLES = {"tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
_OTHER_NAMES = {"tensorflow": ("tensorflow-cpu", "tensorflow-intel", "tf-nightly")}


def check(context: Context) -> Section:
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
    """Whether a version is in a range; `""` means no bound.

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
