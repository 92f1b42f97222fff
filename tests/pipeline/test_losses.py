"""A worker that is killed or stopped: all others say who, and which stages it held."""

from __future__ import annotations

import pytest

from tests.harness.deadlines import FAR
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive
from tests.pipeline.loss_behaviours import VICTIM, VICTIMS

CASES = [
    (phase, signal)
    for phase in ("forward", "backward", "reduction", "evaluation", "saving")
    for signal in ("SIGKILL", "SIGSTOP")
]


@pytest.fixture
def ranks(monkeypatch):
    """Four that are not used again."""
    monkeypatch.setenv("TFDIST_HEARTBEAT_TIMEOUT", "15")
    monkeypatch.setenv("TFDIST_SILENCE_WARNING", "5")
    four = Ranks(4)
    yield four
    four.stop()


@exhaustive
@pytest.mark.parametrize(("phase", "signal"), CASES)
def test_all_others_name_it(ranks, phase, signal, tmp_path):
    behaviour = "tests.pipeline.loss_behaviours:train"
    victim = VICTIMS.get(phase, VICTIM)
    args = (phase, signal, str(tmp_path))
    answers = ranks.answers(behaviour, *args, timeout=FAR, silent={victim})
    for rank, (done, message) in enumerate(answers):
        if rank == victim:
            continue
        assert done, message
        assert f"worker {victim} (" in message
        # In saving, the chief's pipeline knows of stages; the others wait for the chief's word.
        assert "stage 1" in message or (phase == "saving" and rank != 0)
        assert len(message.splitlines()) == 1
        assert " waited " not in message, "until a deadline"
