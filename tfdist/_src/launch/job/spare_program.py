"""The program of a warm spare: imports the workers' modules, waits for its task, becomes a worker.

Importing TensorFlow takes seconds; a replacement that skips the import trains sooner. The launcher
starts this module with the workers' common environment, and later sends a task: the environment and
the three standard streams of the worker. The program then runs as with `python -u script.py` or
`python -u -m module`.
"""

import builtins
import importlib
import io
import json
import os
import runpy
import select
import socket
import sys
import time
import zipimport
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

# The spare imports for a quarter of the time, and pauses for the rest, to leave the processor to
# the workers. It does not lower its priority instead, because it could not raise the priority again
# without privileges when it becomes a worker.
_PAUSES = 3.0


def main(arguments: Sequence[str]) -> None:
    """Runs the spare.

    Args:
        arguments: the number of the socket descriptor to the launcher; the names of the modules to
            import, separated by commas; the program and its arguments.
    """
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    modules, program = arguments[1], list(arguments[2:])
    _set_path(program)
    pace = Pace(control)
    sys.meta_path.insert(0, pace)
    for name in filter(None, modules.split(",")):
        importlib.import_module(name)
    sys.meta_path.remove(pace)
    try:
        control.send(b"r")
    except BrokenPipeError:
        pass  # The launcher has already sent the task and closed its end.
    data, descriptors, _, _ = socket.recv_fds(control, 1, 4)
    control.close()
    if not data:
        sys.exit(1)  # The launcher is gone. Without a task, the exit must not count as a success.
    _take_over(descriptors)
    _strip_tracebacks()
    run(program)


class Pace:
    """The first finder of `sys.meta_path`: finds nothing, but pauses between imports.

    Args:
        control: the socket to the launcher. Pauses end when it is readable, since this means that
            the task has arrived.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._used = time.process_time()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Pauses before an import."""
        pause = (time.process_time() - self._used) * _PAUSES
        if pause > 0.01:
            select.select([self._control], [], [], pause)
            self._used = time.process_time()


def run(program: Sequence[str]) -> None:
    """Runs a program as the interpreter would.

    Args:
        program: a script, or `-m` and a module, then the arguments.
    """
    if program[0].startswith("-m"):
        name, arguments = program[0][2:], program[1:]
        if not name:
            name, arguments = program[1], program[2:]
        sys.argv = [name, *arguments]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.argv = list(program)
    if not _is_source(program[0]):
        # The absolute path, as the interpreter puts it in `sys.path`.
        runpy.run_path(os.path.abspath(program[0]), run_name="__main__")
        return
    path = os.path.join(os.getcwd(), program[0])  # As the interpreter does.
    script = ModuleType("__main__")
    values = {
        "__file__": path,
        "__cached__": None,
        "__builtins__": builtins,
        "__loader__": SourceFileLoader("__main__", path),
    }
    script.__dict__.update(values)
    # Unlike with `runpy`, the module stays there, since threads and exit handlers that outlive the
    # script need it.
    sys.modules["__main__"] = script
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, script.__dict__)


def _is_source(path: str) -> bool:
    """Whether a program is a source file, rather than a folder or an archive."""
    if os.path.isdir(path) or path.endswith(".pyc"):
        return False
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return True
    return False


def _set_path(program: Sequence[str]) -> None:
    """Sets the first entry of `sys.path` as the interpreter would; for `-m`, the current folder."""
    if sys.flags.safe_path:
        return
    if program[0].startswith("-m"):
        sys.path[0] = os.getcwd()
    elif _is_source(program[0]):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    else:
        del sys.path[0]  # `runpy` puts the folder or the archive there.


def _take_over(descriptors: Sequence[int]) -> None:
    """Becomes the worker: takes over its environment, stdin, stdout and stderr."""
    task, *streams = descriptors
    with open(task, encoding="utf-8") as file:
        environment = json.load(file)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)


def _strip_tracebacks() -> None:
    """Removes this module from the traceback of an exception that ends the program."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = {__file__, runpy.__file__, "<frozen runpy>"}
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


if __name__ == "__main__":
    main(sys.argv[1:])
