"""The program of a warm spare, a process that can become the replacement of a failed worker.

The spare imports the modules that workers need, and then waits for its task. The import of
TensorFlow takes seconds, so a replacement that has already imported it can train sooner. The
launcher starts this module with the environment variables that all workers have in common. If a
replacement is needed, the launcher sends the task: all environment variables of the worker, and its
stdin, stdout and stderr. Then this process runs the worker's program in the same way as `python -u
script.py` or `python -u -m module`.
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

# A spare pauses between imports, for this multiple of the CPU time that the imports have taken, to
# leave the CPU to the workers. It does not lower its priority instead, because without privileges
# it could not raise its priority again when it becomes a worker.
_PAUSES = 3.0


def main(arguments: Sequence[str]) -> None:
    """Runs the spare.

    Args:
        arguments: the descriptor of the socket that is connected to the launcher; the names of the
            modules to import, separated by commas; and the program with its arguments.
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
        sys.exit(1)  # The launcher is gone. An exit without a task must not count as a success.
    _take_over(descriptors)
    _strip_tracebacks()
    run(program)


class Pace:
    """A finder of modules that finds none, but pauses before each import.

    It must be the first finder in `sys.meta_path`.

    Args:
        control: the socket that is connected to the launcher. A pause ends when the socket is
            readable, because then the task has arrived.
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
    """Runs a program in this process, in the same way as the interpreter's command line.

    Args:
        program: a script, or `-m` and a module, followed by the program's arguments.
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
        # `run_path` adds this path to `sys.path`. The interpreter would add the absolute path.
        runpy.run_path(os.path.abspath(program[0]), run_name="__main__")
        return
    path = os.path.join(os.getcwd(), program[0])  # The interpreter sets the same `__file__`.
    script = ModuleType("__main__")
    values = {
        "__file__": path,
        "__cached__": None,
        "__builtins__": builtins,
        "__loader__": SourceFileLoader("__main__", path),
    }
    script.__dict__.update(values)
    # `runpy` would remove the module from `sys.modules` at the end of the script. But threads and
    # exit handlers that outlive the script need the module.
    sys.modules["__main__"] = script
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, script.__dict__)


def _is_source(path: str) -> bool:
    """Whether a program is a source file, not a folder, an archive or a `.pyc` file."""
    if os.path.isdir(path) or path.endswith(".pyc"):
        return False
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return True
    return False


def _set_path(program: Sequence[str]) -> None:
    """Sets the first entry of `sys.path` to the same folder as the interpreter would.

    For `-m`, this is the current folder. For a script, it is the folder of the script.
    """
    if sys.flags.safe_path:
        return
    if program[0].startswith("-m"):
        sys.path[0] = os.getcwd()
    elif _is_source(program[0]):
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    else:
        del sys.path[0]  # `runpy` will insert the path of the folder or archive.


def _take_over(descriptors: Sequence[int]) -> None:
    """Replaces the environment, stdin, stdout and stderr of this process with the worker's."""
    task, *streams = descriptors
    with open(task, encoding="utf-8") as file:
        environment = json.load(file)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)


def _strip_tracebacks() -> None:
    """Omits this module from the traceback that is shown if an exception ends the program."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own = {__file__, runpy.__file__, "<frozen runpy>"}
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


if __name__ == "__main__":
    main(sys.argv[1:])
