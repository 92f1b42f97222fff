"""A job on the hosts of a list: starts their launchers, passes signals on, and reaps them."""

from __future__ import annotations

import math
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._src.launch.console import say
from tfdist._src.launch.hosts.rendezvous import Deadline
from tfdist._src.launch.job.run_options import RunOptions
from tfdist._src.launch.job.signals import Signals
from tfdist._src.launch.ssh.remote_host import SSH_FAILED, RemoteHost
from tfdist._version import __version__
from tfdist.errors import LaunchError

# Seconds until a lost host of an elastic job is tried again, the first time and at most.
_RETRY_SECONDS = (5.0, 60.0)
_MOST_RETRIES = 8
# Signals, output and the ends of processes wake this process; what has been missed is seen then.
_CHECK_SECONDS = 1.0
# How long the launchers may take to end after they have been told to; longer than their own grace.
_END_SECONDS = 60.0
# Signs of life in the time of which a host ends its launcher without one.
_BEATS = 6


@dataclass(frozen=True)
class _Retry:
    """When a lost host is tried again, and for which time."""

    due: float = 0.0
    count: int = 0

    def next(self, now: float) -> _Retry:
        delay = min(_RETRY_SECONDS[0] * 2**self.count, _RETRY_SECONDS[1])
        return _Retry(now + delay, self.count + 1)


class HostsJob:
    """The hosts, and what is to be done with them next.

    Args:
        options: those of the command.
        ssh: the command that reaches other hosts.
        task: what each agent is told first.
        signals: those that this process receives.
        timeout: seconds in which a host has to answer.
        silence: seconds after which a host ends its launcher if it hears nothing of this process.
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
        """Reaches all hosts, and tells them where to meet and what to run."""
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
                raise SystemExit(128 + number)
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
        """Ends what still runs, and waits for it, unless a signal comes meanwhile."""
        for host in self._running.values():
            host.end()
        deadline = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < deadline and not self._signals.take():
            self._wait(0.2)
            self._running = {n: h for n, h in self._running.items() if h.exit_code() is None}
        for host in self._running.values():
            host.kill()

    def _pass_on(self, number: signal.Signals) -> None:
        """Signals the launchers, of which host 0's tells the others what concerns them."""
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
        """Waits for a signal or for output, and passes the output on."""
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
        """Where the launchers meet: host 0, as the others reach it."""
        if len(self._options.hosts) == 1:
            return ""  # Nobody has to be met.
        if self._options.rendezvous is not None:
            host, port = self._options.rendezvous
        else:
            first, second = self._running[0], self._running[1]
            # How this command has reached it; or how another host is reached from it.
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
            lost = not host.local and (code == SSH_FAILED or code < 0)  # or ssh was killed
            if lost and host.told:
                say(f"the connection to {host.name} is lost")
            now = time.monotonic()
            if not lost and host.told:
                self._codes[number] = code if code >= 0 else 128 - code
                if code and self._failed_at is None:
                    self._failed_at = now
            retry = self._retries.pop(number, None)
            if (lost or (retry and code)) and self._options.elastic and number > 0:
                self._retries[number] = (retry or _Retry()).next(now)

    def _retry(self) -> None:
        """Reaches lost hosts of an elastic job again; host 0 admits their launchers."""
        now = time.monotonic()
        if self._stopped or 0 not in self._running:  # It is ending, or nobody can admit a host.
            for host in self._running.values():
                if not host.told:
                    host.end()
            return
        for number, retry in self._retries.items():
            if number not in self._running and retry.due <= now and retry.count <= _MOST_RETRIES:
                listed = self._options.hosts[number]
                say(f"connecting to {listed.name} again")
                self._running[number] = RemoteHost(number, listed, self._ssh, self._task)
        for host in self._running.values():
            if host.told:
                continue
            problem = _problem(host)
            if problem:
                say(problem)
            if problem or now > host.begun + self._timeout:
                host.end()
            elif host.description:
                self._order(host)

    def _give_up(self) -> None:
        """Ends launchers that go on waiting for one that has failed."""
        if self._options.elastic or self._failed_at is None:
            return
        if time.monotonic() > self._failed_at + _END_SECONDS:
            for host in self._running.values():
                host.end()

    def _code(self) -> int:
        """The one that all launchers end with; where they differ, the first failure's.

        An elastic job has succeeded if one of them says so.
        """
        codes = list(self._codes.values())  # in the order of their ends
        if not codes:
            return 1
        if self._options.elastic and 0 in codes:
            return 0
        return next((code for code in codes if code), 0)


def _problem(host: RemoteHost) -> str:
    """Why a host cannot take part, and the remedy, in one line; "" if nothing is known."""
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
        rendezvous: the address where the launchers of several hosts meet.
    """
    workers = options.hosts[number].workers
    own = ["-n", "auto" if workers is None else str(workers)]
    if len(options.hosts) > 1:
        own += ["--nnodes", str(len(options.hosts)), "--node-rank", str(number)]
        own += ["--rendezvous", rendezvous]
    return [*own, *options.launcher_arguments]


def joined(host: str, port: int) -> str:
    """`"host:port"`, with an IPv6 host in brackets.

    Example:
        >>> joined("fd00::1", 29400)
        '[fd00::1]:29400'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
