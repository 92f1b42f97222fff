"""The hooks into what writes files leave users' models alone, and the other workers quiet."""

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import PACKAGE

WRITERS = f"{PACKAGE}.writers"


def test_attributes_of_users(tmp_path):
    (found,) = GROUPS["1"].run(f"{WRITERS}:users_names", str(tmp_path))
    assert found == [True] * 12


def test_errors_of_others_are_not_retried(tmp_path):
    assert GROUPS["1"].run(f"{WRITERS}:errors_of_others", str(tmp_path)) == [1]


def test_the_chief_alone_writes(tmp_path):
    (sent, written), (nothing_sent, nothing_written) = GROUPS["2"].run(
        f"{WRITERS}:writing_callbacks", str(tmp_path)
    )
    assert len(sent) == 2 and nothing_sent == []
    assert written in ([0, 1], None) and not nothing_written


@exhaustive
def test_what_one_worker_cannot_write(tmp_path):
    for message in GROUPS["2"].run(f"{WRITERS}:orbax_of_a_sharded_optimizer", str(tmp_path)):
        assert message.startswith(
            "UnsupportedError: OrbaxCheckpoint saves only the state of one worker"
        )


@exhaustive
def test_progress_bars_are_the_chiefs():
    assert GROUPS["2"].run(f"{WRITERS}:progress_bars") == [[True, True], [False, True]]
