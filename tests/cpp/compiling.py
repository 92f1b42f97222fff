"""Compiles the C++ tests of the core; what has not changed since the last time is kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tfdist._src.native import compilation, store
from tfdist._src.native import compilation as compilers
from tfdist._src.native.compilation import TensorFlowPackage
from tfdist._src.options import NativeOptions

# Without optimization the sanitizers are too slow, with more the compiler is. The plain tests call
# the very library that TensorFlow gets.
VARIANTS = {
    "plain": ("-O1",),
    "address": ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-O1", "-g1", "-fsanitize=thread"),
}
_FLAGS = ("-std=c++17", "-pthread", "-Wall", "-Wextra")
_SECONDS = 250
_WAIT = 1500  # for another process that compiles
_TESTS = Path(__file__).parent
_TEST = "_test.cc"
_FAKES = _TESTS / "fakes"  # libraries that replace others
# What the system knows the others by, where it matters whether one of them is loaded.
_SONAMES = {"nccl": "libnccl.so.2"}
_PREFIX = ("cpp/ranks.h", "cpp/values.h")
# Sources include headers of the core, and of the tests as "cpp/...".
_INCLUDE = ("-I.", f"-I{_TESTS.parent}")
_HEADERS = (".h", ".inc", ".cu")


@dataclass(frozen=True)
class Programs:
    """What has been compiled.

    Attributes:
        tests: the programs, by the names of their tests.
        fakes: the libraries that stand for others, by their names.
    """

    tests: dict[str, Path]
    fakes: dict[str, Path]


class Toolchain:
    """A compiler with one set of flags, and the folder that keeps what it has made.

    Args:
        flags: for compiling and for linking.
        cache: a folder, which may hold what was made before.
        library: the core, where it is not to be compiled with these flags, too.
        tensorflow: that the core is compiled for; the installed one by default.

    Attributes:
        compiler: its command.
    """

    def __init__(
        self,
        flags: Sequence[str],
        cache: Path,
        library: Path | None = None,
        tensorflow: TensorFlowPackage | None = None,
    ) -> None:
        found = compilers.find_compiler(NativeOptions.from_environment().compiler)
        # One ABI with the library.
        self._recipe = compilation.read_recipe(tensorflow or compilation.find_tensorflow())
        common = (*_FLAGS, *compilation.ARITHMETIC, *self._recipe.tensorflow.defines)
        self.compiler = found.command
        self._command = (*found.command, *common, *flags)
        self._version = found.version
        self._cache = cache
        self._library = library

    def problem(self) -> str:
        """Why programs made with these flags do not run here; empty where they do."""
        source = self._cache / "empty.cc"
        source.write_text("int main() {}\n")
        program = self._cache / f"empty-{_digest(*self._command)}"
        command = [*self._command, str(source), "-o", str(program)]
        for words in (command, [str(program)]):
            done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                return (done.stderr.strip() or f"{words[0]} fails").splitlines()[0]
        return ""

    def programs(self, names: Collection[str] = ()) -> Programs:
        """Makes programs of tests, from as many units at once as there are cores.

        Args:
            names: of the tests; all of them by default.
        """
        core = [compilation.SOURCE / path for path in self._recipe.core if not self._library]
        tests = sorted(path for path in _TESTS.glob("*.cc") if path.name != "on_gpu.cc")
        shared = core + [path for path in tests if not path.name.endswith(_TEST)]
        own = [path for path in tests if path.name.endswith(_TEST)]
        own = [path for path in own if not names or path.name.removesuffix(_TEST) in names]
        common = self._common()
        prefix = self._precompiled(common)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = list(pool.map(lambda path: self._compile(path, common, *prefix), own))
            made += pool.map(lambda path: self._compile(path, common), shared)
            objects = dict(zip(own + shared, made, strict=True))
            libraries = [objects[path] for path in shared]
            linked = list(pool.map(lambda path: self._link([objects[path], *libraries]), own))
            fakes = self._fakes(pool, common)
        tests = {p.name.removesuffix(_TEST): made for p, made in zip(own, linked, strict=True)}
        return Programs(tests, fakes)

    def library(self, source: Path) -> Path:
        """Makes a library of a unit from anywhere and the core, for flags with -fPIC."""
        common = self._common()
        core = [compilation.SOURCE / path for path in self._recipe.core if not self._library]
        units = [source, *core]
        with self._held("library"), ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(lambda path: self._compile(path, common), units))
            return self._link(objects, "-shared", "-ldl")

    def fakes(self) -> dict[str, Path]:
        """Makes the libraries that stand for others only; their names and paths."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return self._fakes(pool, self._common())

    def _common(self) -> str:
        # A unit depends on any header: they are few, and change seldom.
        folders = (compilation.SOURCE, _TESTS)
        headers = [p for f in folders for p in sorted(f.rglob("*")) if p.suffix in _HEADERS]
        return _digest(*self._command, self._version, *(path.read_bytes() for path in headers))

    def _fakes(self, pool: ThreadPoolExecutor, common: str) -> dict[str, Path]:
        sources = sorted(_FAKES.glob("*.cc"))
        with self._held("fakes"):
            made = list(pool.map(lambda path: self._compile_fake(path, common), sources))
        return {path.stem: library for path, library in zip(sources, made, strict=True)}

    def _held(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Has one process compile something; another one finds what it has made."""
        return store.held(self._cache.with_name(f"{self._cache.name}-{what}.lock"), _WAIT, print)

    def _precompiled(self, common: str) -> tuple[str, ...]:
        """Flags for what most tests include, compiled once: that takes half of a test's time."""
        header = self._cache / "prefix.h"
        header.write_text("".join(f'#include "{path}"\n' for path in _PREFIX))
        made = self._make("prefix.gch", common, *_INCLUDE, "-x", "c++-header", str(header))
        # The compiler looks for it beside the header, by this name.
        link = header.with_name("prefix.h.gch")
        link.unlink(missing_ok=True)
        link.symlink_to(made.name)
        return "-include", str(header)

    def _compile(self, path: Path, common: str, *flags: str) -> Path:
        own = path.is_relative_to(compilation.SOURCE)
        source = path.relative_to(compilation.SOURCE) if own else path
        name = "-".join(source.with_suffix(".o").parts if own else ("test", f"{path.stem}.o"))
        digest = _digest(common, path.read_bytes())
        return self._make(name, digest, *flags, *_INCLUDE, "-c", str(source))

    def _compile_fake(self, path: Path, common: str) -> Path:
        soname = _SONAMES.get(path.stem, path.stem)
        digest = _digest(common, path.read_bytes(), soname)
        words = (*_INCLUDE, "-fPIC", "-shared", f"-Wl,-soname,{soname}")
        return self._make(f"libfake{path.stem}.so", digest, *words, str(path))

    def _link(self, objects: Sequence[Path], *flags: str) -> Path:
        words = [*map(str, objects), *flags]
        if self._library:
            words += [str(self._library), f"-Wl,-rpath,{self._library.parent}"]
        name, _, _ = objects[0].name.rpartition(".o-")
        return self._make(name, _digest(*words), *words)

    def _make(self, name: str, digest: str, *words: str) -> Path:
        """Makes a file, instead of what other sources or flags made of that name."""
        made = self._cache / f"{name}-{digest}"
        if not made.exists():
            unfinished = made.with_name(f"{os.getpid()}-{made.name}")
            done = subprocess.run(
                [*self._command, *words, "-o", str(unfinished)],
                cwd=compilation.SOURCE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_SECONDS,
            )
            assert done.returncode == 0, done.stdout
            unfinished.rename(made)
            for old in self._cache.glob(f"{name}-*"):
                if old != made:
                    old.unlink(missing_ok=True)
        return made


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d\0" % len(data) + data)
    return digest.hexdigest()[:16]
