"""One-line summaries of errors."""

from __future__ import annotations

import re

import tensorflow as tf

_COLORS = re.compile(r"\x1b\[[\d;]*m")
# Keras reports the location first, and the cause on the next line.
_KERAS_PREFIX = "Exception encountered when calling"
# Precedes a traceback, whose last line is the error.
_AUTOGRAPH_PREFIX = "in user code:"


def cause(error: BaseException) -> str:
    """An error's type and the first line of its message.

    Example:
        >>> cause(ValueError("wrong\\nin detail"))
        'ValueError: wrong'
    """
    kind = type(error).__name__
    text = plain(error) if isinstance(error, tf.errors.OpError) else str(error)
    lines = [line.strip() for line in _COLORS.sub("", text).splitlines() if line.strip()]
    if lines and lines[0].startswith(_KERAS_PREFIX) and len(lines) > 1:
        lines = [f"{lines[0]} {lines[1]}"]
    if lines and lines[0] == _AUTOGRAPH_PREFIX:
        lines = [lines[-1].removeprefix(f"{kind}: ")]
    return f"{kind}: {lines[0]}" if lines else kind


def plain(error: tf.errors.OpError) -> str:
    """An operation's message, without TensorFlow's description of its location in the graph."""
    lines = [line.strip() for line in str(error.message).splitlines()]
    lines = [line for line in lines if line]
    ends = [i for i, line in enumerate(lines) if line.startswith("[[{{node")]
    text = lines[ends[0] - 1] if ends and ends[0] else str(error.message)
    # Decorations of the message of an operation that ran eagerly.
    return re.sub(r"^\{\{function_node \S+ ?\}\} | \[Op:\w+\] name: *$", "", text)
