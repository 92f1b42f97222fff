"""A job on the hosts of a list: starts their launchers, and ends with the job's exit code."""

from __future__ import annotations

import math
import os
import select
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfdist._version import __version__
from tfdist.cluster.auth.hmac_challenge import VARIABLE, new_secret
from tfdist.errors import LaunchError
from tfdist.launch.console import say
from tfdist.launch.hosts.rendezvous import Deadline
from tfdist.launch.job.run_options import RunOptions
from tfdist.launch.job.signals import Signals
from tfdist.launch.ssh.forwarded import forwarded
from tfdist.launch.ssh.remote_host import SSH_FAILED, RemoteHost, is_this_machine, remote_command
from tfdist.options import Options

# Seconds until a lost host of an elastic job is tried again, the first time and at most.
_RETRY_SECONDS = (5.0, 60.0)
_MOST_RETRIES = 8
# Signals, output and the ends of processes wake this process; what has been missed is seen then.
_CHECK_SECONDS = 1.0
# How long the launchers may take to end after they have been told to; longer than their own grace.
_END_SECONDS = 60.0


def run_on_hosts(options: RunOptions) -> int:
    """Runs the launchers of all hosts until they have ended.

    Args:
        options: those of the command, with `hosts`.

    Returns:
        The job's exit code, as the launchers tell it.

    Raises:
        LaunchError: a host cannot be reached, or does not fit.
    """
    ssh = tuple(shlex.split(options.ssh))
    try:
        variables = forwarded(os.environ, options.forward)
        timeout = Options.from_environment().start_timeout
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if options.dry_run:
        return _show(options, ssh)
    variables[VARIABLE] = os.environ.get(VARIABLE) or new_secret()
    with Signals() as signals:
        job = _Job(options, ssh, {"environment": variables}, signals)
        try:
            job.start(Deadline(timeout))
            return job.run()
        finally:
            job.end()


def _show(options: RunOptions, ssh: Sequence[str]) -> int:
    address = "HOST0:PORT" if len(options.hosts) > 1 else ""
    for number, host in enumerate(options.hosts):
        where = "here" if is_this_machine(host.address) else shlex.join((*ssh, host.name))
        print(f"host {number} ({where}): {remote_command()}")
        print(f"  tfdist run {shlex.join(launcher_arguments(options, number, address))}")
    return 0


def launcher_arguments(options: RunOptions, number: int, rendezvous: str) -> list[str]:
    """The command line of one host's launcher, without `tfdist run`.

    Args:
        options: those of the command.
        number: the host's number.
        rendezvous: where the launchers meet; "" for a single host.
    """
    workers = options.hosts[number].workers
    own = ["-n", "auto" if workers is None else str(workers)]
    if rendezvous:
        own += ["--nnodes", str(len(options.hosts)), "--node-rank", str(number)]
        own += ["--rendezvous", rendezvous]
    return [*own, *options.launcher_arguments]


@dataclass(frozen=True)
class _Retry:
    """When a lost host is tried again, and for which time."""

    due: float = 0.0
    count: int = 0

    def next(self, now: float) -> _Retry:
        delay = min(_RETRY_SECONDS[0] * 2**self.count, _RETRY_SECONDS[1])
        return _Retry(now + delay, self.count + 1)


class _Job:
    """The hosts, and what is to be done with them next."""

    def __init__(
        self, options: RunOptions, ssh: Sequence[str], task: dict[str, Any], signals: Signals
    ) -> None:
        self._options = options
        self._ssh = ssh
        self._task = task
        self._signals = signals
        self._rendezvous = ""
        self._running: dict[int, RemoteHost] = {}
        self._codes: dict[int, int] = {}
        self._retries: dict[int, _Retry] = {}
        self._stopped = False
        self._interrupted = False

    def start(self, deadline: Deadline) -> None:
        """Reaches all hosts, and tells them where to meet and what to run."""
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
                _check(host)
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
        return self._code()

    def end(self) -> None:
        """Ends what still runs, and waits for it."""
        for host in self._running.values():
            host.end()
        deadline = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < deadline:
            self._wait(0.2)
            self._running = {n: h for n, h in self._running.items() if h.exit_code() is None}

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
            return ""
        if self._options.rendezvous is not None:
            host, port = self._options.rendezvous
        else:
            first, second = self._running[0], self._running[1]
            # How this command has reached it; or how another host is reached from it.
            seen = second.description["client"] if first.local else first.description["server"]
            host = seen or self._options.hosts[0].address
            port = first.description["port"]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _reap(self) -> None:
        for number, host in list(self._running.items()):
            code = host.exit_code()
            if code is None:
                continue
            del self._running[number]
            lost = not host.local and (code == SSH_FAILED or code < 0)  # or ssh was killed
            if lost and host.told:
                say(f"the connection to {host.name} is lost")
            if not lost and host.told:
                self._codes[number] = code
            again = lost or (number in self._retries and code != 0)
            if again and self._options.elastic and number > 0:
                self._retries[number] = self._retries.get(number, _Retry()).next(time.monotonic())

    def _retry(self) -> None:
        """Reaches lost hosts of an elastic job again; host 0 admits their launchers."""
        if self._stopped or 0 not in self._running:
            return  # The job is ending, or nobody can admit a host.
        now = time.monotonic()
        for number, retry in self._retries.items():
            if number not in self._running and retry.due <= now and retry.count <= _MOST_RETRIES:
                listed = self._options.hosts[number]
                say(f"connecting to {listed.name} again")
                self._running[number] = RemoteHost(number, listed, self._ssh, self._task)
        for host in self._running.values():
            if host.description and not host.told:
                self._order(host)

    def _code(self) -> int:
        """Host 0's, which all agree on; if it is lost, that of the others."""
        own = [code for _, code in sorted(self._codes.items())]
        if self._options.elastic and 0 in own:
            return 0
        return own[0] if own else 1


def _check(host: RemoteHost) -> None:
    if host.exit_code() is not None:
        raise LaunchError(host.why())
    version = host.description.get("version", __version__)
    if version != __version__:
        raise LaunchError(
            f"{host.name} has tfdist {version}, this host has {__version__}: "
            f"install the same version on all hosts"
        )
