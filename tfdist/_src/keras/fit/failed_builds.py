"""Why models could not be built without data, for errors that follow from it."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class _Failure:
    """A build that has failed.

    Attributes:
        error: what it raised.
        led_to: the error that names it as its cause, if any.
    """

    error: Exception
    led_to: Exception | None = None


_failures: weakref.WeakKeyDictionary[Any, _Failure] = weakref.WeakKeyDictionary()


def note_failure(model: Any, error: Exception) -> None:
    """Records why a model could not be built."""
    _failures[model] = _Failure(error)


def forget_failure(model: Any) -> None:
    """Forgets why a model could not be built, since it has been built or its step works."""
    _failures.pop(model, None)


@contextlib.contextmanager
def naming_cause(model: Any) -> Iterator[None]:
    """Within this context, errors name the failed build of the model, if any, as their cause."""
    try:
        yield
    except Exception as error:
        failure = _failures.get(model)
        if failure is None or _text(failure.error) == _text(error):
            raise
        failure.led_to = error
        raise error from _behind(error.__cause__, failure.error)


@contextlib.contextmanager
def keeping_cause(model: Any) -> Iterator[None]:
    """Within this context, an error keeps the cause that `naming_cause` gave it.

    Keras drops the causes of errors where it leaves its own functions out of their tracebacks.
    """
    try:
        yield
    except Exception as error:
        failure = _failures.pop(model, None)
        if failure is None or failure.led_to is not error or error.__cause__ is not None:
            raise
        raise error from failure.error


def _behind(cause: BaseException | None, first: Exception) -> BaseException:
    """An error's cause, of which the first cause is another one."""
    if cause is None or cause is first:
        return first
    last = cause
    while last.__cause__ is not None and last.__cause__ is not first:
        last = last.__cause__
    last.__cause__ = first
    return cause


def _text(error: BaseException) -> tuple[type, str]:
    return type(error), str(error)


@contextlib.contextmanager
def warning_if_done() -> Iterator[None]:
    """Holds this thread's warnings back, and shows them at the end unless an error is raised.

    After an error they count as never shown: whoever tries again issues them again.
    """
    show, thread = warnings.showwarning, threading.get_ident()
    held: list[tuple[Any, ...]] = []

    def hold(*warning: Any, **more: Any) -> None:
        if threading.get_ident() == thread:
            held.append(warning)
        else:
            show(*warning, **more)

    warnings.showwarning = hold
    try:
        yield
    except BaseException:
        with warnings.catch_warnings():  # Python forgets what it has shown.
            pass
        raise
    else:
        warnings.showwarning = show
        for warning in held:
            warnings.showwarning(*warning)
    finally:
        warnings.showwarning = show
