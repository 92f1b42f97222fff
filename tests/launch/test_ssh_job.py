"""The hosts of `tfdist run --hosts`, as scripts: which are reached again, and when all is over."""

from __future__ import annotations

import signal

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch import ssh
from tfdist._src.launch.job.run_options import parse
from tfdist._src.launch.job.shutdown import Signals

FAILED = ssh.SSH_FAILED


class Host:
    """A host: what it does in each life, as `("answers", code)` or `("silent", None)`.

    A code is returned once `after()` is true, if there is such a condition.
    """

    local, name, descriptors = False, "b", ()

    def __init__(self, number, script):
        self.number, self.told, self.begun = number, False, ssh.time.monotonic()
        kind, self._code, self._after = script
        self.description = {"port": 1, "server": "s", "client": "c"} if kind == "answers" else {}
        self.ended, self.signals = False, []

    def order(self, arguments):
        self.told = True

    def signal(self, number):
        self.signals.append(number)

    def beat(self):
        pass

    def end(self):
        self.ended = True

    kill = end

    def exit_code(self):
        if self.ended:
            return -15
        return self._code if self.told and self._after() else None

    def why(self):
        return "why"


@pytest.fixture
def play(monkeypatch):
    """Runs a job whose hosts do what scripts say; returns its code, and the hosts in order."""

    def play(scripts, *options, timeout=60.0, during=lambda hosts, signals: None):
        lives, hosts = {n: iter(script) for n, script in enumerate(scripts)}, []

        def begin(number, listed, ssh, task):
            kind, code, *after = next(lives[number])
            hosts.append(Host(number, (kind, code, after[0] if after else lambda: True)))
            return hosts[-1]

        monkeypatch.setattr(ssh, "RemoteHost", begin)
        monkeypatch.setattr(ssh, "_CHECK_SECONDS", 0.01)
        monkeypatch.setattr(ssh, "_RETRY_SECONDS", (0.0, 0.0))
        monkeypatch.setattr(ssh, "_END_SECONDS", 0.05)
        monkeypatch.setattr("os.path.exists", lambda path: True)
        parsed = parse(["--hosts", "a:1,b:1", *options, "x.py"])
        with Signals() as signals:
            running = ssh.HostsJob(parsed, ("ssh",), {}, signals, timeout, silence=60.0)
            wait = running._wait

            def waiting(seconds):
                during(hosts, signals)
                wait(0.01)

            monkeypatch.setattr(running, "_wait", waiting)
            try:
                running.start()
                return running.run(), hosts
            finally:
                running.end()

    return play


@exhaustive
def test_a_host_that_came_again_and_has_ended_is_left_alone(play):
    ends = []
    scripts = [
        [("answers", 0, lambda: len(ends) > 5)],
        [("answers", FAILED), ("answers", 0, lambda: ends.append(1) or True)],
    ]
    during = lambda hosts, signals: ends.append(1) if ends else None  # noqa: E731
    code, hosts = play(scripts, "--elastic", during=during)
    assert code == 0
    assert [host.number for host in hosts] == [0, 1, 1]


@exhaustive
def test_the_end_of_the_job_ends_a_retry(play):
    began = []
    scripts = [
        [("answers", 0, lambda: bool(began))],
        [("answers", FAILED), ("silent", None)],
    ]

    def during(hosts, signals):
        if len(hosts) == 3:
            began.append(1)

    code, hosts = play(scripts, "--elastic", during=during)
    assert code == 0
    assert hosts[2].ended and not hosts[2].told


@exhaustive
def test_a_retry_that_is_silent_is_given_up(play):
    scripts = [
        [("answers", 0, lambda: False)],
        [("answers", FAILED), ("silent", None), ("answers", 0)],
    ]
    done = []

    def during(hosts, signals):
        if len(hosts) == 4 and hosts[3].told:
            done.append(1)
            hosts[0]._after = lambda: True

    code, hosts = play(scripts, "--elastic", timeout=0.05, during=during)
    assert code == 0
    assert hosts[2].ended and done


@exhaustive
def test_a_launcher_that_fails_alone_ends_the_others(play):
    code, hosts = play([[("answers", 0, lambda: False)], [("answers", 2)]])
    assert code == 2
    assert hosts[0].ended


@exhaustive
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whom_a_signal_reaches(play, number):
    sent = []

    def during(hosts, signals):
        if len(hosts) == 2 and hosts[1].told and not sent:
            sent.append(1)
            signal.raise_signal(number)
        if hosts and hosts[0].signals:
            for host in hosts:
                host._after = lambda: True

    never = ("answers", 128 + number, lambda: False)
    code, hosts = play([[never], [never]], "--elastic", during=during)
    assert code == 128 + number
    others = [number] if number == signal.SIGTERM else []
    assert [host.signals for host in hosts] == [[number], others]
