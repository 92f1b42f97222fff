"""Settings from the environment, the names of all TFDIST_* variables, and exit codes.

Other modules use these constants instead of the names of the variables, except in messages.
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
    """The names of the environment variables for settings. See docs/guide/settings.md."""

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
    INPUT_DIVISION = "TFDIST_INPUT_DIVISION"
    SAVE = "TFDIST_SAVE"
    XLA = "TFDIST_XLA"
    FLIGHT_DIR = "TFDIST_FLIGHT_DIR"
    METRICS_PORT = "TFDIST_METRICS_PORT"
    METRICS_HOST = "TFDIST_METRICS_HOST"
    LOG_LEVEL = "TFDIST_LOG_LEVEL"


TLS_VARIABLES = (Variable.TLS_CERTIFICATE, Variable.TLS_KEY, Variable.TLS_CA)
"""The settings for TLS. Each is the path of a file. Either all of them are set, or none is."""


class InternalVariable:
    """The names of environment variables that tfdist sets for the processes that it starts.

    Users do not set these variables.

    Attributes:
        GENERATION: see `LauncherOptions`.
        ELASTIC: see `LauncherOptions`.
        WITNESS: see `LauncherOptions`.
        PROGRESS_FILE: see `progress_path`.
        SPARK_ROWS: the path of a Spark worker's rows, the schema of the rows, and the lengths of
            the arrays in each column, as JSON.
    """

    GENERATION = "TFDIST_GENERATION"
    ELASTIC = "TFDIST_ELASTIC"
    WITNESS = "TFDIST_WITNESS"
    PROGRESS_FILE = "TFDIST_PROGRESS_FILE"
    SPARK_ROWS = "TFDIST_SPARK_ROWS"


USAGE_ERROR = 2
"""The exit code of a command with invalid arguments."""

PREEMPTED = 75
"""The exit code of a worker or job that has saved its state after SIGTERM (EX_TEMPFAIL). This exit
does not count as a failure: the job can be started again, for example on other hosts."""

SIGNAL_BASE = 128
"""The exit code of a command that a signal has ended, minus the number of the signal."""

_SECURITY = ("warn", "required", "none")
_ALGORITHMS = ("auto", "shm", "one_shot", "two_shot", "ring", "hierarchical")
_DEVICE_ALGORITHMS = ("p2p", "nccl", "host", "by_size")
_BATCH_STATISTICS = ("global", "replica")
_INPUT_DIVISION = ("auto", "always", "never")
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
        witness: the address of the launcher of this worker's host (`TFDIST_WITNESS`). Workers of
            other hosts ask this launcher which workers of its host are dead. "" if there is no such
            launcher.

    Example:
        >>> LauncherOptions.from_environment({"TFDIST_GENERATION": "2"}).generation
        2
    """

    generation: int = 0
    elastic: bool = False
    witness: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LauncherOptions:
        """Creates the options from the environment variables that are set.

        Raises:
            ValueError: `TFDIST_GENERATION` or `TFDIST_ELASTIC` is invalid.
        """
        return cls(**_read(cls, InternalVariable, environment))


@dataclass(frozen=True)
class Options:
    """Settings from the environment; each field is set by the variable `TFDIST_<FIELD>`.

    Attributes:
        start_timeout: seconds to wait for all workers at startup (`TFDIST_START_TIMEOUT`).
        collective_timeout: seconds that one collective may wait for the other workers without
            progress (`TFDIST_COLLECTIVE_TIMEOUT`). The value must exceed the time of the slowest
            evaluation or checkpoint of a single worker.
        heartbeat_timeout: seconds without a sign of life after which a worker is considered lost,
            even though its connections are open (`TFDIST_HEARTBEAT_TIMEOUT`).
        silence_warning: seconds without a heartbeat from a worker's native core after which a
            warning names the worker (`TFDIST_SILENCE_WARNING`).
        stall_warning: seconds that a native collective or a session exchange may take before a
            warning names the workers that have not joined it (`TFDIST_STALL_WARNING`).
        algorithm: the native all-reduce algorithm (`TFDIST_ALGORITHM`): auto, shm, one_shot,
            two_shot, ring or hierarchical. With "" or auto, the algorithm depends on the size of
            the tensor and on the numbers of ranks and hosts.
        device_algorithm: the way in which gradients on GPUs are summed (`TFDIST_DEVICE_ALGORITHM`).
            With p2p, tfdist's kernels sum them, and read the memory of other GPUs. With nccl, NCCL
            sums them. With host, they are summed through the host's memory. With by_size, p2p is
            used up to 256 KiB, and nccl above. With "", a measurement selects the fastest way.
        device_buffers: the size in bytes of each of the two staging buffers of a GPU
            (`TFDIST_DEVICE_BUFFERS`); 0 selects 8 MiB.
        cuda_library: the path of the library of the GPU's driver (`TFDIST_CUDA_LIBRARY`); ""
            selects the system's library.
        nccl_library: the path of the NCCL library (`TFDIST_NCCL_LIBRARY`); "" selects the library
            that TensorFlow uses.
        secret: the secret shared by all workers of the job (`TFDIST_SECRET`); "" if there is no
            secret. The secret appears neither in messages nor in the `repr` of this object.
        security: the reaction to a job on several hosts that has neither a secret nor TLS
            (`TFDIST_SECURITY`): warn (the default) logs a warning, required raises an error, and
            none does nothing.
        host: the name of this worker's host (`TFDIST_HOST`); workers share memory only if they have
            the same host name. Detected by default.
        flight_dir: the directory for the flight log that this worker writes on errors, stalls and
            SIGUSR1 (`TFDIST_FLIGHT_DIR`); "" if the worker writes no flight log.
        metrics_port: the port on which the first worker of each host serves Prometheus metrics
            (`TFDIST_METRICS_PORT`). The other workers of the host use the following ports. 0 if no
            metrics are served.
        metrics_host: the address at which metrics are served (`TFDIST_METRICS_HOST`).
        xla: whether XLA may compile the steps of models (`TFDIST_XLA`, 1 or 0). If False,
            `jit_compile` has no effect.
        batch_statistics: the rows from which `BatchNormalization` computes its statistics in
            training, unless the strategy specifies them (`TFDIST_BATCH_STATISTICS`): global for the
            whole batch, or replica for the rows of each replica.
        input_division: the datasets of which each worker preprocesses only its own rows, unless the
            strategy specifies them (`TFDIST_INPUT_DIVISION`): auto, always or never.
        save: the workers that write model files (`TFDIST_SAVE`). With all, the chief writes, and so
            does each worker that does not see the chief's file. With chief, only the chief and the
            workers that save to another path write.
        log_level: the lowest level of the messages that the logger "tfdist" logs
            (`TFDIST_LOG_LEVEL`): debug, info, warning or error, in upper or lower case.
        tls_certificate: the path of a PEM file with this worker's certificate
            (`TFDIST_TLS_CERTIFICATE`); "" if there is none. If this field and the next two fields
            are set, the workers use TLS.
        tls_key: the path of a PEM file with the certificate's private key (`TFDIST_TLS_KEY`).
        tls_ca: the path of a PEM file with the certificate of the CA that signs the certificates of
            all workers (`TFDIST_TLS_CA`).
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
    input_division: str = "auto"
    save: str = "all"
    log_level: str = "info"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    launcher: LauncherOptions = LauncherOptions()

    def __post_init__(self) -> None:
        _check_choice(Variable.SECURITY, self.security, _SECURITY)
        _check_choice(Variable.BATCH_STATISTICS, self.batch_statistics, _BATCH_STATISTICS)
        _check_choice(Variable.INPUT_DIVISION, self.input_division, _INPUT_DIVISION)
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
        """Creates the options from the environment variables that are set.

        Args:
            environment: variables to read; this process's environment by default.

        Raises:
            ValueError: the value of a variable is invalid, or two settings contradict each other,
                for example because only some of the TLS variables are set.
        """
        source = os.environ if environment is None else environment
        return cls(
            **_read(cls, Variable, source), launcher=LauncherOptions.from_environment(source)
        )


def xla_processor_limit(environment: Mapping[str, str] | None = None) -> str:
    """Returns the flag in `XLA_FLAGS` that makes XLA compile for older CPUs; "" if there is none.

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
        enabled: whether the native collectives may be used (`TFDIST_NATIVE`, 1 or 0).
        cache: the folder for compiled libraries (`TFDIST_CACHE`, by default
            `$XDG_CACHE_HOME/tfdist` or `~/.cache/tfdist`); None if there is no home folder.
        compiler: the command of the C++ compiler (`CXX`); "" to search for a compiler.
        vector_unit: the set of vector instructions that the core uses (`TFDIST_VECTOR_UNIT`):
            baseline, avx2 or avx512. "" selects the best set that the CPU supports.

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
        """Creates the options from the environment variables that are set.

        Args:
            environment: variables to read; this process's environment by default.

        Raises:
            ValueError: the value of `TFDIST_NATIVE` is neither 0 nor 1, or `TFDIST_VECTOR_UNIT` is
                invalid.
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
    """Returns the level of the logger (`TFDIST_LOG_LEVEL`), without reading the other settings.

    Raises:
        ValueError: the level is invalid.
    """
    level = os.environ.get(Variable.LOG_LEVEL, "").lower() or Options.log_level
    _check_choice(Variable.LOG_LEVEL, level, _LOG_LEVELS)
    return level


def progress_path() -> str:
    """Returns the path of the progress file of this worker (`TFDIST_PROGRESS_FILE`).

    The path is not a field of `Options`, because a worker needs it even if another setting is
    invalid. The worker then reports this error to the launcher in the progress file. Without a
    launcher, the path is "".
    """
    return os.environ.get(InternalVariable.PROGRESS_FILE, "")


def environment_of_programs() -> dict[str, str]:
    """Returns the environment for the programs that this process starts.

    It contains `PATH` even if this process has no `PATH`, because a compiler uses `PATH` to find
    its own programs.
    """
    return {"PATH": os.defpath, **os.environ}


def _read(options: type, names: type, source: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of the fields of a dataclass that are set by environment variables."""
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
    # If there is no home folder, `expanduser` leaves "~" unchanged.
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


# The functions that read a setting, by the type of the setting.
_READERS: dict[type, Callable[[str, str], Any]] = {
    str: _text,
    float: _seconds,
    int: _port,
    bool: _switch,
}
# The functions that read particular settings instead of the functions above, by the name of the
# setting.
_OTHER_READERS: dict[str, Callable[[str, str], Any]] = {
    "generation": _count,
    "device_buffers": _count,
    "log_level": _lower,
}
