"""What the two libraries are made from, and the key that stands for all of it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tfdist.errors import NativeUnavailableError
from tfdist.native.tensorflow_package import TensorFlowPackage

SOURCE = Path(__file__).parents[1] / "csrc"
CORE = "libtfdist_core.so"
OPS = "libtfdist_ops.so"

# Never -march=native: one home folder, image or wheel serves machines with other processors. What
# needs newer instructions asks for them function by function. TensorFlow itself is built with
# NDEBUG, on which its headers depend.
_COMPILE = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-DNDEBUG", "-Wall", "-Wextra")
# Without the flags of floating-point exceptions, which nobody reads, branches become vector code;
# and a product is rounded before it is added, on all processors.
ARITHMETIC = ("-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off")
_HARDENING = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
_LINK = ("-shared", "-pthread", "-Wl,-z,relro", "-Wl,-z,now")
# What is missing in the core shows when it is linked, not when it is loaded. libdl holds dlopen in
# a glibc before 2.34.
_LINK_CORE = ("-Wl,-z,defs", f"-Wl,-soname,{CORE}", "-ldl")
_LINK_OPS = (f"-Wl,-soname,{OPS}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN")
_SUFFIXES = (".cc", ".h", ".inc")
_OPS_FOLDER, _TESTS_FOLDER = "tf", "tests"


@dataclass(frozen=True)
class Recipe:
    """Sources and flags of the core, and of the ops that make it part of a TensorFlow graph.

    Attributes:
        source: the folder with the sources.
        core: the core's compilation units, below `source`.
        ops: those of the ops; empty where there are none.
        tensorflow: against what to compile.
        key: 16 characters that change with anything that changes the libraries, but for the
            compiler.
    """

    source: Path
    core: tuple[str, ...]
    ops: tuple[str, ...]
    tensorflow: TensorFlowPackage
    key: str

    @property
    def compile_core(self) -> tuple[str, ...]:
        """Flags for a unit of the core."""
        # The ops use C++ names of the core, so both have one ABI.
        return (*_COMPILE, *ARITHMETIC, *_HARDENING, *self.tensorflow.defines, f"-I{self.source}")

    @property
    def compile_ops(self) -> tuple[str, ...]:
        """Flags for a unit of the ops."""
        return (*self.compile_core, *self.tensorflow.includes)

    @property
    def link_core(self) -> tuple[str, ...]:
        """Flags that follow the core's objects."""
        return (*_LINK, *_LINK_CORE)

    @property
    def link_ops(self) -> tuple[str, ...]:
        """Flags that follow the ops' objects; the core lies in the current folder."""
        return (*_LINK, "-L.", *_LINK_OPS, *self.tensorflow.link_flags)


def read(tensorflow: TensorFlowPackage, source: Path = SOURCE) -> Recipe:
    """Reads the sources.

    Args:
        tensorflow: against what to compile.
        source: the folder with the sources: the ops in its folder `tf`, the core in all others
            but `tests`.

    Raises:
        NativeUnavailableError: there are no sources.
    """
    files = sorted(
        path.relative_to(source)
        for path in source.rglob("*")
        if path.suffix in _SUFFIXES and path.relative_to(source).parts[0] != _TESTS_FOLDER
    )
    units = [path for path in files if path.suffix == ".cc"]
    ops = tuple(str(path) for path in units if path.parts[0] == _OPS_FOLDER)
    core = tuple(str(path) for path in units if path.parts[0] != _OPS_FOLDER)
    if not core:
        raise NativeUnavailableError(
            f"The C++ sources are missing in {source}: install tfdist again."
        )
    digest = hashlib.sha256()
    # No paths: where TensorFlow and the sources lie makes no other libraries.
    flags = (*_COMPILE, *ARITHMETIC, *_HARDENING, *_LINK, *_LINK_CORE, *_LINK_OPS, *tensorflow.defines)
    for text in (os.uname().machine, tensorflow.version, *flags):
        digest.update(text.encode() + b"\0")
    for path in files:
        content = (source / path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return Recipe(source, core, ops, tensorflow, digest.hexdigest()[:16])
