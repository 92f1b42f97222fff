"""The function or the script that workers run, on its way to them, and its result."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import cloudpickle

FUNCTION, RESULT = "function.pickle", "result.pickle"


@dataclass(frozen=True)
class Program:
    """What workers run.

    Attributes:
        function: a pickled function with its arguments; None for a script.
        script: a script's path, then its arguments.
    """

    function: bytes | None
    script: tuple[str, ...] = ()

    @classmethod
    def made(
        cls, train: Callable[..., Any] | str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Program:
        """From what a user has passed.

        Raises:
            ValueError: keyword arguments are given for a script.
        """
        if not isinstance(train, str):
            return cls(cloudpickle.dumps((train, args, kwargs)))
        if kwargs:
            raise ValueError(f"A script takes no keyword arguments. Received: {', '.join(kwargs)}")
        return cls(None, (train, *map(str, args)))

    def command(self, folder: Path) -> list[str]:
        """The arguments of the Python interpreter that runs it.

        Args:
            folder: where the function and its result are kept.
        """
        if self.function is None:
            return list(self.script)
        (folder / FUNCTION).write_bytes(self.function)
        return ["-m", "tfdist.spark.worker", str(folder)]

    def saved_result(self, folder: Path) -> bytes:
        """What rank 0 has returned, pickled; b"" for a script, or if the function has ended it."""
        path = folder / RESULT
        return path.read_bytes() if path.exists() else b""

    def result(self, saved: bytes) -> Any:
        """What rank 0 has returned."""
        return pickle.loads(saved) if saved else None
