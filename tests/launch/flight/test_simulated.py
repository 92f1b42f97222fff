"""Logs of simulated jobs: what they are said to tell was so."""

from __future__ import annotations

import random

from tests.harness.tiers import exhaustive
from tests.launch.flight.logs import START, diagnosis, group, log, names, peer, record
from tfdist._src.launch.flight.findings import Cycle, Mismatch, MissingWorkers

RANKS = 5


def simulate(seed):
    """Joins, per collective and rank, in seconds; and the logs of some ranks, cut at any time."""
    chance = random.Random(seed)
    joins, now = [], [0.0] * RANKS
    for _ in range(12):
        joins.append([time + chance.expovariate(0.5) for time in now])
        now = [max(joins[-1])] * RANKS
    clocks = [chance.uniform(-9, 9) for _ in range(RANKS)]
    logs = []
    for rank in sorted(chance.sample(range(RANKS), chance.randint(1, RANKS))):
        cut = chance.uniform(0, max(now))
        records = []
        for number, begun in enumerate(joins, start=1):
            if begun[rank] < cut:
                end = max(begun)
                records.append(
                    shifted(number, begun[rank], end if end < cut else None, clocks[rank])
                )
        # The others' clocks are known, or not; what is heard is a little old.
        peers = [
            peer(
                other,
                cut - 0.2 + clocks[rank],
                sum(begun[other] < cut - 0.2 for begun in joins),
                clock_offset_ns=round((clocks[other] - clocks[rank]) * 1e9),
                clock_uncertainty_ns=1000,
            )
            for other in range(RANKS)
            if other != rank
        ]
        part = group(rank, records[chance.randint(0, 3) :], range(RANKS), peers=peers)
        logs.append(log(rank, part, written=cut, steady=clocks[rank], size=RANKS))
    return joins, logs


def shifted(number, begun, ended, clock):
    return record(number, begun + clock, None if ended is None else ended + clock)


@exhaustive
def test_nobody_is_accused_wrongly(tmp_path):
    accused = 0
    for seed in range(400):
        joins, logs = simulate(seed)
        there = {one["worker"] for one in logs}
        # Shared time is that of the first log, whose Unix time is right.
        for finding in diagnosis(tmp_path, *logs).findings:
            assert not isinstance(finding, (Cycle, Mismatch)), seed
            if isinstance(finding, MissingWorkers):
                for one in finding.absent:
                    rank = names(*range(RANKS)).index(one.worker)
                    joined = joins[finding.operation.number - 1][rank]
                    if one.worker in there:
                        accused += 1
                        assert joined > finding.time - START + one.seconds - 0.001, seed
    assert accused > 50


@exhaustive
def test_the_absent_one_of_many_ranks_is_found(tmp_path):
    size = 256
    done = [record(n, n, n + 0.5, last=(n % size, n + 0.4)) for n in range(1, 1000)]
    ranks = range(size)
    logs = [
        log(
            r,
            group(r, [*done, *([record(1000, 1000)] if r != 7 else [])], ranks),
            size=size,
            written=1100,
        )
        for r in ranks
    ]
    found = diagnosis(tmp_path, *logs)
    (absence,) = found.findings
    assert [one.worker for one in absence.absent] == names(7)
    assert len(absence.waiting) == size - 1
    assert len(found.totals) == size
    assert abs(sum(t.waited for t in found.totals) - 999 * 0.4 * size) < 1
