"""The function or script that the workers run, and the way in which its result is returned."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

FUNCTION, RESULT = "function.pickle", "result.pickle"


@dataclass(frozen=True)
class WorkerProgram:
    """The function or script that workers run.

    Attributes:
        function: a pickled function with its arguments; None for a script.
        script: a script's path, then its arguments.
    """

    function: bytes | None
    script: tuple[str, ...] = ()

    @classmethod
    def made(
        cls, train: Callable[..., Any] | str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> WorkerProgram:
        """Makes a program from the user's arguments.

        Raises:
            ValueError: the function cannot be pickled, the script does not exist, or keyword
                arguments are given for a script.
        """
        if not isinstance(train, str):
            return cls(_pickled((train, args, kwargs)))
        if kwargs:
            raise ValueError(f"A script takes no keyword arguments. Received: {', '.join(kwargs)}")
        if not os.path.isabs(train) and not os.path.exists(train):
            raise ValueError(f"There is no script {train!r} in {os.getcwd()}")
        # The path must be absolute, because the workers have another working directory.
        return cls(None, (os.path.abspath(train), *map(str, args)))

    def command(self, folder: Path) -> list[str]:
        """The arguments of the Python interpreter that runs the program.

        Args:
            folder: the folder for the function and its result.
        """
        if self.function is None:
            return list(self.script)
        (folder / FUNCTION).write_bytes(self.function)
        return ["-m", "tfdist._src.spark.worker", str(folder)]

    def saved_result(self, folder: Path) -> bytes:
        """The function's return value, pickled; b"" if there is none, as for a script."""
        path = folder / RESULT
        return path.read_bytes() if path.exists() else b""

    def result(self, saved: bytes) -> Any:
        """Unpickles rank 0's return value."""
        return pickle.loads(saved) if saved else None


def _pickled(call: Any) -> bytes:
    try:
        return bytes(cloudpickle.dumps(call))
    except Exception as error:  # Pickling an object may raise any exception.
        raise ValueError(
            "The function is sent to the workers, with its arguments and the global variables that "
            f"it uses, and one of them cannot be sent ({error}): create datasets, models and locks "
            "inside the function"
        ) from error
