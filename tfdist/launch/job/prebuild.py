"""Builds the native collectives before the workers start, so that not all of them do so."""

from __future__ import annotations

from tfdist import native
from tfdist.errors import LaunchError, NativeUnavailableError
from tfdist.launch.console import say
from tfdist.options import NativeOptions


def prepare() -> None:
    """Compiles the native collectives unless they are built or disabled.

    A failure is only a warning: the workers can use TensorFlow's collectives.

    Raises:
        LaunchError: a setting is invalid.
    """
    try:
        options = NativeOptions.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if not options.enabled:
        return
    try:
        native.ensure(options)
    except NativeUnavailableError as error:
        say(f"warning: {error}")
