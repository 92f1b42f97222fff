"""Groups of real worker processes, kept warm between tests."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from tests import certificates
from tests.harness import gpus
from tests.harness.zygote import Child, Zygote
from tfdist._src import native
from tfdist._src.launch.job.ports import Reservation
from tfdist._src.options import NativeOptions
from tfdist.errors import NativeUnavailableError

# The maximum number of warm processes; the least recently used groups are stopped first.
MAX_WARM_PROCESSES = 16
_warm: list[Ranks] = []

# Even and odd ranks are forked from different processes, so that they iterate over sets in
# different orders.
_ZYGOTES = 2
_zygotes: list[Zygote] = []

# Runs another function with models that XLA compiles.
_COMPILED = "tests.strategy.behaviours.xla:as_elsewhere"


class RankError(AssertionError):
    """A rank has failed; the message contains the traceback of every failed rank."""


class Ranks:
    """Worker processes that each hold a strategy and run functions with it on request.

    Args:
        workers: the number of processes; 0 for one plain process without a strategy.
        devices: the number of logical CPU devices of each process, which is also its number of
            replicas; either one number for all processes, or a list with a number for each process.
        native: whether the processes may use the native collectives.
        hosts: the number of hosts on which the processes appear to run, in rank order; or a list
            with the host of each process.
        tls: whether each process appears to run on a host of its own, with TLS between the hosts.
        strategy: whether each process creates a strategy over all processes when it starts.
        gpus: the way in which GPUs compute sums: "p2p" (by kernels of tfdist), "nccl", "host"
            (through the host's memory), or "" (selected by size). The GPUs are simulated, unless
            `real_gpus` is given. If None, there are no simulated GPUs.
        real_gpus: for each process, the real GPUs that it uses, in the form of
            CUDA_VISIBLE_DEVICES; () for no real GPUs.
    """

    def __init__(
        self,
        workers: int,
        devices: int | Sequence[int] = 1,
        *,
        native: bool = True,
        hosts: int | Sequence[int] = 1,
        tls: bool = False,
        strategy: bool = True,
        gpus: str | None = None,
        real_gpus: Sequence[str] = (),
    ) -> None:
        self.workers = workers
        self._devices = [devices] * max(1, workers) if isinstance(devices, int) else devices
        self._native = native
        if tls:
            hosts = workers
        if isinstance(hosts, int):
            hosts = [rank * hosts // max(1, workers) for rank in range(workers)]
        self._hosts = hosts
        self._tls = tls
        self._gpus = gpus
        self._real_gpus = real_gpus
        self._with_strategy = strategy and workers > 0
        self._processes: list[Child] = []
        self._ports: Reservation | None = None

    def run(self, function: str, *args: Any, timeout: float = 240.0) -> list[Any]:
        """Runs `package.module:function(strategy, *args)` on all ranks concurrently.

        Raises:
            RankError: a rank raised an error, ended or did not answer in time.
        """
        answers = self.answers(function, *args, timeout=timeout)
        errors = [f"rank {rank}: {value}" for rank, (done, value) in enumerate(answers) if not done]
        if errors:
            self.stop()
            raise RankError("\n".join(errors))
        return [value for _, value in answers]

    def answers(
        self,
        function: str,
        *args: Any,
        timeout: float = 240.0,
        silent: Collection[int] = (),
    ) -> list[tuple[bool, Any]]:
        """Runs a function like `run`, but reports failures instead of raising an error.

        Does not wait for the ranks in `silent`.

        Returns:
            For each rank, whether the function returned, and either its result or the reason for
            the failure.
        """
        if self in _warm:
            _warm.remove(self)
        else:
            self._start()
        _warm.append(self)
        if self.workers and os.environ.get("TESTS_XLA"):
            function, args = _COMPILED, (function, *args)
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # `_answer` reads the reason.
                process.pipe.send((function, args))
        deadline = time.monotonic() + timeout
        return [
            (False, "not waited for") if rank in silent else self._answer(process, deadline)
            for rank, process in enumerate(self._processes)
        ]

    def wake(self, rank: int, timeout: float = 240.0) -> tuple[bool, Any]:
        """Continues a rank that a signal has stopped, and returns the rank's answer."""
        process = self._processes[rank]
        process.wake()
        return self._answer(process, time.monotonic() + timeout)

    def _answer(self, process: Child, deadline: float) -> tuple[bool, Any]:
        try:
            if not process.pipe.poll(max(0.1, deadline - time.monotonic())):
                return False, "no answer in time"
            return process.pipe.recv()
        except (EOFError, ConnectionResetError):
            return False, f"ended with exit code {process.exitcode(1)}"

    def _start(self) -> None:
        while _warm and sum(max(1, ranks.workers) for ranks in [*_warm, self]) > MAX_WARM_PROCESSES:
            _warm[0].stop()
        if self._native and self.workers > 1:
            # Compile the core here, because the deadline of the call has not started yet.
            with contextlib.suppress(NativeUnavailableError):
                native.ensure(NativeOptions.from_environment())
        while len(_zygotes) < _ZYGOTES:
            imported = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
            _zygotes.append(Zygote(imported))
        self._ports = Reservation(max(1, self.workers))
        atexit.register(self.stop)
        addresses = [f"127.0.0.1:{port}" for port in self._ports.ports]
        for rank in range(max(1, self.workers)):
            environment = {
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "4",
                "TFDIST_COLLECTIVE_TIMEOUT": "200",
                "TFDIST_START_TIMEOUT": "200",
                # On a busy machine, a late answer does not mean that a worker is lost.
                "TFDIST_SILENCE_WARNING": os.environ.get("TFDIST_SILENCE_WARNING", "60"),
                "TFDIST_STALL_WARNING": os.environ.get("TFDIST_STALL_WARNING", "30"),
                "TFDIST_HEARTBEAT_TIMEOUT": os.environ.get("TFDIST_HEARTBEAT_TIMEOUT", "60"),
                "TFDIST_NATIVE": "1" if self._native else "0",
                "TF_CONFIG": "",
            }
            if self._tls:
                environment |= certificates.variables()
            if self._real_gpus:
                shared = len(set(self._real_gpus)) < self.workers
                environment |= gpus.real(self._real_gpus[rank], self._gpus or "", shared)
            elif self._gpus is not None:
                environment |= gpus.variables(rank, self._gpus, self._devices[rank])
            if len(set(self._hosts)) > 1:
                environment["TFDIST_HOST"] = str(self._hosts[rank])
            if self.workers > 1:
                task = {"type": "worker", "index": rank}
                environment["TF_CONFIG"] = json.dumps(
                    {"cluster": {"worker": addresses}, "task": task}
                )
            # A single worker uses the native collectives only on request.
            asked = self.workers == 1 and self._gpus is not None
            communication = ("native" if asked else "auto") if self._with_strategy else None
            zygote = _zygotes[rank % _ZYGOTES]
            self._processes.append(
                zygote.fork(environment, serve, communication, self._devices[rank])
            )

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        if self in _warm:
            _warm.remove(self)
        self._processes = []
        if self._ports:
            self._ports.close()


def serve(pipe: Any, communication: str | None, devices: int) -> None:
    """Runs the main loop of a rank.

    Args:
        pipe: the connection to the test's process.
        communication: the strategy's argument `communication`; None if the rank creates no
            strategy.
        devices: the number of replicas on CPUs.
    """
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    if devices > 1:
        pieces = [tf.config.LogicalDeviceConfiguration()] * devices
        tf.config.set_logical_device_configuration(cpu, pieces)
    if "TESTS_FLOAT32" in os.environ:
        tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        strategy = None
        if "TESTS_GPU" in os.environ:
            gpus.stand_in()
        if communication:
            import tfdist

            strategy = tfdist.MultiWorkerMirroredStrategy(communication=communication)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    import keras

    _without_autotuning()
    warnings.filterwarnings("error", module=r"tfdist\.")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        module, name = function.split(":")
        keras.backend.clear_session()
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(strategy, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        sys.stdout.flush()


def _without_autotuning() -> None:
    """Disables autotuning, so that iterators end immediately.

    Otherwise, the tuning thread of an iterator can miss the cancellation of the iterator. The
    thread then sleeps for about as long as the iterator has existed, and the iterator ends late.
    """
    import tensorflow as tf
    from tensorflow.python.data.ops.iterator_ops import OwnedIterator

    create = OwnedIterator._create_iterator
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    OwnedIterator._create_iterator = lambda self, dataset: create(
        self, dataset.with_options(options)
    )
