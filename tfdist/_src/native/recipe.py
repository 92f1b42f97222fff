"""The sources and flags of the two libraries, and the key that identifies them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from tfdist._src.native.tensorflow_package import TensorFlowPackage
from tfdist.errors import NativeUnavailableError

SOURCE = Path(__file__).parents[2] / "csrc"
CORE = "libtfdist_core.so"
OPS = "libtfdist_ops.so"

# Never -march=native: one home directory, image or wheel serves hosts with different processors.
# Code that needs newer instructions enables them per function. TensorFlow itself is built with
# NDEBUG, which affects its headers.
_COMPILE = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-DNDEBUG", "-Wall", "-Wextra")
# Nothing reads the floating-point exception flags; without them, branches become vector code. A
# product is rounded before it is added, so that all processors compute the same bits.
ARITHMETIC = ("-fno-trapping-math", "-fno-math-errno", "-ffp-contract=off")
_HARDENING = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
_FLAGS = (*_COMPILE, *ARITHMETIC, *_HARDENING)
_LINK = ("-shared", "-pthread", "-Wl,-z,relro", "-Wl,-z,now")
# `-z defs` reports undefined symbols of the core when it is linked, not when it is loaded. Before
# glibc 2.34, dlopen is in libdl.
_LINK_CORE = ("-Wl,-z,defs", f"-Wl,-soname,{CORE}", "-ldl")
_LINK_OPS = (f"-Wl,-soname,{OPS}", f"-l:{CORE}", "-Wl,-rpath,$ORIGIN")
_SUFFIXES = (".cc", ".h", ".inc")
_OPS_FOLDER, _TESTS_FOLDER = "tf", "tests"


@dataclass(frozen=True)
class Recipe:
    """Sources and flags of the core, and of the ops that expose it to TensorFlow graphs.

    Attributes:
        source: the directory with the sources.
        core: the core's translation units, relative to `source`.
        ops: those of the ops; empty if there are none.
        tensorflow: the TensorFlow to compile against.
        key: 16 characters that change with anything that affects the libraries, except the
            compiler.
    """

    source: Path
    core: tuple[str, ...]
    ops: tuple[str, ...]
    tensorflow: TensorFlowPackage
    key: str

    @property
    def compile_core(self) -> tuple[str, ...]:
        """Compile flags of the core."""
        # The ops use C++ symbols of the core, so both need the same ABI.
        return (*_FLAGS, *self.tensorflow.defines, f"-I{self.source}")

    @property
    def compile_ops(self) -> tuple[str, ...]:
        """Compile flags of the ops."""
        return (*self.compile_core, *self.tensorflow.includes)

    @property
    def link_core(self) -> tuple[str, ...]:
        """Link flags, after the core's objects."""
        return (*_LINK, *_LINK_CORE)

    @property
    def link_ops(self) -> tuple[str, ...]:
        """Link flags, after the ops' objects; the core is in the current directory."""
        return (*_LINK, "-L.", *_LINK_OPS, *self.tensorflow.link_flags)


def read(tensorflow: TensorFlowPackage, source: Path = SOURCE) -> Recipe:
    """Reads the sources.

    Args:
        tensorflow: the TensorFlow to compile against.
        source: the directory with the sources: the ops in its subdirectory `tf`, the core in all
            others except `tests`.

    Raises:
        NativeUnavailableError: the sources are missing.
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
        raise NativeUnavailableError(f"The C++ sources are missing in {source}: reinstall tfdist.")
    digest = hashlib.sha256()
    # No paths: the locations of TensorFlow and the sources do not affect the libraries.
    flags = (*_FLAGS, *_LINK, *_LINK_CORE, *_LINK_OPS, *tensorflow.defines)
    for text in (os.uname().machine, tensorflow.version, *flags):
        digest.update(text.encode() + b"\0")
    for path in files:
        content = (source / path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return Recipe(source, core, ops, tensorflow, digest.hexdigest()[:16])
