"""The call site of a collective in the user's program, which serves as its default name.

Calls at different lines do not match, even if their shapes agree.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from types import FrameType

from tfdist._src.internals.tensorflow import traced_stack

_PACKAGES = ("tfdist", "tensorflow", "keras")
# A function converted by autograph; only TensorFlow knows its original lines.
_GENERATED = "__autograph_generated_file"
# TensorFlow's frames between a caller and the called function.
_WRAPPERS = re.compile(r"[/\\](autograph|util)[/\\]")


def of_call() -> str:
    """The file and the line of the innermost frame outside tfdist, TensorFlow and Keras.

    Example:
        >>> from tfdist.collective import call_site
        >>> call_site.of_call()
        '<doctest call_site.of_call[1]>:1'
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame.f_code.co_filename):
        frame = frame.f_back
    return _text(frame)


def of_tensorflow_call(*functions: str) -> str:
    """The line at which the user calls a TensorFlow function that leads to this call.

    Args:
        functions: the names of the TensorFlow functions.

    Returns:
        As for `of_call`; "" for calls through Keras, tfdist or other TensorFlow functions, which
        different lines of user code may lead to.
    """
    frame = sys._getframe(1).f_back
    called = None
    while frame is not None and _package(frame.f_code.co_filename) == "tensorflow":
        if not _WRAPPERS.search(frame.f_code.co_filename):
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
        original = next((site for site in traced_stack() if not _package(site[0])), (file, line))
        if _GENERATED in original[0]:
            # In a thread that the user has started, TensorFlow does not know the original line.
            return f"{frame.f_code.co_name.removeprefix('tf__')}:{line}"
        file, line = original
    return f"{_name(file)}:{line}"


@functools.cache
def _name(file: str) -> str:
    """A file's name, the same on all hosts: without a notebook cell's number, which varies."""
    return re.sub(r"^<ipython-input-\d+-", "<ipython-input-", os.path.basename(file))


@functools.cache
def _package(file: str) -> str:
    """Which of `_PACKAGES` a file belongs to; "" for none."""
    return next((name for name, folder in _folders() if file.startswith(folder)), "")


@functools.cache
def _folders() -> list[tuple[str, str]]:
    specs = [(name, importlib.util.find_spec(name)) for name in _PACKAGES]
    return [(n, os.path.dirname(s.origin) + os.sep) for n, s in specs if s and s.origin]
