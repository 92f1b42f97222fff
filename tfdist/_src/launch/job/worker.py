"""One worker process: started in its own session, signaled and killed as a process group."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tfdist._src.launch.job.plan import WorkerPlan
from tfdist._src.launch.job.watchdog import Watchdog
from tfdist.errors import LaunchError

Stream = IO[bytes] | int | None
# A process stuck in a driver does not go; the launcher does not wait for it.
_END_SECONDS = 5.0


class WorkerProcess:
    """Starts one worker.

    It leads its own session, so Ctrl-C in the terminal reaches only the launcher, which decides
    what to send to the workers, and one signal reaches the worker and all its child processes.

    Args:
        plan: the worker to start.
        environment: the environment it inherits, overridden by the plan's settings.
        streams: its stdin, stdout and stderr, as accepted by `subprocess.Popen`.
        watchdog: kills it if the launcher dies.
        inherit: more descriptors that it gets, under the same numbers.

    Raises:
        LaunchError: the system cannot start it.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        environment: Mapping[str, str],
        streams: tuple[Stream, Stream, Stream],
        watchdog: Watchdog,
        inherit: Sequence[int] = (),
    ) -> None:
        self._watchdog = watchdog
        try:
            self._process = subprocess.Popen(
                plan.command,
                env={**environment, **plan.settings},
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                start_new_session=True,
                pass_fds=inherit,
                # The launcher has one thread, and at most others that look up names, so running
                # Python between fork and exec is safe.
                # Adding the worker there ensures that it never runs unwatched.
                preexec_fn=watchdog.add_this_process,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"worker {plan.rank} could not be started: {error}") from error
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """The worker's exit code, negative signal number if it was killed; None while it runs.

        Once it has exited, the rest of its process group is killed.
        """
        if self._process.returncode is None:
            # The worker is reaped only after its group is dead, so that its number cannot be reused
            # before then.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            self.signal(signal.SIGKILL)
            self._watchdog.remove(self.pid)
            self._process.wait()
        return self._process.returncode

    @property
    def stopped(self) -> bool:
        """Whether it is stopped by a signal (SIGSTOP), and not running."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # It has ended.
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        """Kills it, and waits a little until it is gone."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            deadline = time.monotonic() + _END_SECONDS
            while self.exit_code() is None and time.monotonic() < deadline:
                time.sleep(0.005)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the worker's process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # It has just exited.
