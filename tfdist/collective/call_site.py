"""Where in the user's program a collective is called, which stands for a name that it lacks.

Two calls on two workers that stand at different places of the program are no pair, though their
shapes may be the same.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from types import FrameType

from tfdist.internals.tensorflow import traced_stack

_PACKAGES = ("tfdist", "tensorflow", "keras")
# What autograph makes of a function; only TensorFlow knows the lines that it was made of.
_GENERATED = "__autograph_generated_file"
# What of TensorFlow stands between a caller and what is called.
_IN_BETWEEN = re.compile(r"[/\\](autograph|util)[/\\]")


def of_call() -> str:
    """The file and the line of the innermost frame outside tfdist, TensorFlow and Keras.

    Example:
        >>> from tfdist.collective import place
        >>> place.of_call()
        '<doctest place.of_call[1]>:1'
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame.f_code.co_filename):
        frame = frame.f_back
    return _text(frame)


def of_tensorflow_call(*functions: str) -> str:
    """Where the user calls one of TensorFlow's functions, from which the caller was called.

    Args:
        functions: their names.

    Returns:
        As `of_call`; "" where the caller was called in another way: what Keras, tfdist and other
        functions of TensorFlow call stands for many lines of the user's, which may differ.
    """
    frame = sys._getframe(1).f_back
    called = None
    while frame is not None and _package(frame.f_code.co_filename) == "tensorflow":
        if not _IN_BETWEEN.search(frame.f_code.co_filename):
            called = frame.f_code.co_name
        frame = frame.f_back
    return _text(frame) if called in functions and _user(frame) else ""


def _user(frame: FrameType | None) -> bool:
    return frame is not None and not _package(frame.f_code.co_filename)


def _text(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    if _GENERATED in file:
        written = next((place for place in traced_stack() if not _package(place[0])), (file, line))
        if _GENERATED in written[0]:
            # In a thread of its own even TensorFlow does not. The line is one of what was made.
            return f"{frame.f_code.co_name.removeprefix('tf__')}:{line}"
        file, line = written
    return f"{_name(file)}:{line}"


@functools.cache
def _name(file: str) -> str:
    """What a file is called on all hosts: the number of a notebook's cell depends on what ran."""
    return re.sub(r"^<ipython-input-\d+-", "<ipython-input-", os.path.basename(file))


@functools.cache
def _package(file: str) -> str:
    """The one of the packages that a file is of; "" for all others."""
    return next((name for name, folder in _folders() if file.startswith(folder)), "")


@functools.cache
def _folders() -> list[tuple[str, str]]:
    specs = [(name, importlib.util.find_spec(name)) for name in _PACKAGES]
    return [(n, os.path.dirname(s.origin) + os.sep) for n, s in specs if s and s.origin]
