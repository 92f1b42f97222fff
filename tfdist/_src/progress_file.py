"""Shared memory in which a worker reports its steps and its final exception to the launcher.

The launcher creates this memory, and reads it after the worker has ended for any reason. The first
process that opens the memory owns it, so that child processes of the worker do not write to the
memory. The memory starts with the owner's process ID and the number of steps, 8 bytes each. The
exception that ended the process follows, as JSON preceded by its length.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass

SIZE = 4096
_OWNER = struct.Struct("=q")
_STEPS = struct.Struct("=q")
_LENGTH = struct.Struct("=q")
_STEPS_AT = _OWNER.size
_LENGTH_AT = _STEPS_AT + _STEPS.size
_TEXT_AT = _LENGTH_AT + _LENGTH.size
_MAX_MESSAGE = 300
_MAX_NAME = 80
_MAX_NAMES = 12


@dataclass(frozen=True)
class UncaughtException:
    """An exception that no code has caught.

    Attributes:
        classes: the names of the exception's class and of its base classes, without the names of
            modules.
        chained: the names of the classes of the chained exceptions (`__cause__` and `__context__`).
        message: the first line of the exception's message.

    Example:
        >>> UncaughtException.from_exception(ModuleNotFoundError("No module named 'x'")).classes
        ('ModuleNotFoundError', 'ImportError')
    """

    classes: tuple[str, ...]
    chained: tuple[str, ...] = ()
    message: str = ""

    @classmethod
    def from_exception(cls, error: BaseException) -> UncaughtException:
        """Extracts the fields from an exception."""
        general = (Exception, BaseException, object)
        classes = [kind.__name__ for kind in type(error).__mro__ if kind not in general]
        lines = str(error).strip().splitlines()
        return cls(
            classes=_short(classes or [type(error).__name__]),
            chained=_short([type(other).__name__ for other in _chain(error)]),
            message=lines[0][:_MAX_MESSAGE] if lines else "",
        )

    def __str__(self) -> str:
        """Returns the name of the class and the message."""
        return ": ".join(filter(None, (self.classes[0], self.message)))


@dataclass(frozen=True)
class Progress:
    """The progress that a worker has written to the memory.

    Attributes:
        steps: the number of training steps that the job had completed, including the steps of
            earlier processes; None if the worker has not reported a step.
        raised: the exception that ended the worker, if any.
    """

    steps: int | None = None
    raised: UncaughtException | None = None

    @classmethod
    def from_bytes(cls, data: bytes) -> Progress:
        """Reads the progress from the memory. An invalid value counts as not written."""
        if len(data) < SIZE:
            return cls()
        (steps,) = _STEPS.unpack_from(data, _STEPS_AT)
        (length,) = _LENGTH.unpack_from(data, _LENGTH_AT)
        raised = None
        if 0 < length <= SIZE - _TEXT_AT:
            try:
                fields = json.loads(data[_TEXT_AT : _TEXT_AT + length])
                classes = tuple(str(name) for name in fields["classes"])
                chained = tuple(str(name) for name in fields["chained"])
                raised = (
                    UncaughtException(classes, chained, str(fields["message"])) if classes else None
                )
            except (ValueError, KeyError, TypeError):
                pass
        return cls(steps if steps > 0 else None, raised)


class ProgressFile:
    """Writes the progress of this worker to the memory, without system calls.

    Args:
        path: the path of the memory, which the worker gets from its launcher (`progress_path`).

    Raises:
        OSError: the memory cannot be opened, or belongs to another process.
    """

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != SIZE:
                raise OSError(f"{path} is not the memory of a launcher")
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        (owner,) = _OWNER.unpack_from(self._memory, 0)
        if owner not in (0, os.getpid()):
            raise OSError(f"{path} belongs to process {owner}")
        _OWNER.pack_into(self._memory, 0, os.getpid())

    def count(self, steps: int) -> None:
        """Writes the number of steps that the job has completed."""
        _STEPS.pack_into(self._memory, _STEPS_AT, steps)

    def ended_by(self, error: BaseException) -> None:
        """Writes the exception that is ending this process."""
        text = json.dumps(asdict(UncaughtException.from_exception(error))).encode()
        if len(text) <= SIZE - _TEXT_AT:
            self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text
            _LENGTH.pack_into(self._memory, _LENGTH_AT, len(text))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the exceptions that led to an exception, in the order of the chain."""
    seen = {id(error)}
    while True:
        behind = error.__cause__
        if behind is None and not error.__suppress_context__:
            behind = error.__context__
        if behind is None or id(behind) in seen:
            return
        seen.add(id(behind))
        error = behind
        yield error


def _short(names: list[str]) -> tuple[str, ...]:
    return tuple(name[:_MAX_NAME] for name in names[:_MAX_NAMES])
