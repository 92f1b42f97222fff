"""When a waiting worker reports, and what."""

import pytest

from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.net import wait_messages
from tfdist._src.cluster.net.wait_messages import WaitMessages, named


def worker(number):
    return Worker("worker", number, f"h{number}:2222")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(wait_messages, "time", clock)
    return clock


def test_soon_at_first_then_less_often(clock):
    lines = []
    waiting = WaitMessages(worker(0), 300.0, lines.append)
    for second in range(31):
        clock.now = 100.0 + second
        waiting.report(lambda: "worker 2 (h2:2222)")
    start = "worker 0 (h0:2222) waiting for worker 2 (h2:2222)"
    assert lines == [f"{start} [{second} s of 300 s]" for second in (3, 13, 23)]


def test_many_names_are_truncated():
    assert named([worker(1), worker(2)]) == "worker 1 (h1:2222), worker 2 (h2:2222)"
    text = named([worker(n) for n in range(20)])
    assert text.endswith("worker 7 (h7:2222) and 12 more")
