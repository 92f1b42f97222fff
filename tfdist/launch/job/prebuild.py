"""What `tfdist run` does before its workers start, so that they need not do it all at once."""

from __future__ import annotations

from tfdist import native
from tfdist.errors import LaunchError, NativeUnavailableError
from tfdist.launch.console import say
from tfdist.options import NativeOptions


def prepare() -> None:
    """Compiles the native collectives, unless that is done or switched off.

    A failure is a warning: the workers can take TensorFlow's collectives.

    Raises:
        LaunchError: a setting is wrong.
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
