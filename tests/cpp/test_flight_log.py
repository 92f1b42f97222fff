"""Flight logs of C++ ranks, as the reader of logs takes them."""

from __future__ import annotations

import pytest

from tests.harness.tiers import exhaustive
from tfdist._src.launch.flight.diagnosis import diagnose
from tfdist._src.launch.flight.findings import Failure, Mismatch
from tfdist._src.launch.flight.merge import merge, read

pytestmark = [exhaustive, pytest.mark.timeout(1800)]

# Why each rank has written, by what happened. One that is waited for writes as well.
KINDS = {
    "error": ["error", "error", "error"],
    "mismatch": ["error", "error", "error"],
    "stall": ["stall", "stall", "waited"],
    "signal": ["signal", "signal", "signal"],
    "nothing": [],
}


def test_the_reader_takes_what_the_core_writes(execute, tmp_path):
    execute("plain", "flight_log", str(tmp_path))
    for hosts in (1, 2):
        for what, kinds in KINDS.items():
            folder = read(tmp_path / f"{what}{hosts}")
            assert not folder.skipped, what
            assert [log.rank for log in folder.logs] == list(range(len(kinds))), what
            # A slow start is a stall as well.
            assert [log.reasons[-1].kind for log in folder.logs] == kinds, what
            assert all(log.stacks == f"Thread of rank {log.rank}" for log in folder.logs), what
            if not kinds:
                continue
            diagnosis = diagnose(merge(folder.logs))
            if hosts == 1:
                assert "unix" not in {worker.clock for worker in diagnosis.workers}, what
            if what == "mismatch":
                # A rank that hears of it before it has begun has only the message.
                found = [one for one in diagnosis.findings if isinstance(one, Mismatch | Failure)]
                assert "rank 1" in str(found[0])
            if what == "error":
                assert 'boom "quoted"' in str(diagnosis.findings)
