"""What each restart policy does: tables of events and actions, and random jobs of several hosts."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import deque
from signal import SIGHUP, SIGINT, SIGTERM

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.job.failure import lost_host, stopped_by, worker_failure
from tfdist._src.launch.job.shutdown import Grace
from tfdist._src.launch.restart_all import HostEnd, RestartAll, RestartDecision
from tfdist._src.launch.restart_one import RestartOne, WorkerCounts
from tfdist._src.launch.restart_policy import (
    Begin,
    End,
    EscalateSignal,
    PrintFailure,
    PrintMessage,
    Send,
    Start,
    Stop,
)
from tfdist._src.options import PREEMPTED
from tfdist._src.progress_file import Progress, UncaughtException

GRACE = Grace(failure=5.0, preemption=25.0)
LIMIT = 2
KINDS = ("none", "all", "one")


def make(kind, ranks, host=0, hosts=(), now=0.0):
    if kind == "one":
        return RestartOne(ranks, host, hosts, GRACE, limit=LIMIT, now=now, silence=60.0)
    limit = 0 if kind == "none" else LIMIT
    return RestartAll(ranks, host, hosts, GRACE, limit=limit, now=now, new_secret=lambda: "hush")


def failed(status=1, step=7, *raised, rank=1):
    progress = Progress(step, UncaughtException(raised, (), "bad") if raised else None)
    return worker_failure(host=0, rank=rank, status=status, tail=(), log="log", progress=progress)


# Events: the seconds since the one before, and a call of the policy.


def ends(rank, status=0, step=7, *raised, after=0.0, stuck=""):
    failure = failed(status, step, *raised, rank=rank) if status else None
    return after, lambda policy, now: policy.exited(rank, failure, now, stuck)


def signaled(number, after=0.0):
    return after, lambda policy, now: policy.signaled(number, stopped_by(0, number), now)


def loses(host):
    return 0.0, lambda policy, now: policy.lost(host, lost_host(host, "a"), now)


def hears(host, kind, value=None):
    return 0.0, lambda policy, now: policy.received(host, kind, sent(value), now)


def passes(seconds):
    return seconds, lambda policy, now: None


def sent(value):
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    return json.loads(json.dumps(value))


def words(action, now):
    match action:
        case Begin():
            return f"begin {action.generation}"
        case Start():
            return f"start {action.rank}" + (" again" if action.replacement else "")
        case Stop():
            ranks = " ".join(map(str, action.ranks))
            later = f" in {action.at - now:g} s" if action.at > now else ""
            return f"stop {ranks} by {action.first.name}/{action.grace:g}{later}"
        case EscalateSignal():
            return f"harden {action.signal.name}"
        case Send():
            return f"send {action.kind}"
        case PrintMessage():
            return "say"
        case PrintFailure():
            return f"show {action.failure.subject}" if action.failure else "show logs"
        case End():
            return f"end {action.code}"


def run(policy, events, sends):
    """The actions after the start, in words."""
    found, now = [], 0.0
    policy.take()
    for after, event in events:
        now += after
        event(policy, now)
        policy.advance(now)
        actions = policy.take()
        hidden = () if sends else (Send,)
        found += [words(one, now) for one in actions if not isinstance(one, hidden)]
        if any(isinstance(action, End) for action in actions):
            break
    return "; ".join(one for one in found if one not in COUNTS)


COUNTS = ("send counts", "send job")  # Sent with every change.
PEER = ("PeerLostError", "RuntimeError")
STOP = "say; stop 0 by SIGTERM/5 in 1 s"
AGAIN = "begin 1; start 0; start 1"
BOTH = "stop 0 1 by"
EACH = "say; start 1 again; say; start 0 again"

# Two workers on host 0: the events, and what "none", "all" and "one" do.
ALONE = {
    "a clean end": ([ends(0), ends(1)], "end 0", "end 0", "end 0"),
    "one worker fails": (
        [ends(1, -9), ends(0, -15, after=1.0), passes(0.9), passes(0.1)],
        f"{STOP}; show worker 1; end 137",
        f"{STOP}; show worker 1; say; {AGAIN}",
        EACH,
    ),
    "two fail together, one of them since it lost the other": (
        [ends(1, 1, 7, *PEER), ends(0, -11), passes(1.0)],
        "show worker 0; end 139",
        f"show worker 0; say; {AGAIN}",
        EACH,
    ),
    "the same failure twice": (
        [
            *(ends(1, -9), ends(0, -15), passes(1.0)),
            *(ends(1, -9), ends(0, -15)),
        ],
        f"{STOP}; show worker 1; end 137",
        f"{STOP}; show worker 1; say; {AGAIN}; {STOP}; show worker 1; end 137",
        f"{EACH}; say; say; show worker 1; end 137",
    ),
    "the limit is reached": (
        [one for step in (1, 2, 3) for one in (ends(1, -9, step), ends(0, -15, step), passes(9.0))],
        f"{STOP}; show worker 1; end 137",
        f"{STOP}; show worker 1; say; {AGAIN}; {STOP}; show worker 1; say; "
        f"{AGAIN.replace('begin 1', 'begin 2')}; {STOP}; show worker 1; end 137",
        f"{EACH}; {EACH}; say; say; show worker 1; end 137",
    ),
    "an error that a restart does not change": (
        [ends(1, 1, None, "ImportError"), ends(0)],
        f"{STOP}; show worker 1; end 1",
        f"{STOP}; show worker 1; end 1",
        "say; show logs; end 0",
    ),
    "SIGTERM, and the workers save their state": (
        [signaled(SIGTERM), ends(0, PREEMPTED), ends(1, PREEMPTED)],
        *[f"{BOTH} SIGTERM/25; end 75"] * 3,
    ),
    "SIGTERM twice, and one worker does not save": (
        [signaled(SIGTERM), signaled(SIGTERM, 2.0), ends(0, PREEMPTED), ends(1, -9)],
        *[f"{BOTH} SIGTERM/25; harden SIGTERM; show this command; end 143"] * 2,
        f"{BOTH} SIGTERM/25; harden SIGTERM; say; end 143",
    ),
    "Ctrl-C": (
        [signaled(SIGINT), ends(0, -2), ends(1, -2)],
        *[f"{BOTH} SIGINT/5; show this command; end 130"] * 2,
        f"{BOTH} SIGINT/5; say; end 130",
    ),
    "Ctrl-C twice": (
        [signaled(SIGINT), signaled(SIGINT, 1.0), ends(0, -9), ends(1, -9)],
        *[f"{BOTH} SIGINT/5; harden SIGKILL; show this command; end 130"] * 2,
        f"{BOTH} SIGINT/5; harden SIGKILL; say; end 130",
    ),
    "SIGTERM after a failure": (
        [ends(1, -9), signaled(SIGTERM, 0.5), ends(0, PREEMPTED), ends(1, PREEMPTED)],
        *[f"{STOP}; harden SIGTERM; show worker 1; end 137"] * 2,
        f"say; start 1 again; {BOTH} SIGTERM/25; show logs; end 75",
    ),
    "SIGTERM before the restart": (
        [
            *(ends(1, -9), ends(0, -15)),
            *(signaled(SIGTERM, 0.5), ends(0, PREEMPTED), ends(1, PREEMPTED)),
        ],
        f"{STOP}; show worker 1; end 137",
        f"{STOP}; show worker 1; say; say; end 143",
        f"{EACH}; {BOTH} SIGTERM/25; show logs; end 75",
    ),
    "a scheduler asks the workers to save their state": (
        [ends(1, PREEMPTED), ends(0, PREEMPTED, after=5.0)],
        *["end 75"] * 2,
        "say; say; end 75",
    ),
    "one worker saves its state, the other one fails": (
        [ends(1, PREEMPTED), ends(0, 3, after=5.0)],
        "show worker 0; end 3",
        "show worker 0; say",
        "say; say; show logs; end 75",
    ),
    "one worker saves its state, the other one does not follow": (
        [ends(1, PREEMPTED), passes(26.0), ends(0, -15)],
        "say; stop 0 by SIGTERM/25 in 1 s; show worker 1; end 1",
        "say; stop 0 by SIGTERM/25 in 1 s; show worker 1; say",
        "say; say; show logs; end 75",
    ),
    "a worker that SIGKILL does not end": (
        [ends(1, -9), ends(0, -9, after=20.0, stuck="0 (pid 7)")],
        *[f"{STOP}; show worker 1; end 137"] * 2,
        "say; start 1 again; say",
    ),
    "a worker that SIGKILL does not end has not saved its state": (
        [signaled(SIGTERM), ends(0, PREEMPTED), ends(1, -9, stuck="1 (pid 7)")],
        *[f"{BOTH} SIGTERM/25; show this command; end 143"] * 2,
        f"{BOTH} SIGTERM/25; say; end 143",
    ),
}
# The same with host 1 in addition, and with the messages.
WITH_HOST_1 = {
    "a clean end": (
        [ends(0), ends(1), hears(1, "done"), hears(1, "counts", WorkerCounts(completed=2))],
        *["send finish; end 0"] * 2,
        "send end; end 0",
    ),
    "a host is lost": (
        [loses(1), ends(0), ends(1)],
        *[
            f"send stop; say; {BOTH} SIGTERM/5 in 1 s; send verdict; show host 1 (a); end 1",
        ]
        * 2,
        "say; send end; show logs; end 0",
    ),
    "a worker of another host fails": (
        [
            *(hears(1, "failed", failed(-9, rank=2)), hears(1, "end", HostEnd((-9,)))),
            *(ends(0, -15), ends(1, -15), passes(1.0)),
        ],
        f"send stop; say; {BOTH} SIGTERM/5 in 1 s; send verdict; show worker 2; end 137",
        f"send stop; say; {BOTH} SIGTERM/5 in 1 s; send verdict; show worker 2; say; "
        f"send begin; {AGAIN}",
        "say; start 0 again; say; start 1 again",
    ),
    "another host does not report its end": (
        [ends(1, -9), ends(0, -15), passes(89.0), passes(1.0)],
        *[f"send stop; {STOP}; send verdict; show worker 1; end 137"] * 2,
        EACH,
    ),
    "SIGTERM is for this host": (
        [
            signaled(SIGTERM),
            ends(0, PREEMPTED),
            ends(1, PREEMPTED),
            hears(1, "end", HostEnd((75,))),
        ],
        *[f"send stop; {BOTH} SIGTERM/25; send verdict; end 75"] * 2,
        f"send leave; {BOTH} SIGTERM/25; end 75",
    ),
}


# The same two workers on host 1, which is connected with host 0.
ON_HOST_1 = {
    "a clean end": (
        [ends(0), ends(1), hears(0, "finish"), hears(0, "end", 0)],
        *["send done; end 0"] * 2,
        "end 0",
    ),
    "host 0 announces another failure": (
        [
            *(ends(1, 1, 7, *PEER), hears(0, "stop", failed(-9, rank=2))),
            *(ends(0, -15), hears(0, "verdict", RestartDecision(failed(-9, rank=2)))),
        ],
        *[
            "send failed; say; stop 0 by SIGTERM/5 in 1 s; send exited; send end; "
            "show worker 2; end 137"
        ]
        * 2,
        f"send loss; say; start 1 again; say; {BOTH} SIGTERM/5",
    ),
    "host 0 begins a generation, whose end follows at once": (
        [
            *(ends(1, -9), hears(0, "stop", failed(-9)), ends(0, -15)),
            *(hears(0, "verdict", RestartDecision(failed(-9), 1, 2, 1.0)), passes(1.0)),
            *(hears(0, "begin", Begin(1, "hush")), hears(0, "stop", failed(3, rank=2))),
        ],
        *[
            f"send failed; {STOP}; send exited; send end; show worker 1; say; {AGAIN}; say; "
            f"{BOTH} SIGTERM/5 in 1 s"
        ]
        * 2,
        f"send loss; say; start 1 again; say; {BOTH} SIGTERM/5",
    ),
    "host 0 does not answer": (
        [ends(1, -9), passes(2.9), passes(0.1), ends(0, -15), passes(119.0), passes(1.0)],
        *[f"send failed; {STOP}; send exited; send end; show worker 1; end 137"] * 2,
        "send loss; say; start 1 again; send loss; say; start 0 again",
    ),
    "host 0 is lost": (
        [loses(0), ends(0), ends(1)],
        *[f"say; {BOTH} SIGTERM/5 in 1 s; send done; send end; show host 0 (a); end 1"] * 2,
        "say; send end; end 0",
    ),
    "SIGTERM is for this host": (
        [
            *(signaled(SIGTERM), ends(0, PREEMPTED), ends(1, PREEMPTED)),
            hears(0, "verdict", RestartDecision(stopped_by(1, SIGTERM), saved=True)),
        ],
        *[f"send failed; {BOTH} SIGTERM/25; send done; send end; end 75"] * 2,
        f"send leave; {BOTH} SIGTERM/25; end 75",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_policy_answers_events_with_its_actions(kind):
    for host, hosts, table in [(0, (), ALONE), (0, (1,), WITH_HOST_1), (1, (0,), ON_HOST_1)]:
        for name, (events, *expected) in table.items():
            found = run(make(kind, [0, 1], host, hosts), events, bool(hosts))
            assert found == expected[KINDS.index(kind)], name


class Host:
    """One host of a simulated job."""

    def __init__(self, kind, number, num_hosts, now):
        others = range(1, num_hosts) if number == 0 else [0]
        self.policy = make(kind, [2 * number, 2 * number + 1], number, others, now)
        self.number = number
        self.others = set(others)
        self.running = {}  # Rank -> whether it is being stopped.
        self.starts = 0
        self.code = None


class Simulation:
    """A job on several hosts. Messages arrive at once, in order; all else happens at random."""

    def __init__(self, kind, num_hosts, rng):
        self.now, self.rng = 0.0, rng
        self.mail = deque()
        self.hosts = [Host(kind, number, num_hosts, self.now) for number in range(num_hosts)]
        self.asked = self.broken = False
        for host in self.hosts:
            self.execute(host)

    @property
    def alive(self):
        return [host for host in self.hosts if host.code is None]

    def step(self):
        self.deliver()
        if not self.alive:
            return
        host = self.rng.choice(self.alive)
        chance = self.rng.random()
        if host.running and chance < 0.6:
            self.end_worker(host, self.rng.choice(sorted(host.running)))
        elif chance < 0.62 and not self.asked:
            self.asked = True
            number = self.rng.choice([SIGINT, SIGTERM, SIGHUP])
            host.policy.signaled(number, stopped_by(host.number, number), self.now)
        elif chance < 0.64 and host.others and not self.broken:
            self.broken = True
            self.disconnect(host, self.rng.choice(sorted(host.others)))
        elif chance < 0.7:
            for rank in host.policy.joining:
                host.policy.trained(rank)
        else:
            self.pass_time()
        for host in self.alive:
            self.execute(host)

    def pass_time(self):
        """No worker survives the signals until the next deadline."""
        stopping = [(host, rank) for host in self.alive for rank in host.running]
        stopping = [(host, rank) for host, rank in stopping if host.running[rank]]
        for host, rank in stopping:
            self.end_worker(host, rank)
        if not stopping:
            times = [host.policy.next_time for host in self.alive]
            due = min((at for at in times if at is not None), default=0.0)
            self.now = max(self.now + 0.1, due)

    def end_worker(self, host, rank):
        usual = [PREEMPTED, -15] if host.running.pop(rank) else [0, 0, 1, 2, -9, PREEMPTED]
        status = self.rng.choice(usual)
        _, event = ends(rank, status, self.rng.choice([None, *range(9)]))
        event(host.policy, self.now)

    def execute(self, host):
        host.policy.advance(self.now)
        for action in host.policy.take():
            assert host.code is None
            match action:
                case Start():
                    assert action.rank not in host.running
                    host.running[action.rank] = False
                    host.starts += 1
                case Stop():
                    host.running |= dict.fromkeys(host.running.keys() & set(action.ranks), True)
                case Send():
                    mail = (host, action.kind, sent(action.value))
                    self.mail += [(self.hosts[other], *mail) for other in sorted(host.others)]
                case End():
                    host.code = action.code
                    for other in sorted(host.others):
                        self.disconnect(host, other)

    def disconnect(self, host, other):
        """Messages that were sent before arrive."""
        other = self.hosts[other]
        self.mail += [(other, host, None, None), (host, other, None, None)]

    def deliver(self):
        while self.mail:
            host, sender, kind, value = self.mail.popleft()
            if host.code is not None or sender.number not in host.others:
                continue
            if kind is None:
                host.others.discard(sender.number)
                failure = lost_host(sender.number, "a")
                host.policy.lost(sender.number, failure, self.now)
            else:
                host.policy.received(sender.number, kind, value, self.now)
            self.execute(host)


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=exhaustive)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_job_ends_on_all_hosts(kind, count):
    for seed in range(count):
        rng = random.Random(seed)
        job = Simulation(kind, rng.choice([1, 2, 3]), rng)
        for _ in range(5000):
            if not job.alive:
                break
            job.step()
        codes = [host.code for host in job.hosts]
        assert None not in codes, (seed, codes)
        assert not any(host.running for host in job.hosts), seed
        runs = 1 if kind == "none" else 1 + LIMIT
        assert all(host.starts <= 2 * runs for host in job.hosts), seed
        # A signal to one host of "one", like a lost connection, ends that host alone.
        if not job.broken and (kind != "one" or not job.asked):
            assert len(set(codes)) == 1, (seed, codes)
