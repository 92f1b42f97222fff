"""One worker process: started in a session of its own, signalled and ended as a group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from typing import IO

from tfdist.errors import LaunchError
from tfdist.launch.job.plan import WorkerPlan
from tfdist.launch.job.watchdog import Watchdog

Stream = IO[bytes] | int | None


class WorkerProcess:
    """Starts one worker.

    It leads a session of its own, so Ctrl-C at the terminal reaches the launcher alone, which
    decides what the workers get, and one signal reaches the worker with all it has started.

    Args:
        plan: what to start.
        environment: what the worker inherits, below the plan's settings.
        streams: its stdin, stdout and stderr, as `subprocess.Popen` takes them.
        watchdog: who kills it when the launcher dies.

    Raises:
        LaunchError: the system cannot start it.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        environment: Mapping[str, str],
        streams: tuple[Stream, Stream, Stream],
        watchdog: Watchdog,
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
                # The launcher has one thread, so running Python between fork and exec is safe;
                # entered there, the worker never runs unwatched.
                preexec_fn=watchdog.add_this_process,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"worker {plan.rank} could not be started: {error}") from error
        self.pid = self._process.pid

    def ended(self) -> int | None:
        """The worker's exit code, minus the signal's number if one killed it; None if it runs.

        When it has ended, what is left of its process group is killed.
        """
        if self._process.returncode is None:
            # The worker is not reaped before its group is dead: until then no other process can
            # have the same number.
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            self.signal(signal.SIGKILL)
            self._watchdog.remove(self.pid)
            self._process.wait()
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the worker and all of its process group."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # It has just ended.
