"""Rank 0's compatibility check of a connecting process."""

import dataclasses

import pytest

from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.auth.identity import Identity, disagreement, duplicate, first_difference

TOPOLOGY = Topology((Worker("worker", 0, "h0:1"), Worker("worker", 1, "h1:1")), 0, "worker", 0)
MINE = Identity(1, "0.1", "f", 0, "worker 0 (h0:1)", "host0", 10, "n0")
THEIRS = dataclasses.replace(MINE, rank=1, worker="worker 1 (h1:1)", host="host1", pid=11)


def test_compatible_processes_do_not_disagree():
    assert disagreement(TOPOLOGY, MINE, THEIRS) is None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"version": "0.2"}, ["versions", "0.1 at worker 0 (h0:1)", "0.2 at worker 1", "Install"]),
        ({"protocol": 2}, ["protocols", "1 at worker 0", "2 at worker 1"]),
        ({"rank": 2}, ["worker 1 (h1:1), process 11 on host1", "no such rank among 2"]),
        ({"fingerprint": "g"}, ["different clusters", 'Give all workers the same "cluster"']),
    ],
)
def test_a_disagreement_names_what_differs(change, parts):
    message = str(disagreement(TOPOLOGY, MINE, dataclasses.replace(THEIRS, **change)))
    for part in parts:
        assert part in message


CLUSTER = (("worker", 0, "h0:1"), ("worker", 1, "h1:1"))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (
            (("worker", 0, "h0:1"), ("worker", 1, "h1:2")),
            '"worker"[1] is "h1:1" at rank 0; "h1:2" at rank 1',
        ),
        ((("worker", 0, "h0:1"),), '"worker"[1] is "h1:1" at rank 0; absent at rank 1'),
        (
            (*CLUSTER, ("worker", 2, "h2:1")),
            '"worker"[2] is absent at rank 0; "h2:1" at rank 1',
        ),
        (
            (("chief", 0, "h0:1"), ("worker", 0, "h1:1")),
            '"worker"[0] is "h0:1" at rank 0; "h1:1" at rank 1',
        ),
        (CLUSTER[::-1], "the order of the entries at rank 0 differs from that at rank 1"),
    ],
)
def test_the_first_difference_of_clusters_is_named(other, difference):
    assert first_difference(CLUSTER, "rank 0", other, "rank 1") == difference


def test_a_duplicate_worker_names_both_processes():
    message = str(duplicate(THEIRS, dataclasses.replace(THEIRS, host="host2", pid=12)))
    for part in ("worker 1 (h1:1)", "process 11 on host1", "process 12 on host2", "task index"):
        assert part in message
