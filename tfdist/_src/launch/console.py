"""The logger of the launcher, and parsers of its command lines."""

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

from tfdist._src import log
from tfdist._src.options import USAGE_ERROR

logger = log.logger.getChild("run")
"""The logger of `tfdist run`."""

BELOW_OUTPUT = {"below_output": True}
"""The `extra` of a message that may follow an unfinished line of the chief in the terminal.

It begins a new line there, so that it does not continue a progress bar.
"""


def warn(line: str) -> None:
    """Logs a warning, and begins a new line first if the chief's last line is unfinished."""
    logger.warning(line, extra=BELOW_OUTPUT)


T = TypeVar("T")


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports errors in one line and exits with code 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits."""
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def typed(read: Callable[[str], T]) -> Callable[[str], T]:
    """Wraps a parser of an option, so that argparse shows the message of its ValueError.

    By default, argparse shows only that the value is invalid.

    Args:
        read: converts the text of the option, and raises ValueError if the text is invalid.
    """

    def reader(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reader


def count(least: int) -> Callable[[str], int]:
    """Returns a parser of integers that are at least `least`, for `type` in argparse.

    Example:
        >>> count(1)("4")
        4
    """

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text) >= least):
            raise ValueError(f"must be an integer >= {least}. Received: {text!r}")
        return int(text)

    return typed(read)


def port(text: str) -> int:
    """Parses a port number, from 1 to 65535.

    Example:
        >>> port("9400")
        9400
    """
    number = count(1)(text)
    if number >= 1 << 16:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535. Received: {text!r}")
    return number


def seconds(*, zero: bool) -> Callable[[str], float]:
    """Returns a parser of positive numbers of seconds, for `type` in argparse.

    Args:
        zero: whether 0 is also valid.

    Example:
        >>> seconds(zero=True)("0")
        0.0
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 < value < float("inf") or (zero and value == 0)):
            sign = "non-negative" if zero else "positive"
            raise ValueError(f"must be a {sign} number of seconds. Received: {text!r}")
        return value

    return typed(read)
