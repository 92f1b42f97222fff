"""Warm spares: processes that have already imported TensorFlow and can replace a failed worker."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tfdist._src.launch.job.resources import VISIBLE
from tfdist._src.launch.job.worker import Stream, Watchdog, WorkerPlan, WorkerProcess
from tfdist.errors import LaunchError

# Modules that training scripts import. The imports do not initialize any device.
_PRELOAD = (
    "tensorflow",
    "keras",
    "tfdist._src.keras.patching",
    "tfdist._src.strategy.multi_worker",
    "tfdist.callbacks",
    "tfdist._src.pipeline.model",
    "tfdist._src.pipeline.placement.strategy",
)
# If this number of spares have been killed before they were used, no more spares are started.
_MAX_KILLED = 3
# The number of bytes to read from the end of a spare's output. If an import fails, the output ends
# with the error message.
_TAIL_BYTES = 4096
# The environment variables that have a different value for each worker.
_OWN = frozenset({"TF_CONFIG"})


class Spare:
    """A process that imports the workers' modules, and then waits until it must become a worker.

    Args:
        program: the program that the workers run, with its arguments, but without the interpreter.
        environment: the environment variables that all workers have in common.
        watchdog: kills the spare if the launcher dies.

    Raises:
        LaunchError: the system cannot start the process.
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], watchdog: Watchdog
    ) -> None:
        self._output = os.memfd_create("tfdist-spare")
        self._control, theirs = socket.socketpair()
        number = str(theirs.fileno())
        module = "tfdist._src.launch.job.spare_program"
        command = (sys.executable, "-u", "-m", module, number, ",".join(_PRELOAD), *program)
        plan = WorkerPlan(-1, command, {})
        streams = (subprocess.DEVNULL, self._output, self._output)
        try:
            self.process = WorkerProcess(plan, environment, streams, watchdog, [theirs.fileno()])
        except LaunchError:
            self.close()
            raise
        finally:
            theirs.close()

    @property
    def ready(self) -> bool:
        """Whether the spare has finished its imports."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False

    def become(self, environment: Mapping[str, str], streams: Sequence[Stream]) -> WorkerProcess:
        """Turns the spare into a worker.

        Args:
            environment: all environment variables of the worker.
            streams: the worker's stdin, stdout and stderr.

        Returns:
            The worker's process, which is the process of the spare.

        Raises:
            OSError: the spare has ended, or the system has no free file descriptors.
        """
        task = os.memfd_create("tfdist-task")
        try:
            os.write(task, json.dumps(dict(environment)).encode())
            os.lseek(task, 0, os.SEEK_SET)
            with open(os.devnull, "rb") as nowhere:
                descriptors = [
                    _descriptor(stream, number, nowhere.fileno())
                    for number, stream in enumerate(streams)
                ]
                socket.send_fds(self._control, [b"t"], [task, *descriptors])
        finally:
            os.close(task)
        self.close()
        return self.process

    def last_line(self) -> str:
        """Returns the last line of the spare's output; "" if the spare has printed nothing."""
        size = os.lseek(self._output, 0, os.SEEK_END)
        text = os.pread(self._output, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """Closes the connection to the spare. If the spare has no task, it exits then."""
        self._control.close()
        os.close(self._output)


def _descriptor(stream: Stream, inherited: int, nowhere: int) -> int:
    if stream is None:
        return inherited
    if isinstance(stream, int):
        return nowhere if stream == subprocess.DEVNULL else stream
    return stream.fileno()


class Spares:
    """Keeps a number of spares ready: if one is used, starts another one.

    Args:
        count: the number of spares.
        program: the program that the workers run, with its arguments, but without the interpreter.
        environment: the environment variables that all workers have in common.
        watchdog: kills the spares if the launcher dies.
    """

    def __init__(
        self,
        count: int,
        program: Sequence[str],
        environment: Mapping[str, str],
        watchdog: Watchdog,
    ) -> None:
        self._count = count
        self._program = program
        self._environment = environment
        self._watchdog = watchdog
        self._spares: list[Spare] = []
        self._killed = 0

    def tend(self) -> str:
        """Starts new spares for spares that were used or have ended.

        This method gives up if a spare cannot be started or has exited by itself, or if the third
        spare has been killed. Then it ends all spares, and never starts any again.

        Returns:
            If this call has given up, the reason in one line; otherwise "".
        """
        for spare in list(self._spares):
            status = spare.process.exit_code()
            if status is None:
                continue
            self._spares.remove(spare)
            line = spare.last_line()
            spare.close()
            self._killed += 1
            if status >= 0 or self._killed == _MAX_KILLED:
                how = f"signal {-status}" if status < 0 else f"exit code {status}"
                return self._give_up(f"ended with {how}{f': {line}' if line else ''}")
        try:
            while len(self._spares) < self._count:
                self._spares.append(Spare(self._program, self._environment, self._watchdog))
        except (LaunchError, OSError) as error:
            return self._give_up(f"could not be started: {error}")
        return ""

    def take(self) -> Spare | None:
        """Returns a spare that the caller can turn into a worker; None if there is none.

        Spares that have finished their imports are preferred. Spares that are suspended (SIGSTOP)
        are ended instead of used, because they would delay the job.
        """
        for spare in [spare for spare in self._spares if spare.process.stopped]:
            self._spares.remove(spare)
            spare.process.end()
            spare.close()
        waiting = [spare for spare in self._spares if spare.process.exit_code() is None]
        if not waiting:
            return None
        spare = max(waiting, key=lambda spare: spare.ready)
        self._spares.remove(spare)
        return spare

    def close(self) -> None:
        """Ends all spares; `tend` starts no more spares afterwards."""
        self._count = 0
        for spare in self._spares:
            spare.process.end()
            spare.close()
        self._spares = []

    def _give_up(self, why: str) -> str:
        self.close()
        return f"a warm spare {why}; replacements start without one."


def spare_settings(
    plans: Sequence[WorkerPlan], gpus: Sequence[str]
) -> tuple[dict[str, str] | None, str]:
    """Returns the environment variables with which a spare must start.

    A spare must be able to become any worker of this host. But TensorFlow reads some variables when
    it is imported, and ignores later changes. Therefore spares are possible only if these variables
    are the same for all workers.

    Args:
        plans: the plans of this host's workers.
        gpus: the GPUs that this host's workers may use.

    Returns:
        If spares are possible, the variables and "". Otherwise None and the reason, in one line.

    Example:
        >>> plan = WorkerPlan(0, ("python", "-u", "train.py"), {"TF_CONFIG": "{}", "A": "1"})
        >>> spare_settings([plan], gpus=[])
        ({'A': '1'}, '')
    """
    shared = [{k: v for k, v in plan.settings.items() if k not in _OWN} for plan in plans]
    on_gpus = gpus and any(settings.get(VISIBLE, "all") for settings in shared)
    if on_gpus or any(settings != shared[0] for settings in shared):
        return None, (
            "no warm spares: each worker has GPUs of its own, chosen when TensorFlow is imported; "
            "a replacement takes seconds more to start"
        )
    return shared[0], ""
