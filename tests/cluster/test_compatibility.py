"""Rank 0's compatibility check of a connecting process."""

import dataclasses

import pytest

from tfdist.cluster.auth.compatibility import disagreement, duplicate
from tfdist.cluster.auth.identity import Identity

CLUSTER = (("worker", 0, "h0:1"), ("worker", 1, "h1:1"))
MINE = Identity(1, "0.1", "f", CLUSTER, 0, "host0", 10, "n0")
THEIRS = dataclasses.replace(MINE, rank=1, host="host1", pid=11, nonce="n1")


def test_compatible():
    assert disagreement(MINE, THEIRS) is None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"version": "0.2"}, ["versions", "0.1 at worker 0 (h0:1)", "0.2 at worker 1", "Install"]),
        ({"protocol": 2}, ["protocols", "1 at worker 0", "2 at worker 1"]),
        ({"rank": 2}, ["rank 2, process 11 on host1", "no such rank among 2"]),
        (
            {"cluster": (("worker", 0, "h0:1"), ("worker", 1, "h1:2"))},
            ['"worker"[1] is "h1:1" at worker 0', '"h1:2" at worker 1 (h1:2), process 11 on host1'],
        ),
        (
            {"cluster": (("worker", 0, "h0:1"),)},
            ['"worker"[1] is "h1:1" at worker 0', "absent at rank 1, process 11 on host1"],
        ),
        (
            {"cluster": (*CLUSTER, ("worker", 2, "h2:1"))},
            ['"worker"[2] is absent at worker 0', '"h2:1" at worker 1'],
        ),
        (
            {"cluster": (("chief", 0, "h0:1"), ("worker", 0, "h1:1"))},
            ['"worker"[0] is "h0:1" at worker 0', '"h1:1" at worker 0 (h1:1)'],
        ),
        ({"cluster": CLUSTER[::-1]}, ["order of the entries"]),
    ],
)
def test_disagreement(change, parts):
    message = str(disagreement(MINE, dataclasses.replace(THEIRS, **change)))
    for part in parts:
        assert part in message
    assert "cluster" not in change or 'Give all workers the same "cluster"' in message


def test_duplicate():
    message = str(duplicate(THEIRS, dataclasses.replace(THEIRS, host="host2", pid=12)))
    for part in ("worker 1 (h1:1)", "process 11 on host1", "process 12 on host2", "task index"):
        assert part in message
