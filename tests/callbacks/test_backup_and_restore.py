"""A training that is interrupted and resumed ends like one that was not, bit for bit."""

from __future__ import annotations

import itertools
import json
import zipfile

import numpy as np
import pytest

from tests.harness.groups import GROUPS
from tests.harness.tiers import exhaustive, some
from tfdist.callbacks import BackupAndRestore

RESUMING = "tests.callbacks.resuming"
UNLISTED = "tests.callbacks.unlisted"
DATA = (
    "seeded_dataset",
    "shuffled_twice",
    "cached",
    "turning",
    "arrays",
    "generator",
    "repeated",
    "finite_steps",
    "augmented",
    "python_generator",
)


def check(group, tmp_path, kind="plain", data="seeded_dataset", at=9, every=4, **options):
    for name in ("undisturbed", "interrupted"):
        (tmp_path / name).mkdir()
    arguments = (kind, str(tmp_path), data, at, every)
    results = GROUPS[group].run(f"{RESUMING}:resume", arguments, options)
    for undisturbed, resumed in results:
        if "hybrid" not in kind and kind != "pipeline":  # Their workers hold different stages.
            assert undisturbed["weights"] == results[0][0]["weights"]
        assert resumed == undisturbed
        assert undisturbed["left"] == []


@exhaustive
@pytest.mark.parametrize(
    ("data", "at"),
    list(itertools.product(DATA, [1, 4, 9, 12, 13, "validation"])),
)
def test_every_kind_of_data_goes_on_where_it_was(tmp_path, data, at):
    check("2", tmp_path, data=data, at=at)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [5, 6, 12])
def test_where_the_data_has_been_read_ahead_to_the_end_of_an_epoch(tmp_path, at):
    check("2", tmp_path, at=at, every=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["1", "2"])
@pytest.mark.parametrize("validation", ["shuffled", "part", "split"])
@pytest.mark.parametrize(("at", "every"), [(9, 4), (9, "epoch"), (13, "epoch"), ("validation", 4)])
def test_validation_goes_on_with_the_same_rows(tmp_path, group, validation, at, every):
    check(group, tmp_path, at=at, every=every, validation=validation)


@pytest.mark.exhaustive
def test_a_shuffle_that_is_repeated_goes_on_after_an_epoch(tmp_path):
    check("2", tmp_path, data="shuffled_twice", at=9, every="epoch")


@pytest.mark.parametrize("every", some([1, 2, 6, 100, "epoch"], always=["epoch"]))
@pytest.mark.parametrize("group", some(["1", "2", "2x2"], always=["1"]))
def test_snapshots_of_steps_and_of_epochs(tmp_path, group, every):
    check(group, tmp_path, every=every)


@pytest.mark.parametrize(
    "options",
    some(
        [
            {"optimizer": "accumulation"},
            {"optimizer": "ema"},
            {"optimizer": "loss scaling", "policy": "mixed_float16"},
            {"optimizer": "schedule", "rated": False},
            {"steps_per_execution": 2},
            {"run_eagerly": True},
        ],
        always=[],
    ),
    ids=lambda options: ", ".join(f"{k} {v}" for k, v in options.items()),
)
@pytest.mark.parametrize("group", some(["2", "3 on 2 hosts", "2 by TensorFlow"], always=["2"]))
def test_every_state_of_optimizers(tmp_path, group, options):
    check(group, tmp_path, **options)


@pytest.mark.parametrize(
    ("kind", "group"),
    some(
        [
            ("sharded", "2"),
            ("sharded", "3"),
            ("int8", "2 hosts"),
            ("topk", "2 hosts"),
            ("powersgd", "3 on 2 hosts"),
            ("pipeline", "2"),
            ("hybrid", "4"),
            ("sharded hybrid", "4"),
        ],
        always=[],
    ),
)
def test_what_each_worker_alone_holds(tmp_path, kind, group):
    check(group, tmp_path, kind=kind)


def spoil(part, name):
    """Changes a bit of an array of a part."""
    with np.load(part) as arrays:
        pieces = json.loads(arrays["header"].tobytes())["pieces"]
    number = [key for key, *_ in pieces].index(name)
    with zipfile.ZipFile(part) as archive:
        start = archive.getinfo(f"{number}.npy").header_offset
    contents = bytearray(part.read_bytes())
    contents[start + 500] ^= 1
    part.write_bytes(contents)


def stop(group, folder, kind="plain", data="seeded_dataset", at=9, every=4, **options):
    GROUPS[group].run(f"{RESUMING}:stop", kind, str(folder), data, at, every, options)


def go_on(group, folder, kind="plain", data="seeded_dataset", every=4, **options):
    arguments = (kind, str(folder), data, every, options)
    return GROUPS[group].run(f"{RESUMING}:go_on", *arguments)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    some(
        [
            ("2", "1", "plain"),
            ("2", "3", "plain"),
            ("1", "2", "plain"),
            ("3", "2", "sharded"),
            ("2", "1", "sharded"),
            ("2 hosts", "3 on 2 hosts", "topk"),
            ("4", "2", "hybrid"),
            ("2", "4", "sharded hybrid"),
            ("3", "2", "pipeline"),
        ],
        always=[],
    ),
)
def test_another_number_of_workers_takes_what_has_a_meaning(tmp_path, before, after, kind):
    stop(before, tmp_path / "a", kind, optimizer="adam")
    results = go_on(after, tmp_path / "a", kind)
    undisturbed = go_on(after, tmp_path / "b", kind)
    for (resumed, _), (whole, _) in zip(results, undisturbed, strict=True):
        assert not isinstance(resumed, str), resumed
        if "hybrid" not in kind and kind != "pipeline":
            assert resumed["weights"] == results[0][0]["weights"]
        assert resumed["epochs"] == whole["epochs"]
        tolerance = 0.2 if kind == "topk" else 1e-4
        assert resumed["history"]["loss"] == pytest.approx(whole["history"]["loss"], rel=tolerance)
    assert "training resumes at epoch 2, batch 3" in results[0][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["accumulation", "scaled accumulation"])
@pytest.mark.parametrize("after", ["1", "3"])
def test_another_number_of_workers_takes_accumulated_gradients(tmp_path, after, optimizer):
    stop("2", tmp_path / "a", every=5, at=8, optimizer=optimizer)
    results = go_on(after, tmp_path / "a", every=5, optimizer=optimizer)
    undisturbed = go_on(after, tmp_path / "b", every=5, optimizer=optimizer)
    for (resumed, _), (whole, _) in zip(results, undisturbed, strict=True):
        assert resumed["weights"] == results[0][0]["weights"]
        assert resumed["history"]["loss"] == pytest.approx(whole["history"]["loss"], rel=1e-4)


@pytest.mark.exhaustive
def test_hosts_with_disks_of_their_own_pass_parts_on(tmp_path):
    """And the ranks have changed places, so that each has another one's part."""
    stop("3 on 2 hosts", tmp_path / "{}", at=9)
    whole = go_on("3 on 2 hosts", tmp_path / "whole")
    for rank, place in [(0, "moved 1"), (1, "moved 2"), (2, "moved 0")]:
        (tmp_path / str(rank)).rename(tmp_path / place)
    resumed = go_on("3 on 2 hosts", tmp_path / "moved {}")
    assert [result["weights"] for result, _ in resumed] == [r["weights"] for r, _ in whole]
    assert "training resumes at epoch 2, batch 3" in resumed[0][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"optimizer": "ema"},
            "they are of the optimizer Adam, and this model has the optimizer SGD",
        ),
        ({"data": "arrays"}, "The training data must be the same as when the snapshot was taken"),
        ({"data": "generator"}, "Received: batches of (TensorSpec"),
        (
            {"optimizer": "loss scaling"},
            "they are of the optimizer Adam, and this model has the optimizer LossScaleOptimizer/",
        ),
    ],
)
def test_a_snapshot_of_something_else_is_an_error(tmp_path, other, said):
    stop("2", tmp_path / "a", optimizer="adam")
    for answer, _ in go_on("2", tmp_path / "a", **other):
        assert answer.startswith("SnapshotError: ")
        assert said in answer


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("data", "said"),
    [("smaller_batches", "in batches of 4; the snapshot has"), ("weighted", "], float32[")],
)
def test_other_arrays_within_an_epoch_are_an_error(tmp_path, data, said):
    stop("2", tmp_path / "a", data="arrays")
    for answer, _ in go_on("2", tmp_path / "a", data=data):
        assert answer.startswith("SnapshotError: The training data must be the same as when the")
        assert said in answer


@pytest.mark.exhaustive
def test_a_snapshot_of_a_later_call_is_an_error(tmp_path):
    """Two calls with one directory, the second of which was interrupted."""
    GROUPS["2"].run(f"{RESUMING}:interrupted_in_its_second_call", str(tmp_path / "a"))
    for answer, _ in go_on("1", tmp_path / "a", data="arrays"):
        assert "are of call 2 of `fit` with this directory, and this is call 1" in answer


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["optimizers in a list", "a tf.Variable", "stateful"])
def test_what_keras_does_not_list_among_the_variables(tmp_path, kind):
    group = "1" if kind == "stateful" else "2"
    for undisturbed, resumed in GROUPS[group].run(f"{UNLISTED}:resume", kind, str(tmp_path)):
        assert undisturbed == resumed


@pytest.mark.exhaustive
def test_the_folder_is_not_deleted_while_another_worker_writes(tmp_path):
    for said, left in GROUPS["2"].run(f"{RESUMING}:one_writes_slowly", str(tmp_path / "a")):
        assert "could not be written" not in said
        assert left == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [9, 13])
def test_data_that_the_script_distributes_goes_on(tmp_path, at):
    check("2", tmp_path, at=at, distributes=True)


@pytest.mark.exhaustive
def test_data_that_is_cached_goes_on_twice(tmp_path):
    folder, cached = tmp_path / "a", {"data": "cached"}
    for at in (15, 2):
        stop("2", folder, at=at, every=1, **cached)
    resumed, whole = go_on("2", folder, **cached), go_on("2", tmp_path / "b", **cached)
    assert [result["weights"] for result, _ in resumed] == [r["weights"] for r, _ in whole]
    assert "after 15 steps" in resumed[0][1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", ["seeded_dataset", "turning"])
def test_a_training_that_begins_at_a_later_epoch(tmp_path, data):
    check("2", tmp_path, data=data, at=3, begins=1)


@pytest.mark.parametrize("damage", some(["cut", "spoiled", "gone", "position"], always=[]))
def test_a_damaged_snapshot_costs_a_warning_and_the_one_before_is_taken(tmp_path, damage):
    stop("2", tmp_path / "a", at=11)
    newest = max((tmp_path / "a" / "snapshots").glob("step-*"))
    part = newest / "rank-0-of-2.npz"
    if damage == "gone":
        part.unlink()
    elif damage == "position":
        spoil(part, "position of the data of worker 0")
    else:
        contents = bytearray(part.read_bytes())
        contents[len(contents) // 2] ^= 255
        part.write_bytes(contents[: len(contents) // 2] if damage == "cut" else contents)
    resumed, whole = go_on("2", tmp_path / "a"), go_on("2", tmp_path / "b")
    assert [result["weights"] for result, _ in resumed] == [r["weights"] for r, _ in whole]
    assert "after 4 steps" in resumed[0][1]
    if damage != "gone":
        assert (
            "tfdist: the snapshot of step 8 cannot be used: the part of worker 0" in resumed[0][1]
        )


@pytest.mark.exhaustive
def test_snapshots_that_are_all_damaged_are_an_error(tmp_path):
    stop("2", tmp_path / "a", at=11)
    for part in (tmp_path / "a" / "snapshots").glob("step-*/*.npz"):
        part.write_bytes(b"")
    for answer, _ in go_on("2", tmp_path / "a"):
        assert answer.startswith("SnapshotError: None of the snapshots in ")


@pytest.mark.exhaustive
def test_snapshots_of_another_model_are_an_error(tmp_path):
    stop("2", tmp_path / "a")
    for said in GROUPS["2"].run(f"{RESUMING}:another_model", str(tmp_path / "a")):
        assert said.startswith("The snapshots in ")
        assert "are of another model: model/0 is float32[6, 8] there, and float32[6, 3] in" in said


@pytest.mark.exhaustive
def test_a_full_disk_costs_snapshots_and_no_training(tmp_path):
    whole = go_on("2", tmp_path / "whole", data="arrays")
    answers = GROUPS["2"].run(f"{RESUMING}:disk_full", str(tmp_path / "full"))
    for (weights, said), (undisturbed, _) in zip(answers, whole, strict=True):
        assert weights == undisturbed["weights"]
        lines = [line for line in said.splitlines() if line.startswith("tfdist: the snapshot of")]
        assert "could not be written: OSError: [Errno 28] No space left on device" in lines[0]


@pytest.mark.exhaustive
def test_a_disk_that_is_full_at_the_start_keeps_no_training_from_going_on(tmp_path):
    stop("2", tmp_path / "a")
    resumed = GROUPS["2"].run(f"{RESUMING}:full_at_start", str(tmp_path / "a"))
    whole = go_on("2", tmp_path / "b")
    for rank, ((result, said), (undisturbed, _)) in enumerate(zip(resumed, whole, strict=True)):
        assert result["weights"] == undisturbed["weights"]
        assert f"tfdist: worker {rank} cannot write to" in said
    assert "training resumes at epoch 2, batch 3" in resumed[0][1]


@pytest.mark.exhaustive
def test_what_is_refused_in_fit(tmp_path):
    for said in GROUPS["2"].run(f"{RESUMING}:refused", str(tmp_path)):
        assert "`directory` must be a folder that every worker can write to" in said[0]
        assert "which creates them in its first step" in said[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["1", "2"])
def test_a_script_with_two_calls_of_fit(tmp_path, group):
    for resumed, undisturbed in GROUPS[group].run(f"{RESUMING}:twice", str(tmp_path)):
        assert resumed == undisturbed


def test_wrong_arguments_are_refused():
    for arguments in (
        {"directory": ""},
        {"directory": "gs://bucket/run"},
        {"directory": "a", "save_every": 0},
        {"directory": "a", "save_every": "step"},
        {"directory": "a", "keep": 0},
    ):
        with pytest.raises(ValueError, match="Received: "):
            BackupAndRestore(**arguments)


@pytest.mark.exhaustive
def test_a_first_snapshot_that_is_not_finished_is_no_obstacle(tmp_path):
    stop("2", tmp_path / "a", at=5)
    whole = go_on("2", tmp_path / "b")
    (snapshot,) = (tmp_path / "a" / "snapshots").glob("step-*")
    for rank, left in ((0, 1), (1, 0)):
        folder = tmp_path / f"without {rank}" / "snapshots" / snapshot.name
        folder.mkdir(parents=True)
        name = f"rank-{left}-of-2.npz"
        (folder / name).write_bytes((snapshot / name).read_bytes())
        resumed = go_on("2", tmp_path / f"without {rank}")
        assert [result["weights"] for result, _ in resumed] == [r["weights"] for r, _ in whole]
        assert "before the first snapshot was complete" in resumed[0][1]


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_costs_no_complete_snapshot(tmp_path):
    """One worker cannot write any more; what all have written stays."""
    for folder in (0, 1):
        (tmp_path / str(folder)).mkdir()
    GROUPS["2"].run(f"{RESUMING}:fails_later", str(tmp_path / "{}"))
    whole = go_on("2", tmp_path / "whole", data="arrays", every=2)
    resumed = go_on("2", tmp_path / "{}", data="arrays", every=2)
    assert [result["weights"] for result, _ in resumed] == [r["weights"] for r, _ in whole]
    assert "after 4 steps" in resumed[0][1]
