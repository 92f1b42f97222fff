"""The chief writes, everyone reads; callbacks decide alike on all workers."""

import itertools

import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some
from tests.strategy.comparison import (
    PACKAGE,
    assert_close,
    assert_equal,
    behaviours,
    check_same_as_alone,
)

FILES = behaviours("files", "folder")


def _check(group, behaviour, tmp_path):
    (tmp_path / "alone").mkdir()
    (tmp_path / "group").mkdir()
    function = f"{PACKAGE}.{behaviour}"
    expected = GROUPS["alone"].run(function, str(tmp_path / "alone"))[0]
    results = GROUPS[group].run(function, str(tmp_path / "group"))
    for rank, result in enumerate(results):
        assert_close(result, expected, f"rank {rank}")
        assert_equal(result.get("weights"), results[0].get("weights"), f"rank {rank}")


# By default; some of the others run with sharded optimizers.
USUAL = [
    "files:save_and_load_weights",
]


@pytest.mark.parametrize(
    "behaviour", some(FILES, always=USUAL, oldest=["files:checkpoint_callback"])
)
def test_two_workers_give_the_files_of_one_process(behaviour, tmp_path):
    _check("2", behaviour, tmp_path)


@exhaustive
@pytest.mark.parametrize(
    ("behaviour", "group"),
    list(
        itertools.product(
            ["files:save_and_load_whole_model", "files:export_for_serving"],
            ["2 by TensorFlow", "3", "1x2", "2x2"],
        )
    ),
)
def test_other_groups_give_the_files_of_one_process(group, behaviour, tmp_path):
    _check(group, behaviour, tmp_path)


@pytest.mark.parametrize("group", some(["2", "3", "2x2", "2 by TensorFlow"], always=[]))
@pytest.mark.parametrize("place", ["", "_in_the_scope"])
def test_all_go_on_from_what_the_chief_alone_finds(group, place):
    check_same_as_alone(group, f"files:backup_in_own_folders{place}")


@pytest.mark.parametrize("group", some(["2", "3", "2x2", "2 by TensorFlow"], always=[]))
def test_all_go_on_within_an_epoch(group):
    check_same_as_alone(group, "files:backup_in_own_folders", "backup_within_an_epoch")


@pytest.mark.parametrize("group", some(["2", "2x2"], always=["2"]))
def test_what_a_callback_restores_on_the_chief_alone_counts(group):
    check_same_as_alone(group, "files:restored_by_the_chief_alone")


@pytest.mark.parametrize("kind", some(["sharded", "compressed"], always=[]))
def test_parts_of_a_model_must_be_restored_on_all_workers(kind):
    for said in GROUPS["2"].run(f"{PACKAGE}.files:restored_by_the_chief_alone", kind):
        assert said.startswith("A callback such as BackupAndRestore must find the same files")
        assert "differs between worker 0 and worker 1" in said


@exhaustive
def test_what_differed_before_is_an_error():
    for said in GROUPS["2"].run(f"{PACKAGE}.files:changed_before"):
        assert "learning_rate' differs between worker 0 and worker 1" in said


def test_what_the_chief_cannot_write(tmp_path):
    results = GROUPS["2"].run("tests.strategy.failing_saves:save", str(tmp_path))
    for told, said in zip(results, ("No such file", "The chief could not write"), strict=True):
        assert said in told[0] and "missing" in told[0]
        assert told[1] == 8
