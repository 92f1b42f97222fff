"""What goes wrong in the middle of something else, and in trainings of many kinds."""

import contextlib
import subprocess

import numpy as np
import pytest

from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.recovery.covering import pairwise
from tests.strategy.comparison import assert_close, assert_equal

FAULTS = "tests.recovery.behaviours.faults"
ROWS = 50
KILLED = {1: ("backward", 9, "kill")}
TORN = ("fit progress", 1, "tear")
LEADS = ("fit progress", 1, "lead")


def check(answers, survivors, settings=None, tolerance=1e-5, exact=True):
    """They have what one process has, the same bits, and each row of an epoch once."""
    expected = reference(f"{FAULTS}:alone", settings or {})
    for rank in survivors:
        done, result = answers[rank]
        assert done, result
        assert result["history"]["rows"] == [ROWS] * 3
        assert result["history"]["val_rows"] == [20] * 3
        for what in ("weights", "history", "epochs") if exact else ():
            assert_close(result[what], expected[what], f"rank {rank}: {what}", tolerance)
        for what in ("weights", "slots"):
            assert_equal(result[what], answers[survivors[0]][1][what], f"rank {rank}")
            assert all(np.isfinite(value).all() for value in result[what])


@pytest.fixture
def lose(start, tmp_path):
    """Trains with workers of which some are lost, at steps and at points."""

    def lose(workers, faults, points, settings=None, dead=None, **group):
        kinds = {rank: [what for *_, what in points[rank]] for rank in points}
        silent = {rank for rank, fault in faults.items() if fault[-1] == "kill"}
        silent |= {rank for rank, what in kinds.items() if "kill" in what}
        silent |= set(dead or ())
        settings = {**(settings or {}), "folder": str(tmp_path)}
        ranks = start(workers, strategy=False, **group)
        answers = ranks.answers(f"{FAULTS}:faulty", settings, faults, points, silent=silent)
        return answers, [rank for rank in range(workers) if rank not in silent], ranks

    return lose


FORMING = ["answer", "session", "communicators", "compressors", "agreement", "callbacks"]


@exhaustive
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", [*FORMING, "next entry"])
def test_another_is_killed_while_the_group_changes(lose, point, victim):
    answers, survivors, _ = lose(4, KILLED, {victim: [(point, 1, "kill")]})
    check(answers, survivors)


@exhaustive
def test_two_more_are_killed_while_the_group_changes(lose):
    points = {0: [("session", 1, "kill")], 2: [("communicators", 1, "kill")]}
    answers, survivors, _ = lose(4, KILLED, points)
    check(answers, survivors)


@exhaustive
@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("victims", [[0], [2], [0, 2]])
def test_source_and_takers_are_killed_while_the_state_is_passed_on(lose, victims, number):
    """Worker 0 gives it to worker 2, whose own is of no use."""
    points = {2: [TORN]}
    for victim in victims:
        points[victim] = [*points.get(victim, ()), ("state", number, "kill")]
    answers, survivors, _ = lose(4, KILLED, points)
    check(answers, survivors)


@exhaustive
@pytest.mark.parametrize("number", [1, 2, 7])
def test_those_a_step_behind_keep_their_state_if_the_only_one_ahead_is_lost(lose, number):
    answers, survivors, _ = lose(4, KILLED, {0: [LEADS, ("state", number, "kill")]})
    check(answers, survivors)


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("point", "number"),
    [("session", 1), ("communicators", 1), ("state", 1), ("state", 9), ("entry", 1),
     ("callbacks", 1)],
)  # fmt: skip
def test_one_is_killed_while_a_newcomer_is_admitted(start, tmp_path, point, number, victim):
    points = {victim: [(point, number, "kill")]}
    arguments = points, [0, 1], 9, {}, str(tmp_path / "come"), {"folder": str(tmp_path)}
    ranks = start(3, strategy=False)
    answers = ranks.answers(f"{FAULTS}:coming", *arguments, silent={victim})
    check(answers, [rank for rank in range(3) if rank != victim])


@pytest.fixture
def impatient(monkeypatch):
    """Silence counts soon."""
    monkeypatch.setenv("TFDIST_HEARTBEAT_TIMEOUT", "15")


@exhaustive
@pytest.mark.parametrize("victims", [(1, 2), (0, 3), (3, 0)])
def test_one_is_stopped_and_one_is_killed(lose, impatient, victims):
    stopped, killed = victims
    faults = {stopped: ("before", 9, "stop"), killed: ("before", 9, "kill")}
    answers, survivors, ranks = lose(4, faults, {}, dead=[stopped])
    check(answers, survivors)
    done, said = ranks.wake(stopped)
    assert not done and "GroupLostError" in said


@exhaustive
@pytest.mark.parametrize("stopped", [0, 2])
@pytest.mark.parametrize("point", ["session", "communicators", "agreement", "next entry"])
def test_a_stopped_worker_wakes_up_while_the_others_form_a_group(lose, impatient, point, stopped):
    faults = {stopped: ("before", 9, "stop")}
    answers, _, _ = lose(3, faults, {1: [(point, 1, f"wake {stopped}")]})
    check(answers, [rank for rank in range(3) if rank != stopped])
    done, said = answers[stopped]
    assert not done and "GroupLostError" in said


@pytest.fixture
def disk(tmp_path):
    """Mounts small disks."""
    mounted = []

    def mount(name, size="400k"):
        place = tmp_path / name
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place])
        if done.returncode:
            pytest.skip("nothing can be mounted here")
        mounted.append(place)
        return name

    yield mount
    for place in mounted:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "-l", place], check=True)


@exhaustive
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("number", [1, 8, 30])
def test_one_is_killed_while_it_writes_a_snapshot(lose, tmp_path, victim, number):
    settings = {"saved": "disk"}
    answers, survivors, _ = lose(3, {}, {victim: [("snapshot", number, "kill")]}, settings)
    check(answers, survivors)
    assert not list(tmp_path.glob("disk/snapshots"))


@exhaustive
@pytest.mark.parametrize("what", ["fill", "lock"])
@pytest.mark.parametrize("point", ["answer", "session", "snapshots", "next entry"])
def test_the_disk_of_snapshots_fails_while_the_group_changes(lose, disk, what, point):
    settings = {"saved": disk("disk")}
    answers, survivors, _ = lose(3, KILLED, {0: [(point, 1, f"{what} disk")]}, settings)
    check(answers, survivors)


@exhaustive
@pytest.mark.parametrize(
    ("kind", "what"), [("memory", "fill"), ("flights", "fill"), ("flights", "lock")]
)
@pytest.mark.parametrize("point", ["answer", "session"])
def test_no_space_for_records_segments_and_flight_logs(lose, disk, kind, what, point):
    settings = {kind: disk("disk", "40m")}
    answers, survivors, _ = lose(3, KILLED, {0: [(point, 1, f"{what} disk")]}, settings)
    check(answers, survivors)


@exhaustive
def test_what_can_be_neither_recorded_nor_forgotten_ends_the_training(lose, disk):
    settings = {"memory": disk("disk"), "patience": 30.0}
    points = {0: [("answer", 1, "lock disk")]}
    answers, survivors, _ = lose(3, KILLED, points, settings, hosts=3)
    for rank in survivors:
        done, said = answers[rank]
        assert not done and "GroupLostError" in said
    assert "can be neither recorded nor deleted" in answers[0][1]


KINDS = pairwise(
    {
        "hosts": [[0, 0], [0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]],
        "fault": [("before", 9), ("forward", 9), ("backward", 8), ("after", 10),
                  ("evaluation", 8), ("epoch end", 8)],
        "victims": ["first", "last", "one after the other"],
        "policy": [None, "mixed_float16"],
        "accumulation": [None, 3],
        "compression": [None, "fp16", "onebit"],
        "data": ["dataset", "arrays", "PyDataset"],
    }
)  # fmt: skip


@exhaustive
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_kinds_of_trainings(lose, kind):
    workers = len(kind["hosts"])
    settings = {"data": kind["data"]}
    if kind["policy"]:
        settings["policy"] = kind["policy"]
    if kind["accumulation"]:
        settings["optimizer"] = {"gradient_accumulation_steps": kind["accumulation"]}
    # Half of the workers on several hosts can go on only if the first one is among them.
    last, two = (workers - 1,), (workers - 1, 1)
    victims = {"first": (0,), "last": last, "one after the other": two}[kind["victims"]]
    if workers < 4 or len(set(kind["hosts"])) > 2:
        victims = victims[:1]
    if victims == (0,) and workers == 2:
        victims = (1,)
    phase, step = kind["fault"]
    faults = {victim: (phase, step + 4 * n, "kill") for n, victim in enumerate(victims)}
    compression = kind["compression"]
    with_codec = {**settings, "compression": compression} if compression else settings
    answers, survivors, _ = lose(workers, faults, {}, with_codec, hosts=kind["hosts"])
    tolerance = 2e-3 if kind["policy"] else 1e-5
    check(answers, survivors, settings, tolerance, exact=not compression)
