"""A step that fails on one worker: those who wait for it fail too, and name it and the cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.collective import tokens
from tfdist.errors import ProgramMismatchError
from tfdist.internals.tensorflow import functions_operations, on_function_failure
from tfdist.strategies.error_cause import cause, plain
from tfdist.strategies.group import Group, joined_group

# The end of the data, and what all workers raise together.
_NO_FAILURES = (StopIteration, tf.errors.OutOfRangeError, ProgramMismatchError)
_NOTICED = " It was noticed in "
_COLLECTIVES = ("Tfdist", "Collective")
_listening = False


@contextlib.contextmanager
def running_step(group: Group, *, eager: bool) -> Iterator[None]:
    """Runs a step of this worker: where it raises, those who wait for the worker are told why.

    Args:
        group: the workers.
        eager: whether what raises has run, rather than been traced, if it is no operation.

    Raises:
        tf.errors.UnavailableError: another worker was lost, or its step has failed; the message
            names it.
    """
    if group.in_step:
        yield
        return
    try:
        with group.naming_lost_workers():
            yield
    except (Exception, KeyboardInterrupt) as error:
        _tell(group, error, eager=eager)
        raise


def listen() -> None:
    """Begins to listen to functions of the user's own that fail; a second time does nothing."""
    global _listening
    if not _listening:
        _listening = True
        on_function_failure(tokens.uses, _function_failed)


def _function_failed(function: Any, error: BaseException, uses: int) -> None:
    group = joined_group()
    if group is None or group.in_step:
        return
    # It may not have been traced to its end.
    used = tokens.uses() > uses
    if used or any(name.startswith(_COLLECTIVES) for name in functions_operations(function)):
        _tell(group, error, eager=False)


def _tell(group: Group, error: BaseException, *, eager: bool) -> None:
    if isinstance(error, _NO_FAILURES) or group.topology.size == 1:
        return
    message = plain(error) if isinstance(error, tf.errors.OpError) else ""
    if _NOTICED in message:
        # Those who share nothing with the worker that has failed may not have heard of it.
        group.fail(message.split(_NOTICED)[0])
        return
    why = cause(error).rstrip(".")
    group.fail(f"{group.topology.me} failed: {why}.")
    if eager or isinstance(error, tf.errors.OpError):
        group.end(why)
