"""`tfdist run --hosts`: starts the launchers of several hosts by ssh.

On each host, ssh starts the agent (`host_agent.py`), which reports that it is ready and receives
its orders through ssh. If a host of the list is this machine, its agent is started without ssh.
"""

from __future__ import annotations

import json
import math
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from tfdist._src.cluster.auth.handshake import new_secret
from tfdist._src.cluster.net.listener import local_addresses
from tfdist._src.launch.console import logger
from tfdist._src.launch.hosts.rendezvous import Deadline
from tfdist._src.launch.job.log_routing import LineAssembler
from tfdist._src.launch.job.run_options import ListedHost, RunOptions
from tfdist._src.launch.job.shutdown import Signals
from tfdist._src.launch.job.worker import forwarded
from tfdist._src.options import SIGNAL_BASE, Options, Variable
from tfdist._version import __version__
from tfdist.errors import LaunchError

# The text before the agent's report. The host's shell may print other text before it, such as a
# greeting.
MARK = "tfdist launcher "
_MARK = b"\n" + MARK.encode()


class ShownStream:
    """Copies the output of an agent from a pipe to this command's stdout or stderr.

    Args:
        pipe: the pipe from which the output was read.
        target: the file descriptor of stdout or stderr, to which the output is copied.
        prefix: the text before each line; None to copy the output unchanged.
        report: a function that is called with the agent's report, which is not copied; None if the
            agent does not send its report through this pipe.
    """

    def __init__(
        self,
        pipe: IO[bytes],
        target: int,
        prefix: str | None,
        report: Callable[[str], None] | None,
    ) -> None:
        self._pipe = pipe  # Kept open.
        self._target = target
        self._lines = None if prefix is None else LineAssembler(prefix)
        self._report = report
        self._before = b""

    def feed(self, data: bytes) -> bytes:
        """Copies data that was read from the pipe.

        Args:
            data: the data; b"" at the end of the pipe.

        Returns:
            The copied data, without the agent's report and without prefixes.
        """
        ended = not data
        if self._report is not None:
            data = self._until_report(data)
        shown = data
        if self._lines is not None:
            shown = self._lines.feed(data) + (self._lines.flush() if ended else b"")
        _write(self._target, shown)
        if ended:
            self._pipe.close()
        return data

    def _until_report(self, data: bytes) -> bytes:
        """Removes the agent's report from the data.

        All data is held back, and b"" is returned, until the whole report has arrived. Then all
        data up to now is returned, except for the report.
        """
        assert self._report is not None
        self._before += data
        start = self._before.find(_MARK)
        end = self._before.find(b"\n", start + 1) if start >= 0 else -1
        if end >= 0:
            self._report(self._before[start + len(_MARK) : end].decode())
            self._report = None
            data, self._before = self._before[:start] + self._before[end + 1 :], b""
            return data
        if not data:
            rest, self._before = self._before, b""
            return rest
        return b""


def _write(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # The reader of this command's output is gone. The job continues.


_AGENT = "tfdist._src.launch.host_agent"
_PATH = "PYTHONPATH"
_OPTIONS = (
    # Do not prompt for a password, and detect a dead host within a minute.
    "BatchMode=yes",
    "ConnectTimeout=30",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=3",
    # Override settings in the user's ssh configuration that are meant for interactive use. For
    # example, a shared connection would remain open after this command.
    "ControlMaster=no",
    "ControlPath=none",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
)
_SSH_OPTIONS = ("-T", *(word for option in _OPTIONS for word in ("-o", option)))
_READ_SIZE = 65536
# The exit code of ssh if ssh itself fails or loses the connection.
SSH_FAILED = 255


class RemoteHost:
    """Starts the agent of one host, sends orders to the agent, and shows its output.

    Args:
        number: the host's number.
        host: the host.
        ssh: the ssh command with its options, such as `("ssh", "-p", "2222")`.
        task: the first order to the agent. It contains the environment variables.

    Attributes:
        description: the agent's report; empty until the report arrives.
        told: whether the arguments of the host's launcher have been sent to the agent.
        begun: when the agent was started, as a time of `time.monotonic()`.

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
        # The first host's output is shown unchanged, including its progress bar. The output of
        # other hosts is shown line by line, with a prefix.
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
        """The descriptors of the agent's output. When one of them is readable, call `read`."""
        return list(self._streams)

    def read(self, descriptor: int) -> None:
        """Reads the output that has arrived at a descriptor, and shows it."""
        stream = self._streams[descriptor]
        data = os.read(descriptor, _READ_SIZE)
        shown = stream.feed(data)
        if not self.told:
            lines = (line.strip() for line in shown.decode(errors="replace").splitlines())
            self._last_words = [*self._last_words, *filter(None, lines)][-3:]
        if not data:
            del self._streams[descriptor]

    def order(self, arguments: Sequence[str]) -> None:
        """Sends the second order to the agent: the arguments with which it runs the launcher."""
        self.told = True
        self._tell({"run": list(arguments)})

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the launcher, or ends the agent if the launcher has not started."""
        if self.told:
            self._tell({"signal": int(number)})
        else:
            self.end()

    def end(self) -> None:
        """Ends the connection to the agent. The agent then ends all its processes on the host."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # The process has ended.
        # Without a report, the agent may not run yet, so it would not notice the end of its input.
        if not self.description:
            self._process.terminate()

    def kill(self) -> None:
        """Kills ssh; if the host is this machine, kills the agent itself."""
        self._process.kill()
        self._process.wait()

    def exit_code(self) -> int | None:
        """Returns the exit code of ssh, or of the agent if the host is this machine.

        ssh exits with the agent's exit code, or with 255 if ssh itself fails or loses the
        connection. None if the process is running, or not all of its output has been read.
        """
        if self._streams:
            return None
        return self._process.poll()

    def why(self) -> str:
        """Returns why the agent could not be started, and the remedy, in one line."""
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
        """Sends a sign of life to the agent, an empty line."""
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
            pass  # The process has ended. `exit_code` will tell the caller.


def remote_command() -> str:
    """Returns the shell command that starts the agent on a host.

    The command uses the same Python and the same folder as this process.
    """
    # PYTHONPATH is a part of the command, because Python needs it to find the agent. The agent
    # receives the other variables only later.
    path = f"{_PATH}={os.environ[_PATH]}" if os.environ.get(_PATH) else ""
    words = ["env", path] if path else []
    words += [os.path.abspath(sys.executable), "-m", _AGENT]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


def is_this_machine(host: ListedHost) -> bool:
    """Returns whether a host is this machine, so that its agent can be started without ssh.

    If the host is listed with a user name, ssh is necessary even on this machine.

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
    except OSError:  # The name may be an alias from ssh's configuration.
        return False
    own = set(local_addresses())
    return any(address in own or address.startswith("127.") for address in found)


# If a host of an elastic job is lost, this command tries to reach it again after a delay. These are
# the first and the longest delay, in seconds.
_RETRY_SECONDS = (5.0, 60.0)
_MAX_RETRIES = 8
# Signals, output and exits of processes wake up this process. It also wakes up after this number of
# seconds, to handle retries, time limits and events that it has missed.
_CHECK_SECONDS = 1.0
# How many seconds this command waits for the launchers to end. This is longer than the grace period
# of their workers.
_END_SECONDS = 60.0
# How many signs of life this command sends to each host in `TFDIST_HEARTBEAT_TIMEOUT` seconds. If
# none of them arrives in this time, the host ends its launcher.
_BEATS = 6


@dataclass(frozen=True)
class _Retry:
    """When to try to reach a lost host again, and the number of the attempt.

    Attributes:
        due: the time of the attempt.
        count: the number of the attempt, starting at 1.
    """

    due: float = 0.0
    count: int = 0

    def next(self, now: float) -> _Retry:
        delay = min(_RETRY_SECONDS[0] * 2**self.count, _RETRY_SECONDS[1])
        return _Retry(now + delay, self.count + 1)


class HostsJob:
    """Starts the launchers of all hosts, and waits until they have ended.

    In an elastic job, the launcher of a lost host is started again.

    Args:
        options: the options of the command.
        ssh: the ssh command with its options.
        task: the first order to each agent. It contains the environment variables.
        signals: the signals that this process receives.
        timeout: the number of seconds in which the agent of each host must send its report.
        silence: the number of seconds after which a host ends its launcher if it receives no sign
            of life from this process.
    """

    def __init__(
        self,
        options: RunOptions,
        ssh: Sequence[str],
        task: dict[str, Any],
        signals: Signals,
        timeout: float,
        silence: float,
    ) -> None:
        self._options = options
        self._ssh = ssh
        self._task = {**task, "silence": silence}
        self._beat_seconds = silence / _BEATS
        self._next_beat = 0.0
        self._signals = signals
        self._timeout = timeout
        self._rendezvous = ""
        self._running: dict[int, RemoteHost] = {}
        self._codes: dict[int, int] = {}
        self._retries: dict[int, _Retry] = {}
        self._failed_at: float | None = None
        self._stopped = False
        self._interrupted = False

    def start(self) -> None:
        """Starts the agents of all hosts, and sends each agent the arguments of its launcher."""
        deadline = Deadline(self._timeout)
        for number, listed in enumerate(self._options.hosts):
            self._running[number] = RemoteHost(number, listed, self._ssh, self._task)
        while missing := [h for h in self._running.values() if not h.description]:
            if deadline.report_due():
                deadline.report(", ".join(host.name for host in missing))
            if not deadline.left:
                names = ", ".join(host.name for host in missing)
                raise LaunchError(
                    f"{names} did not answer within {deadline.seconds:.0f} s: check ssh "
                    f"{missing[0].name}, or raise TFDIST_START_TIMEOUT"
                )
            self._wait(min(1.0, deadline.next_check))
            for number in self._signals.take():
                raise SystemExit(SIGNAL_BASE + number)
            for host in self._running.values():
                if problem := _problem(host):
                    raise LaunchError(problem)
        self._rendezvous = self._meeting_place()
        for host in self._running.values():
            self._order(host)

    def run(self) -> int:
        """Waits until all launchers have ended."""
        while self._running:
            self._wait(_CHECK_SECONDS)
            for number in self._signals.take():
                self._pass_on(number)
            self._reap()
            self._retry()
            self._give_up()
        return self._code()

    def end(self) -> None:
        """Ends the launchers that are still running.

        This method waits until they have ended. If a signal or the time limit ends the wait, the
        remaining ssh processes are killed.
        """
        for host in self._running.values():
            host.end()
        deadline = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < deadline and not self._signals.take():
            self._wait(0.2)
            self._running = {n: h for n, h in self._running.items() if h.exit_code() is None}
        for host in self._running.values():
            host.kill()

    def _pass_on(self, number: signal.Signals) -> None:
        """Passes on a signal to the launchers.

        The signal is sent only to the launcher of host 0 if this launcher informs the others.
        """
        gentle = number == signal.SIGINT and not self._interrupted
        hosts = list(self._running.values())
        if gentle or not self._options.elastic:
            hosts = [self._running.get(0, hosts[0])] if hosts else []
        if self._interrupted:
            hosts = list(self._running.values())
        self._stopped = True
        self._interrupted = self._interrupted or number == signal.SIGINT
        for host in hosts:
            host.signal(number)

    def _order(self, host: RemoteHost) -> None:
        host.order(launcher_arguments(self._options, host.number, self._rendezvous))

    def _wait(self, seconds: float) -> None:
        """Waits for a signal or for output of the hosts, and shows the output.

        Also sends the signs of life to the hosts when they are due.
        """
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            for host in self._running.values():
                host.beat()
        seconds = min(seconds, self._next_beat - now)
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        sources = {d: host for host in self._running.values() for d in host.descriptors}
        for descriptor in sources:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(math.ceil(seconds * 1000)):
            if descriptor in sources:
                sources[descriptor].read(descriptor)

    def _meeting_place(self) -> str:
        """Returns the address on host 0 at which the launchers meet; "" if there is one host."""
        if len(self._options.hosts) == 1:
            return ""  # A single host needs no rendezvous.
        if self._options.rendezvous is not None:
            host, port = self._options.rendezvous
        else:
            first, second = self._running[0], self._running[1]
            # If host 0 is this machine, use the address from which host 1 sees the ssh connection.
            # Otherwise, use the address at which ssh has connected to host 0.
            seen = second.description["client"] if first.local else first.description["server"]
            host = seen or self._options.hosts[0].address
            port = first.description["port"]
        return joined(host, port)

    def _reap(self) -> None:
        for number, host in list(self._running.items()):
            code = host.exit_code()
            if code is None:
                continue
            del self._running[number]
            # A negative code means that a signal has killed ssh.
            lost = not host.local and (code == SSH_FAILED or code < 0)
            if lost and host.told:
                logger.warning(f"the connection to {host.name} is lost")
            now = time.monotonic()
            if not lost and host.told:
                self._codes[number] = code if code >= 0 else SIGNAL_BASE - code
                if code and self._failed_at is None:
                    self._failed_at = now
            retry = self._retries.pop(number, None)
            if (lost or (retry and code)) and self._options.elastic and number > 0:
                self._retries[number] = (retry or _Retry()).next(now)

    def _retry(self) -> None:
        """Starts the agents of lost hosts again if this is due; host 0 admits their launchers."""
        now = time.monotonic()
        # If the job is ending or host 0 is gone, lost hosts can no longer join the job.
        if self._stopped or 0 not in self._running:
            for host in self._running.values():
                if not host.told:
                    host.end()
            return
        for number, retry in self._retries.items():
            if number not in self._running and retry.due <= now and retry.count <= _MAX_RETRIES:
                listed = self._options.hosts[number]
                logger.info(f"connecting to {listed.name} again")
                self._running[number] = RemoteHost(number, listed, self._ssh, self._task)
        for host in self._running.values():
            if host.told:
                continue
            problem = _problem(host)
            if problem:
                logger.error(problem)
            if problem or now > host.begun + self._timeout:
                host.end()
            elif host.description:
                self._order(host)

    def _give_up(self) -> None:
        """Ends the remaining launchers if they do not end by themselves after a launcher failed.

        They may be waiting for the failed launcher. The launchers of an elastic job are not ended.
        """
        if self._options.elastic or self._failed_at is None:
            return
        if time.monotonic() > self._failed_at + _END_SECONDS:
            for host in self._running.values():
                host.end()

    def _code(self) -> int:
        """Returns the exit code of the job.

        This is the exit code of the first launcher that failed, or 0 if all launchers succeeded. An
        elastic job succeeds if any launcher succeeds. If no launcher has ended normally, the exit
        code is 1.
        """
        codes = list(self._codes.values())  # In the order in which the launchers have ended.
        if not codes:
            return 1
        if self._options.elastic and 0 in codes:
            return 0
        return next((code for code in codes if code), 0)


def _problem(host: RemoteHost) -> str:
    """Returns why a host cannot join the job, and the remedy, in one line.

    "" if no problem is known.
    """
    if host.exit_code() is not None:
        return host.why()
    version = host.description.get("version", __version__)
    if version == __version__:
        return ""
    return (
        f"{host.name} has tfdist {version}, this host has {__version__}: install the same version "
        f"on all hosts"
    )


def launcher_arguments(options: RunOptions, number: int, rendezvous: str) -> list[str]:
    """Returns the command line of one host's launcher, without `tfdist run`.

    Args:
        options: the options of the command.
        number: the host's number.
        rendezvous: the address on host 0 at which the launchers meet; unused if there is only one
            host.
    """
    workers = options.hosts[number].workers
    own = ["-n", "auto" if workers is None else str(workers)]
    if len(options.hosts) > 1:
        own += ["--nnodes", str(len(options.hosts)), "--node-rank", str(number)]
        own += ["--rendezvous", rendezvous]
    return [*own, *options.launcher_arguments]


def joined(host: str, port: int) -> str:
    """Returns `"host:port"`. If the host is an IPv6 address, it is in brackets.

    Example:
        >>> joined("fd00::1", 29400)
        '[fd00::1]:29400'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_on_hosts(options: RunOptions) -> int:
    """Starts the launchers of all hosts, and waits until they have ended.

    With `--dry-run`, only prints how they would be started.

    Args:
        options: the options of the command; `hosts` must not be empty.

    Returns:
        The job's exit code, from the exit codes of the launchers.

    Raises:
        LaunchError: an option is invalid, or a host cannot be reached or is incompatible.
    """
    try:
        ssh = _split(options.ssh)
        variables = forwarded(os.environ, options.forward)
        settings = Options.from_environment()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if options.dry_run:
        return _show(options, ssh)
    variables[Variable.SECRET] = os.environ.get(Variable.SECRET) or new_secret()
    with Signals() as signals:
        job = HostsJob(
            options,
            ssh,
            {"environment": variables},
            signals,
            timeout=settings.start_timeout,
            silence=settings.heartbeat_timeout,
        )
        try:
            job.start()
            return job.run()
        finally:
            job.end()


def _split(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ValueError(f"--ssh must be a command: {error}. Received: {command!r}") from error
    if not words:
        raise ValueError("--ssh must be a command, such as 'ssh -p 2222'. Received: ''")
    return words


def _show(options: RunOptions, ssh: Sequence[str]) -> int:
    address = "HOST0:PORT" if options.rendezvous is None else joined(*options.rendezvous)
    for number, host in enumerate(options.hosts):
        where = "here" if is_this_machine(host) else shlex.join((*ssh, host.name))
        print(f"host {number} ({where}): {remote_command()}")
        print(f"  tfdist run {shlex.join(launcher_arguments(options, number, address))}")
    return 0
