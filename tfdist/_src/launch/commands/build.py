"""`tfdist build`: compiles the native collectives in advance, for container images and wheels."""

import argparse
import time
from collections.abc import Sequence

from tfdist._src import native
from tfdist._src.launch.console import OneLineParser
from tfdist._src.native import gpu_kernels
from tfdist._src.options import NativeOptions
from tfdist.errors import LaunchError


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: the command line, without `tfdist build`.

    Returns:
        0.

    Raises:
        NativeUnavailableError: the collectives cannot be compiled on this host.
        LaunchError: an environment variable of tfdist is invalid.
        SystemExit: on a usage error (code 2), or after printing the help (code 0).
    """
    values = _parse(arguments)
    try:
        options = NativeOptions.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    package = native.PACKAGE if values.into_package else None
    start = time.time()
    build = native.ensure(options, force=values.force, retry=True, package=package)
    how = f"compiled in {build.seconds:.1f} s" if build.finished >= start else "already compiled"
    print(f"{how} by {build.compiler} for TensorFlow {build.tensorflow}:")
    for library in build.libraries:
        print(f"  {library}")
    if values.gpu:
        kernels = gpu_kernels.ensure(values.gpu, options, force=values.force, package=package)
        for each in kernels:
            how = f"compiled in {each.seconds:.1f} s" if each.seconds else "already compiled"
            print(f"GPU kernels for {each.architecture}, {how} by {each.compiler}:")
            print(f"  {each.path}")
    if values.clean:
        for folder in native.clean(options, build, package=package):
            print(f"removed {folder}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = OneLineParser(
        prog="tfdist build",
        description="Compiles the native collectives for the installed TensorFlow, unless already "
        "compiled, and prints their location.",
        epilog="Without this command they are compiled on first use, or by tfdist run before its "
        "workers start. CXX sets the compiler, TFDIST_CACHE the cache directory; "
        "docs/guide/settings.md lists all environment variables.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--into-package",
        action="store_true",
        help="build into the installed package instead of the cache: for container images, and "
        "for wheels built afterwards",
    )
    parser.add_argument(
        "--gpu",
        type=lambda text: text.split(","),
        metavar="ARCHITECTURES",
        help="also compile the GPU kernels for these architectures, such as sm_80,sm_90; needs "
        "NVRTC, which tensorflow[and-cuda] brings, but no GPU",
    )
    parser.add_argument("--force", action="store_true", help="rebuild even if a build exists")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="afterwards, remove all other builds in the same place: older ones, and those for "
        "another compiler or TensorFlow",
    )
    return parser.parse_args(list(arguments))
