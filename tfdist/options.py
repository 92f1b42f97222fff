"""Settings from the environment: the only reader of TFDIST_* variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Options:
    """What a user can set through the environment, each field by `TFDIST_<FIELD>`.

    Attributes:
        start_timeout: seconds to wait for all workers at the start (`TFDIST_START_TIMEOUT`).
        collective_timeout: seconds that one collective may wait for the other workers
            (`TFDIST_COLLECTIVE_TIMEOUT`); a slow evaluation or checkpoint on one worker must fit.
        heartbeat_timeout: seconds without a sign of life after which a worker counts as lost
            (`TFDIST_HEARTBEAT_TIMEOUT`).

    Example:
        >>> Options.from_environment({"TFDIST_START_TIMEOUT": "60"}).start_timeout
        60.0
    """

    start_timeout: float = 300.0
    collective_timeout: float = 600.0
    heartbeat_timeout: float = 60.0

    @classmethod
    def from_environment(cls, environment: dict[str, str] | None = None) -> Options:
        """Reads the variables that are set.

        Args:
            environment: where to read; this process's environment by default.

        Raises:
            ValueError: a value is not a positive number.
        """
        source = os.environ if environment is None else environment
        values = {}
        for field in fields(cls):
            name = f"TFDIST_{field.name.upper()}"
            if text := source.get(name):
                values[field.name] = _seconds(name, text)
        return cls(**values)


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(
            f"{name} must be a positive number of seconds. Received: {text!r}. "
            f"Set it to a number, or unset it to take the default."
        )
    return value
