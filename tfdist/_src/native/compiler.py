"""The C++ compiler of this host."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tfdist._src.options import environment_of_programs
from tfdist.errors import NativeUnavailableError

NAMES = ("g++", "c++", "clang++")
_SECONDS = 30.0


@dataclass(frozen=True)
class Compiler:
    """A working compiler.

    Attributes:
        command: its command line.
        version: the first line of its --version output.
    """

    command: tuple[str, ...]
    version: str

    @property
    def key(self) -> str:
        """Eight characters that identify this compiler."""
        # "CXX=g++ -O1" is a different compiler than "CXX=g++".
        text = "\0".join((self.version, *self.command[1:]))
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def __str__(self) -> str:
        """Its name and version.

        Example:
            >>> str(Compiler(("/usr/bin/g++",), "g++ (Debian 12.2.0-14) 12.2.0"))
            'g++ 12.2.0'
        """
        numbers = re.findall(r"(?<![\w.-])\d+\.\d+(?:\.\d+)?", self.version)
        name = Path(self.command[0]).name
        return f"{name} {numbers[-1]}" if numbers else name


def find(setting: str = "", names: tuple[str, ...] = NAMES) -> Compiler:
    """Finds a compiler.

    Args:
        setting: the command chosen by the user, with its arguments; "" for none.
        names: the commands to try otherwise, in order of preference.

    Raises:
        NativeUnavailableError: no compiler is found, or the chosen one does not work.
    """
    command = _words(setting)
    if not command:
        command = next(([name] for name in names if shutil.which(name)), [])
    if not command:
        raise NativeUnavailableError(
            f"No C++ compiler was found (looked for {', '.join(names)}). Install one (Debian: "
            f"apt-get install g++; conda: gxx_linux-64 and CXX), or run tfdist build "
            f"--into-package on a host that has one and install a wheel built there."
        )
    try:
        done = subprocess.run(
            [*command, "--version"],
            env=environment_of_programs(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
        problem = "" if done.returncode == 0 else _last(done.stderr) or f"code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        origin = "given by CXX" if setting else "found in PATH"
        raise NativeUnavailableError(
            f"The C++ compiler {shlex.join(command)}, {origin}, does not work: --version "
            f"failed ({problem}). Set CXX to a working compiler."
        )
    return Compiler(tuple(command), done.stdout.partition("\n")[0])


def _words(setting: str) -> list[str]:
    try:
        return shlex.split(setting)
    except ValueError as error:
        raise NativeUnavailableError(
            f"CXX is not a command ({error}). Received: {setting!r}. Set it to a C++ compiler, or "
            f"unset it."
        ) from error


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
