"""Workers that come and go while the processes of the others stay."""

import pytest

from tests.harness.ranks import Ranks
from tests.harness.references import reference
from tests.harness.tiers import exhaustive
from tests.strategy.comparison import assert_close, assert_equal

PACKAGE = "tests.strategy.behaviours.regrouping"
# Three workers, of which one leaves, comes back; then one is left, and gets another one.
COMING_AND_GOING = [[0, 1, 2], [0, 1], [1, 0, 2], [1], [1, 2]]


@pytest.fixture
def ranks():
    """Starts processes without a strategy, and ends them."""
    started = []

    def start(workers, **settings):
        started.append(Ranks(workers, strategy=False, **settings))
        return started[-1]

    yield start
    for group in started:
        group.stop()


def check(results, groups, *, alike=True):
    """All members of a group have what one process has, and the same bits."""
    expected = reference(f"{PACKAGE}:trained_alone", len(groups))
    for number, members in enumerate(groups):
        for member in members:
            phase = results[member][f"phase {number}"]
            where = f"worker {member} of {members} in phase {number}"
            if alike:
                assert_close(phase, expected[number], where)
            assert_equal(phase["weights"], results[members[0]][f"phase {number}"]["weights"], where)


def check_traces(results, groups):
    """Nobody has made a graph again."""
    for number, result in enumerate(results):
        first, *others = result["traces"]
        assert first > 0, number
        assert not any(others), (number, result["traces"])
        assert not any(result["known"]), number


@exhaustive
def test_workers_leave_and_come_back(ranks):
    results = ranks(3).run(f"{PACKAGE}:trained", COMING_AND_GOING, {})
    check(results, COMING_AND_GOING)
    check_traces(results, COMING_AND_GOING)


@exhaustive
@pytest.mark.parametrize(
    "settings", [{"hosts": [0, 0, 1]}, {"hosts": 3}, {"devices": 2}, {"hosts": 2, "devices": 2}]
)
def test_on_hosts_and_devices(ranks, settings):
    results = ranks(3, **settings).run(f"{PACKAGE}:trained", COMING_AND_GOING, {})
    check(results, COMING_AND_GOING)
    check_traces(results, COMING_AND_GOING)


@exhaustive
def test_a_worker_that_has_started_alone_joins(ranks):
    groups = [[0, 1], [0, 1, 2], [2, 1]]
    results = ranks(3).run(f"{PACKAGE}:trained", groups, {})
    check(results, groups)
    check_traces(results, groups)


@exhaustive
@pytest.mark.parametrize("settings", [{}, {"hosts": 3}, {"devices": 2}])
def test_two_go_on_without_the_third(ranks, settings):
    answers = ranks(3, **settings).answers(f"{PACKAGE}:survived", silent={2})
    results = []
    for done, result in answers[:2]:
        assert done, result
        results.append(result)
        assert "worker 2" in result["lost"]
        assert not result["traces"]
    assert_equal(results[1]["weights"], results[0]["weights"], "worker 1")


@exhaustive
@pytest.mark.parametrize("codec", ["int8", "onebit", "topk", "powersgd"])
@pytest.mark.parametrize("settings", [{}, {"within_hosts": True}])
@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 2]])
def test_compressed_training_continues_in_each_group(ranks, codec, settings, hosts):
    results = ranks(3, hosts=hosts).run(f"{PACKAGE}:compressed", COMING_AND_GOING, codec, settings)
    check(results, COMING_AND_GOING, alike=False)


@exhaustive
@pytest.mark.parametrize("settings", [{}, {"within_hosts": True}])
def test_compressed_graphs_stay_while_there_are_several_hosts(ranks, settings):
    groups = [[0, 1, 2], [0, 1], [1, 0, 2], [1, 2]]
    results = ranks(3, hosts=[0, 1, 2]).run(f"{PACKAGE}:compressed", groups, "int8", settings)
    check(results, groups, alike=False)
    check_traces(results, groups)


@exhaustive
def test_what_graphs_know(ranks):
    read, _ = ranks(2).run(f"{PACKAGE}:read_by")
    unnoticed = ["nothing", "place", "mean", "gather", "collectives"]
    assert {name for name, known in read.items() if not known} == set(unnoticed)


@exhaustive
def test_collectives_of_one_rank(ranks):
    assert not any(ranks(2).run(f"{PACKAGE}:collectives_of_one"))


@exhaustive
def test_an_iterator_follows_the_group(ranks):
    groups = [[0, 1, 2], [1, 0], [0]]
    seen = ranks(3).run(f"{PACKAGE}:live_iterators", groups)
    assert seen == [
        [list(range(4)), list(range(18, 24)), list(range(24, 36))],
        [list(range(4, 8)), list(range(12, 18))],
        [list(range(8, 12))],
    ]


@exhaustive
@pytest.mark.parametrize("settings", [{}, {"hosts": 2}])
def test_nothing_is_left_behind(ranks, settings):
    for counts in ranks(2, **settings).run(f"{PACKAGE}:many_times", 50):
        for kind, (early, late) in counts.items():
            assert late <= early, kind


@exhaustive
def test_what_is_split_off_ends(ranks):
    for message in ranks(2).run(f"{PACKAGE}:split_off"):
        assert "has been closed" in message


@exhaustive
def test_flight_logs_follow_the_ranks(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDIST_FLIGHT_DIR", str(tmp_path))
    logs = ranks(2).run(f"{PACKAGE}:logged")
    assert [log[:2] for log in logs] == [(1, 1), (0, 1)]
    assert [log[2].split(" (")[0] for log in logs] == ["worker 0", "worker 1"]
