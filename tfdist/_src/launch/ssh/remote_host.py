"""One host of `tfdist run --hosts`: the ssh, or here the process, that leads to its launcher."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist._src.cluster.net.listener import local_addresses
from tfdist._src.launch.job.host_list import ListedHost
from tfdist._src.launch.ssh.shown_stream import ShownStream
from tfdist.errors import LaunchError

_AGENT = "tfdist._src.launch.host_agent"
_PATH = "PYTHONPATH"
_OPTIONS = (
    # Never prompts for a password, and detects a dead host within a minute.
    "BatchMode=yes",
    "ConnectTimeout=30",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    # What the user's configuration may set for other uses: a shared connection outlives this one.
    "ControlMaster=no",
    "ControlPath=none",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)
_SSH_OPTIONS = ("-T", *(word for option in _OPTIONS for word in ("-o", option)))
_READ_SIZE = 65536
# What ssh exits with when it fails itself, or loses the connection.
SSH_FAILED = 255


class RemoteHost:
    """Starts the agent of one host, and passes on what it prints and what it is to be told.

    Args:
        number: the host's number.
        host: the host.
        ssh: the command that reaches another host, such as `("ssh", "-p", "2222")`.
        task: what the agent is told first.

    Attributes:
        description: what the agent has reported; empty before.
        told: whether it has been told what to run.
        begun: the `time.monotonic()` at which it was started.

    Raises:
        LaunchError: ssh cannot be started.
    """

    def __init__(
        self, number: int, host: ListedHost, ssh: Sequence[str], task: Mapping[str, Any]
    ) -> None:
        self.number = number
        self.name = host.name
        self.local = is_this_machine(host)
        self.begun = time.monotonic()
        self.description: dict[str, Any] = {}
        self.told = False
        self._last_words: list[str] = []
        self._streams: dict[int, ShownStream] = {}
        self._start(ssh)
        self._tell(task)

    def _start(self, ssh: Sequence[str]) -> None:
        # The first host's output is shown as it is, with its progress bar, the others' by lines.
        prefix = None if self.number == 0 else f"{self.name}: "
        try:
            if self.local:
                read, write = os.pipe()
                own = prefix is not None
                self._process = subprocess.Popen(
                    (sys.executable, "-m", _AGENT, str(write)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if own else None,
                    stderr=subprocess.PIPE if own else None,
                    pass_fds=(write,),
                    start_new_session=True,
                )
                os.close(write)
                self._streams[read] = ShownStream(os.fdopen(read, "rb"), 2, prefix, self._report)
            else:
                self._process = subprocess.Popen(
                    (*ssh, *_SSH_OPTIONS, "--", self.name, remote_command()),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"host {self.name} cannot be reached: {error}") from error
        report = None if self.local else self._report
        for pipe, target in ((self._process.stdout, 1), (self._process.stderr, 2)):
            if pipe is not None:
                stream = ShownStream(pipe, target, prefix, report if target == 1 else None)
                self._streams[pipe.fileno()] = stream

    @property
    def descriptors(self) -> list[int]:
        """Those to wait on before `read`."""
        return list(self._streams)

    def read(self, descriptor: int) -> None:
        """Passes on what has arrived."""
        stream = self._streams[descriptor]
        data = os.read(descriptor, _READ_SIZE)
        shown = stream.feed(data)
        if not self.told:
            lines = (line.strip() for line in shown.decode(errors="replace").splitlines())
            self._last_words = [*self._last_words, *filter(None, lines)][-3:]
        if not data:
            del self._streams[descriptor]

    def order(self, arguments: Sequence[str]) -> None:
        """Tells the agent what to run."""
        self.told = True
        self._tell({"run": list(arguments)})

    def signal(self, number: signal.Signals) -> None:
        """Has the launcher signaled; before it runs, ends it."""
        if self.told:
            self._tell({"signal": int(number)})
        else:
            self.end()

    def end(self) -> None:
        """Ends the connection, and thereby what runs on the host."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # It has ended.
        if not self.description:  # Nobody reads it yet.
            self._process.terminate()

    def kill(self) -> None:
        """Kills the process on this machine."""
        self._process.kill()
        self._process.wait()

    def exit_code(self) -> int | None:
        """The exit code, once all output has been read; 255 from ssh for a lost connection."""
        if self._streams:
            return None
        return self._process.poll()

    def why(self) -> str:
        """Why its agent has not started, and the remedy, in one line."""
        code = self._process.returncode
        words = " ".join(self._last_words) or f"exit code {code}"
        if self.local or code != SSH_FAILED:
            return (
                f"tfdist cannot be started on {self.name}: {words}. Every host needs the same "
                f"folder, and the same Python environment at the same path: {remote_command()}"
            )
        if "denied" in words:
            words += f". It must work without a password: ssh-copy-id {self.name}"
        if "Host key verification failed" in words:
            words += f" Accept its key once: ssh {self.name}"
        return f"{self.name} cannot be reached: {words}"

    def beat(self) -> None:
        """Tells the agent that this side is alive."""
        self._write(b"\n")

    def _report(self, line: str) -> None:
        self.description = json.loads(line)

    def _tell(self, order: Mapping[str, Any]) -> None:
        self._write(json.dumps(order).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError):
            pass  # It has ended: `exit_code` will tell.


def remote_command() -> str:
    """What the shell of the host is to run: the same Python, in the same folder."""
    # Python's own path is needed before it can read the rest.
    path = f"{_PATH}={os.environ[_PATH]}" if os.environ.get(_PATH) else ""
    words = ["env", path] if path else []
    words += [os.path.abspath(sys.executable), "-m", _AGENT]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def is_this_machine(host: ListedHost) -> bool:
    """Whether no ssh is needed: the name or address is this machine's, and names no other user.

    Example:
        >>> is_this_machine(ListedHost("localhost")), is_this_machine(ListedHost("ann@localhost"))
        (True, False)
    """
    if "@" in host.name:
        return False
    name = host.name
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:  # An alias that only ssh knows.
        return False
    own = set(local_addresses())
    return any(address in own or address.startswith("127.") for address in found)
