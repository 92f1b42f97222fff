"""Propagates a failed step: workers that wait for the failed one raise too, and name the cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist._src.comm import tokens
from tfdist._src.group.error_cause import cause, plain
from tfdist._src.group.group import Group
from tfdist._src.group.joining import joined_group
from tfdist._src.internals.tensorflow import functions_operations, on_function_call
from tfdist._src.strategy.traced_functions import report_traces
from tfdist.errors import ProgramMismatchError

# The end of the data, and errors that all workers raise together.
_NO_FAILURES = (StopIteration, tf.errors.OutOfRangeError, ProgramMismatchError)
# Part of the native core's error messages.
_NOTICED = " It was noticed in "
_COLLECTIVES = ("Tfdist", "Collective")
_listening = False


@contextlib.contextmanager
def running_step(group: Group, *, eager: bool) -> Iterator[None]:
    """Runs a step of this worker and, if it raises, reports the cause to the waiting workers.

    Args:
        group: the workers.
        eager: whether an error other than an operation's comes from running, not tracing, the step.

    Raises:
        tf.errors.UnavailableError: another worker was lost, or its step failed; the message names
            it.
    """
    if group.in_step:
        yield
        return
    try:
        with group.naming_lost_workers():
            yield
    except (Exception, KeyboardInterrupt) as error:
        _report(group, error, eager=eager)
        raise


def listen() -> None:
    """Starts listening for calls of user-defined `tf.function`s; idempotent."""
    global _listening
    if not _listening:
        _listening = True
        on_function_call(tokens.uses, _function_called)


def _function_called(function: Any, error: BaseException | None, uses: int) -> None:
    used = tokens.uses() > uses
    if error is None and not used:
        return
    group = joined_group()
    if group is None or group.in_step:
        return
    if error is None:
        report_traces(group, function)
    # The trace may be incomplete.
    elif used or any(name.startswith(_COLLECTIVES) for name in functions_operations(function)):
        _report(group, error, eager=False)


def _report(group: Group, error: BaseException, *, eager: bool) -> None:
    if isinstance(error, _NO_FAILURES) or group.topology.size == 1:
        return
    message = plain(error) if isinstance(error, tf.errors.OpError) else ""
    if _NOTICED in message:
        # Forward it to workers that share no communicator with the failed one.
        group.fail(message.split(_NOTICED)[0])
        return
    why = cause(error).rstrip(".")
    group.fail(f"{group.topology.me} failed: {why}.")
    if eager or isinstance(error, tf.errors.OpError):
        group.end(why)
