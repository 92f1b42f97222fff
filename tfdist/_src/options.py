"""Settings from the environment, the names of all TFDIST_* variables, and exit codes.

Other modules refer to the variables by these constants, and spell the names in messages only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

PREFIX = "TFDIST_"
"""The prefix of the names of all environment variables."""


class Variable:
    """The names of the settings, which docs/guide/settings.md describes."""

    START_TIMEOUT = "TFDIST_START_TIMEOUT"
    WORKERS = "TFDIST_WORKERS"
    SERVICE = "TFDIST_SERVICE"
    HOST = "TFDIST_HOST"
    COLLECTIVE_TIMEOUT = "TFDIST_COLLECTIVE_TIMEOUT"
    STALL_WARNING = "TFDIST_STALL_WARNING"
    HEARTBEAT_TIMEOUT = "TFDIST_HEARTBEAT_TIMEOUT"
    SILENCE_WARNING = "TFDIST_SILENCE_WARNING"
    SECRET = "TFDIST_SECRET"
    SECURITY = "TFDIST_SECURITY"
    TLS_CERTIFICATE = "TFDIST_TLS_CERTIFICATE"
    TLS_KEY = "TFDIST_TLS_KEY"
    TLS_CA = "TFDIST_TLS_CA"
    NATIVE = "TFDIST_NATIVE"
    CACHE = "TFDIST_CACHE"
    ALGORITHM = "TFDIST_ALGORITHM"
    VECTOR_UNIT = "TFDIST_VECTOR_UNIT"
    DEVICE_ALGORITHM = "TFDIST_DEVICE_ALGORITHM"
    DEVICE_BUFFERS = "TFDIST_DEVICE_BUFFERS"
    CUDA_LIBRARY = "TFDIST_CUDA_LIBRARY"
    NCCL_LIBRARY = "TFDIST_NCCL_LIBRARY"
    BATCH_STATISTICS = "TFDIST_BATCH_STATISTICS"
    SAVE = "TFDIST_SAVE"
    XLA = "TFDIST_XLA"
    FLIGHT_DIR = "TFDIST_FLIGHT_DIR"
    METRICS_PORT = "TFDIST_METRICS_PORT"
    METRICS_HOST = "TFDIST_METRICS_HOST"
    LOG_LEVEL = "TFDIST_LOG_LEVEL"


TLS_VARIABLES = (Variable.TLS_CERTIFICATE, Variable.TLS_KEY, Variable.TLS_CA)
"""The variables with the paths of TLS files. A job sets all of them or none."""


class InternalVariable:
    """The names of variables that tfdist sets for processes that it starts; not settings.

    Attributes:
        GENERATION: see `LauncherOptions`.
        ELASTIC: see `LauncherOptions`.
        WITNESS: see `LauncherOptions`.
        PROGRESS_FILE: see `progress_path`.
        SPARK_ROWS: the path and schema of a Spark worker's rows, and the lengths of their arrays.
    """

    GENERATION = "TFDIST_GENERATION"
    ELASTIC = "TFDIST_ELASTIC"
    WITNESS = "TFDIST_WITNESS"
    PROGRESS_FILE = "TFDIST_PROGRESS_FILE"
    SPARK_ROWS = "TFDIST_SPARK_ROWS"


USAGE_ERROR = 2
"""The exit code of a command with invalid arguments."""

PREEMPTED = 75
"""The exit code of a worker or a job that has saved its state and stopped on request (EX_TEMPFAIL).
It is not a failure: start the job again elsewhere."""

SIGNAL_BASE = 128
"""A command that a signal stopped exits with this number plus the number of the signal."""

_SECURITY = ("warn", "required", "none")
_ALGORITHMS = ("auto", "shm", "one_shot", "two_shot", "ring", "hierarchical")
_DEVICE_ALGORITHMS = ("p2p", "nccl", "host", "by_size")
_BATCH_STATISTICS = ("global", "replica")
_SAVE = ("all", "chief")
_VECTOR_UNITS = ("baseline", "avx2", "avx512")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class LauncherOptions:
    """Variables that the launcher sets for its workers.

    Attributes:
        generation: the number of times that the launcher has restarted the job
            (`TFDIST_GENERATION`).
        elastic: whether the launcher replaces a failed worker while the others continue
            (`TFDIST_ELASTIC`, 1 or 0).
        witness: the address at which the launcher of this worker's host reports its dead workers
            to the workers of other hosts (`TFDIST_WITNESS`); "" for none.

    Example:
        >>> LauncherOptions.from_environment({"TFDIST_GENERATION": "2"}).generation
        2
    """

    generation: int = 0
    elastic: bool = False
    witness: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherOptions:
        """Reads the variables that are set.

        Raises:
            ValueError: `TFDIST_GENERATION` or `TFDIST_ELASTIC` is invalid.
        """
        return cls(**_read(cls, InternalVariable, environment))


@dataclass(frozen=True)
class Options:
    """Settings from the environment; `TFDIST_<FIELD>` sets each field.

    Attributes:
        start_timeout: seconds to wait for all workers at startup (`TFDIST_START_TIMEOUT`).
        collective_timeout: seconds that one collective may wait for the other workers without
            progress (`TFDIST_COLLECTIVE_TIMEOUT`); must exceed a slow evaluation or checkpoint on
            one worker.
        heartbeat_timeout: seconds without a sign of life after which a worker is considered lost,
            even though its connections are open (`TFDIST_HEARTBEAT_TIMEOUT`).
        silence_warning: seconds without a heartbeat from a worker's native core after which a
            warning names the worker (`TFDIST_SILENCE_WARNING`).
        stall_warning: seconds that a native collective or a session exchange may take before a
            warning names the workers that have not joined it (`TFDIST_STALL_WARNING`).
        algorithm: the native all-reduce algorithm (`TFDIST_ALGORITHM`): auto, shm, one_shot,
            two_shot, ring or hierarchical; "" selects by size, ranks and hosts.
        device_algorithm: how gradients on GPUs are summed (`TFDIST_DEVICE_ALGORITHM`): p2p, by
            tfdist's kernels, which read the memory of other GPUs; nccl; host, through the host's
            memory; or by_size, p2p up to 256 KiB and nccl above; "" measures which is faster.
        device_buffers: bytes of each of a GPU's two staging buffers (`TFDIST_DEVICE_BUFFERS`); 0
            for 8 MiB.
        cuda_library: the GPU's driver (`TFDIST_CUDA_LIBRARY`); "" for the system's.
        nccl_library: the NCCL to use (`TFDIST_NCCL_LIBRARY`); "" for TensorFlow's.
        secret: the secret shared by all workers of the job (`TFDIST_SECRET`); "" for none. It
            appears in no message and no repr.
        security: the response to a job on several hosts that has neither a secret nor TLS
            (`TFDIST_SECURITY`): warn (the default), required for an error, or none for silence.
        host: the name of this worker's host (`TFDIST_HOST`); workers share memory only if they have
            the same host name. Detected by default.
        flight_dir: the directory for the flight log that this worker writes on errors, stalls and
            SIGUSR1 (`TFDIST_FLIGHT_DIR`); "" for none.
        metrics_port: the port for Prometheus metrics of the first worker of each host
            (`TFDIST_METRICS_PORT`); the host's other workers use the following ports. 0 for none.
        metrics_host: the address at which metrics are served (`TFDIST_METRICS_HOST`).
        xla: whether XLA may compile the steps of models (`TFDIST_XLA`, 1 or 0); if not,
            `jit_compile` counts as False.
        batch_statistics: the rows from which `BatchNormalization` computes statistics in training
            (`TFDIST_BATCH_STATISTICS`), if a strategy does not specify them: global, the whole
            batch, or replica, each replica's own rows.
        save: the workers that write model files (`TFDIST_SAVE`): the chief and all workers that do
            not see its files, or the chief only.
        log_level: the least severe messages of the logger "tfdist" (`TFDIST_LOG_LEVEL`): debug,
            info, warning or error, in upper or lower case.
        tls_certificate: PEM file with this worker's certificate (`TFDIST_TLS_CERTIFICATE`);
            together with the next two it enables TLS between the workers. "" for none.
        tls_key: PEM file with the certificate's private key (`TFDIST_TLS_KEY`).
        tls_ca: PEM file with the certificate of the CA that signs the certificates of all workers
            (`TFDIST_TLS_CA`).
        launcher: the variables that the launcher sets.

    Example:
        >>> Options.from_environment({"TFDIST_START_TIMEOUT": "60"}).start_timeout
        60.0
    """

    start_timeout: float = 300.0
    collective_timeout: float = 600.0
    heartbeat_timeout: float = 60.0
    silence_warning: float = 5.0
    stall_warning: float = 30.0
    algorithm: str = ""
    device_algorithm: str = ""
    device_buffers: int = 0
    cuda_library: str = ""
    nccl_library: str = ""
    secret: str = field(default="", repr=False)
    security: str = "warn"
    host: str = ""
    flight_dir: str = ""
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    xla: bool = True
    batch_statistics: str = "global"
    save: str = "all"
    log_level: str = "info"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    launcher: LauncherOptions = LauncherOptions()

    def __post_init__(self) -> None:
        _check_choice(Variable.SECURITY, self.security, _SECURITY)
        _check_choice(Variable.BATCH_STATISTICS, self.batch_statistics, _BATCH_STATISTICS)
        _check_choice(Variable.SAVE, self.save, _SAVE)
        _check_choice(Variable.LOG_LEVEL, self.log_level, _LOG_LEVELS)
        _check_choice(Variable.ALGORITHM, self.algorithm, ("", *_ALGORITHMS))
        _check_choice(Variable.DEVICE_ALGORITHM, self.device_algorithm, ("", *_DEVICE_ALGORITHMS))
        if self.device_buffers and (self.device_buffers < 4096 or self.device_buffers % 16):
            raise ValueError(
                "TFDIST_DEVICE_BUFFERS must be a multiple of 16 bytes, at least 4096. Received: "
                f"{self.device_buffers}. Unset it to use the default."
            )
        paths = {
            Variable.TLS_CERTIFICATE: self.tls_certificate,
            Variable.TLS_KEY: self.tls_key,
            Variable.TLS_CA: self.tls_ca,
        }
        missing = [name for name, path in paths.items() if not path]
        if 0 < len(missing) < len(paths):
            raise ValueError(
                f"TLS needs {', '.join(paths)}. Received: no {' and no '.join(missing)}. Set all "
                f"three, or none."
            )

        if self.tls and self.device_algorithm == "nccl":
            raise ValueError(
                "TFDIST_DEVICE_ALGORITHM=nccl would send in the clear, and TLS is set. Unset one."
            )

    @property
    def tls(self) -> bool:
        """Whether the workers use TLS."""
        return bool(self.tls_ca)

    @classmethod
    def from_environment(cls, environment: dict[str, str] | None = None) -> Options:
        """Reads the variables that are set.

        Args:
            environment: variables to read; this process's environment by default.

        Raises:
            ValueError: a number of seconds is not positive, a port, a switch or the generation is
                invalid, or only some of the TLS variables are set.
        """
        source = os.environ if environment is None else environment
        return cls(
            **_read(cls, Variable, source), launcher=LauncherOptions.from_environment(source)
        )


def xla_processor_limit(environment: Mapping[str, str] | None = None) -> str:
    """Returns the flag that makes XLA compile for older processors; "" if it is not set.

    Args:
        environment: variables to read; this process's environment by default.

    Example:
        >>> xla_processor_limit({"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"})
        '--xla_cpu_max_isa=AVX2'
    """
    source = os.environ if environment is None else environment
    flags = source.get("XLA_FLAGS", "").split()
    return next((flag for flag in reversed(flags) if "xla_cpu_max_isa" in flag), "")


@dataclass(frozen=True)
class NativeOptions:
    """Settings of the native collectives.

    Attributes:
        enabled: whether they may be used (`TFDIST_NATIVE`, 1 or 0).
        cache: folder for compiled libraries (`TFDIST_CACHE`, by default `$XDG_CACHE_HOME/tfdist` or
            `~/.cache/tfdist`); None without a home folder.
        compiler: the C++ compiler command (`CXX`); "" to search for one.
        vector_unit: the vector instructions that the core uses (`TFDIST_VECTOR_UNIT`): baseline,
            avx2 or avx512; "" selects the best that the processor has.

    Example:
        >>> NativeOptions.from_environment({Variable.CACHE: "/scratch/me"}).cache
        PosixPath('/scratch/me')
    """

    enabled: bool = True
    cache: Path | None = None
    compiler: str = ""
    vector_unit: str = ""

    def __post_init__(self) -> None:
        _check_choice(Variable.VECTOR_UNIT, self.vector_unit, ("", *_VECTOR_UNITS))

    @classmethod
    def from_environment(cls, environment: dict[str, str] | None = None) -> NativeOptions:
        """Reads the variables that are set.

        Args:
            environment: variables to read; this process's environment by default.

        Raises:
            ValueError: `TFDIST_NATIVE` is neither 0 nor 1.
        """
        source = os.environ if environment is None else environment
        switch = source.get(Variable.NATIVE) or "1"
        if switch not in ("0", "1"):
            raise ValueError(
                f"TFDIST_NATIVE must be 0 or 1. Received: {switch!r}. "
                f"Set it to 0 for TensorFlow's collectives, or unset it to use the default."
            )
        return cls(
            enabled=switch == "1",
            cache=_cache(source),
            compiler=source.get("CXX", "").strip(),
            vector_unit=source.get(Variable.VECTOR_UNIT, "").strip(),
        )


def log_level() -> str:
    """The level of the logger (`TFDIST_LOG_LEVEL`), which is needed before all settings are read.

    Raises:
        ValueError: the level is invalid.
    """
    level = os.environ.get(Variable.LOG_LEVEL, "").lower() or Options.log_level
    _check_choice(Variable.LOG_LEVEL, level, _LOG_LEVELS)
    return level


def progress_path() -> str:
    """The path of the memory that the launcher has made for this worker (`TFDIST_PROGRESS_FILE`).

    Not a field of `Options`, because a worker needs it even if another setting is invalid, to
    report that error to the launcher.
    """
    return os.environ.get(InternalVariable.PROGRESS_FILE, "")


def environment_of_programs() -> dict[str, str]:
    """Returns the environment for the programs that this process starts.

    It contains `PATH` even if this process has no `PATH`, because a compiler uses `PATH` to find
    its own programs.
    """
    return {"PATH": os.defpath, **os.environ}


def _read(options: type, names: type, source: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of those fields of a dataclass for which a variable is set."""
    values = {}
    for setting in fields(options):
        name = getattr(names, setting.name.upper(), "")
        if text := source.get(name):
            read = _OTHER_READERS.get(setting.name) or _READERS[type(setting.default)]
            values[setting.name] = read(name, text)
    return values


def _cache(source: Mapping[str, str]) -> Path | None:
    home = source.get("HOME") or os.path.expanduser("~")
    if chosen := source.get(Variable.CACHE):
        return Path(chosen).expanduser().absolute()
    base = source.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "tfdist"
    # Without a home folder, "~" is left unexpanded.
    return Path(home) / ".cache" / "tfdist" if os.path.isabs(home) else None


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice)
        raise ValueError(
            f"{name} must be one of {known}. Received: {value!r}. Set it to one of them, or unset "
            f"it to use the default."
        )


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(
            f"{name} must be a positive number of seconds. Received: {text!r}. "
            f"Set it to a number, or unset it to use the default."
        )
    return value


def _port(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 16):
        raise ValueError(
            f"{name} must be a port from 1 to 65535. Received: {text!r}. "
            f"Set it to a free port, or unset it."
        )
    return int(text)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name} must be an integer >= 0. Received: {text!r}. Unset it.")
    return int(text)


def _switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1. Received: {text!r}. Unset it.")
    return text == "1"


def _lower(name: str, text: str) -> str:
    return text.lower()


def _text(name: str, text: str) -> str:
    return text


# By the type of a setting.
_READERS: dict[type, Callable[[str, str], Any]] = {
    str: _text,
    float: _seconds,
    int: _port,
    bool: _switch,
}
# By name, if the type is not sufficient.
_OTHER_READERS: dict[str, Callable[[str, str], Any]] = {
    "generation": _count,
    "device_buffers": _count,
    "log_level": _lower,
}
