"""The entry point of the `tfdist` console script."""

import importlib
import sys

from tfdist._src.launch import COMMANDS
from tfdist._version import __version__
from tfdist.errors import TfdistError

_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        arguments: the command line without `tfdist`; `sys.argv[1:]` by default.

    Returns:
        The exit code of the subcommand: 0 for success, 1 for a `TfdistError`, 2 for a usage error,
        130 after Ctrl-C. A subcommand may also return other exit codes.

    Example:
        >>> main(["--version"])
        tfdist 0.1.0
        0
    """
    rest = sys.argv[1:] if arguments is None else arguments
    first = rest[0] if rest else "--help"
    if first in ("-h", "--help", "help"):
        print(_help_text())
        return 0
    if first == "--version":
        print(f"tfdist {__version__}")
        return 0
    if first not in COMMANDS:
        print(
            f"tfdist: error: unknown command {first!r}; choose from {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    try:
        return int(importlib.import_module(COMMANDS[first][0]).main(rest[1:]))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except TfdistError as error:
        print(f"tfdist {first}: error: {error}", file=sys.stderr)
        return 1


def _help_text() -> str:
    commands = "\n".join(f"  {name:<8} {line}" for name, (_, line) in COMMANDS.items())
    return (
        "usage: tfdist COMMAND [options]\n\n"
        "Distributed training for Keras 3 on TensorFlow.\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  -h, --help  show this help; after a command, that command's help\n"
        "  --version   show the version\n\n"
        "examples:\n"
        "  tfdist run -n 4 train.py --epochs 10\n"
        "  tfdist run --help\n"
        "  tfdist doctor\n\n"
        "docs/guide/settings.md lists the environment variables that tfdist reads."
    )
