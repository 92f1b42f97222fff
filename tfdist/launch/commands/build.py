"""`tfdist build`: compiles the native collectives ahead of time, for images and wheels."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from tfdist import native
from tfdist.errors import LaunchError
from tfdist.launch.argument_types import OneLineParser
from tfdist.options import NativeOptions


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist build`.

    Returns:
        0.

    Raises:
        NativeUnavailableError: they cannot be compiled here.
        LaunchError: a setting is wrong.
        SystemExit: the command line is wrong (code 2), or asks for help (code 0).
    """
    values = _parse(arguments)
    try:
        options = NativeOptions.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    package = native.PACKAGE if values.into_package else None
    start = time.time()
    build = native.ensure(options, force=values.force, retry=True, package=package)
    how = f"in {build.seconds:.1f} s" if build.finished >= start else "already"
    print(f"compiled {how}, by {build.compiler} for TensorFlow {build.tensorflow}:")
    for library in build.libraries:
        print(f"  {library}")
    if values.clean:
        for folder in native.clean(options, build, package=package):
            print(f"removed {folder}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="tfdist build",
        description="Compiles the native collectives for this machine's TensorFlow, unless that "
        "is done, and prints where they are.",
        epilog="Without this command they are compiled on first use, and by tfdist run before its "
        "workers start. CXX names the compiler, TFDIST_CACHE the folder.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--into-package",
        action="store_true",
        help="put them into the installed package instead of the cache: for images, and for "
        "wheels that are made after that",
    )
    parser.add_argument("--force", action="store_true", help="compile also what is there")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="afterwards remove other builds from the cache, or with --into-package from the "
        "package: older ones, and those for another compiler or TensorFlow",
    )
    return parser.parse_args(list(arguments))
