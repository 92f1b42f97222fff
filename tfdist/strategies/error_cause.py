"""What an error says, in one line."""

from __future__ import annotations

import re

import tensorflow as tf

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
# Keras says where first, and why in the next line.
_KERAS_FOREWORD = "Exception encountered when calling"
# Before the lines of a function, which end with the error.
_AUTOGRAPH_FOREWORD = "in user code:"


def cause(error: BaseException) -> str:
    """An error's type and the first line of its own message.

    Example:
        >>> cause(ValueError("wrong\\nin detail"))
        'ValueError: wrong'
    """
    kind = type(error).__name__
    text = plain(error) if isinstance(error, tf.errors.OpError) else str(error)
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    if lines and lines[0].startswith(_KERAS_FOREWORD) and len(lines) > 1:
        lines = [f"{lines[0]} {lines[1]}"]
    if lines and lines[0] == _AUTOGRAPH_FOREWORD:
        lines = [lines[-1].removeprefix(f"{kind}: ")]
    return f"{kind}: {lines[0]}" if lines else kind


def plain(error: tf.errors.OpError) -> str:
    """An operation's own message, without the graph's account of where the operation stands."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    lines = [line for line in lines if line]
    ends = [i for i, line in enumerate(lines) if line.startswith("[[{{node")]
    text = lines[ends[0] - 1] if ends and ends[0] else str(error.message)
    # What is said of an operation that ran eagerly.
    return re.sub(r"^\{\{function_node \S+ ?\}\} | \[Op:\w+\] name: *$", "", text)
