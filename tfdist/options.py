"""Settings from the environment: the only reader of TFDIST_* variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """What a user can set through the environment, each field by `TFDIST_<FIELD>`.

    Attributes:
        start_timeout: seconds to wait for all workers at the start (`TFDIST_START_TIMEOUT`).
        collective_timeout: seconds that one collective may wait for the other workers
            (`TFDIST_COLLECTIVE_TIMEOUT`); a slow evaluation or checkpoint on one worker must fit.
        heartbeat_timeout: seconds without a sign of life after which a worker counts as lost
            (`TFDIST_HEARTBEAT_TIMEOUT`).
        link_timeout: seconds without a sign of life from a worker's native core after which it
            counts as lost (`TFDIST_LINK_TIMEOUT`), though its connection stands; the core answers
            while Python is busy.
        silence_warning: seconds without a sign of life from a worker's native core after which a
            warning names it (`TFDIST_SILENCE_WARNING`).
        stall_warning: seconds in one native collective, or in an exchange of the session, after
            which a warning names those that have not joined it (`TFDIST_STALL_WARNING`).
        algorithm: how the native core reduces (`TFDIST_ALGORITHM`): auto, shared, whole, direct,
            ring or hierarchical; "" chooses by size, ranks and hosts.
        secret: what every worker of the job has to know (`TFDIST_SECRET`); "" for none. It stands
            in no message and no repr.
        host: the name of this worker's machine for sharing memory (`TFDIST_HOST`): workers with
            the same one share, others do not. By default the system tells.
        tls_certificate: the PEM file with this worker's certificate (`TFDIST_TLS_CERTIFICATE`);
            with the next two it switches TLS on between the workers, "" for none.
        tls_key: the PEM file with the certificate's private key (`TFDIST_TLS_KEY`).
        tls_ca: the PEM file with the certificate of the CA that signs those of all workers
            (`TFDIST_TLS_CA`).

    Example:
        >>> Options.from_environment({"TFDIST_START_TIMEOUT": "60"}).start_timeout
        60.0
    """

    start_timeout: float = 300.0
    collective_timeout: float = 600.0
    heartbeat_timeout: float = 60.0
    link_timeout: float = 60.0
    silence_warning: float = 5.0
    stall_warning: float = 30.0
    algorithm: str = ""
    secret: str = field(default="", repr=False)
    host: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""

    def __post_init__(self) -> None:
        named = {
            "TFDIST_TLS_CERTIFICATE": self.tls_certificate,
            "TFDIST_TLS_KEY": self.tls_key,
            "TFDIST_TLS_CA": self.tls_ca,
        }
        missing = [name for name, path in named.items() if not path]
        if 0 < len(missing) < len(named):
            raise ValueError(
                f"TLS needs {', '.join(named)}. Received: no {' and no '.join(missing)}. Set all "
                f"three, or none."
            )

    @property
    def tls(self) -> bool:
        """Whether the workers speak TLS with one another."""
        return bool(self.tls_ca)

    @classmethod
    def from_environment(cls, environment: dict[str, str] | None = None) -> Options:
        """Reads the variables that are set.

        Args:
            environment: where to read; this process's environment by default.

        Raises:
            ValueError: a number of seconds is not a positive number, or only a part of what TLS
                needs is set.
        """
        source = os.environ if environment is None else environment
        values: dict[str, Any] = {}
        for setting in fields(cls):
            name = f"TFDIST_{setting.name.upper()}"
            if text := source.get(name):
                is_text = isinstance(setting.default, str)
                values[setting.name] = text if is_text else _seconds(name, text)
        return cls(**values)


@dataclass(frozen=True)
class NativeOptions:
    """What a user can set about the native collectives.

    Attributes:
        enabled: whether they may be used (`TFDIST_NATIVE`, 1 or 0).
        cache: the folder for what is compiled on this machine (`TFDIST_CACHE`, by default
            `$XDG_CACHE_HOME/tfdist` or `~/.cache/tfdist`); None where there is no home folder.
        compiler: the C++ compiler's command (`CXX`); "" to look for one.
        vector_unit: what the core computes with (`TFDIST_VECTOR_UNIT`): baseline, avx2 or avx512;
            "" chooses the best that the processor has.

    Example:
        >>> NativeOptions.from_environment({"TFDIST_CACHE": "/scratch/me", "CXX": "clang++"})
        NativeOptions(enabled=True, cache=PosixPath('/scratch/me'), compiler='clang++', vector_unit='')
    """

    enabled: bool = True
    cache: Path | None = None
    compiler: str = ""
    vector_unit: str = ""

    @classmethod
    def from_environment(cls, environment: dict[str, str] | None = None) -> NativeOptions:
        """Reads the variables that are set.

        Args:
            environment: where to read; this process's environment by default.

        Raises:
            ValueError: `TFDIST_NATIVE` is neither 0 nor 1.
        """
        source = os.environ if environment is None else environment
        switch = source.get("TFDIST_NATIVE") or "1"
        if switch not in ("0", "1"):
            raise ValueError(
                f"TFDIST_NATIVE must be 0 or 1. Received: {switch!r}. "
                f"Set it to 0 for TensorFlow's collectives, or unset it to take the default."
            )
        return cls(
            enabled=switch == "1",
            cache=_cache(source),
            compiler=source.get("CXX", "").strip(),
            vector_unit=source.get("TFDIST_VECTOR_UNIT", "").strip(),
        )


def _cache(source: Mapping[str, str]) -> Path | None:
    home = source.get("HOME") or os.path.expanduser("~")
    if chosen := source.get("TFDIST_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = source.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "tfdist"
    # Without a home folder, "~" stays as it is.
    return Path(home) / ".cache" / "tfdist" if os.path.isabs(home) else None


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
