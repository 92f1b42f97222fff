"""`tfdist doctor --job` asks real workers while they train."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests.certificates import variables
from tests.harness.ranks import Ranks
from tests.harness.tiers import exhaustive
from tfdist._src.launch.cli import main

BEHAVIOURS = "tests.launch.live.behaviours"
KINDS = {"2": (2, {}), "3 on 2 hosts": (3, {"hosts": 2}), "2 in TLS": (2, {"tls": True})}
OTHER_KINDS = {
    "3": (3, {}),
    "2x2": (2, {"devices": 2}),
    "2 hosts": (2, {"hosts": 2}),
    "4 on 2 hosts": (4, {"hosts": 2}),
}


@pytest.fixture
def group(kind):
    workers, options = {**KINDS, **OTHER_KINDS}[kind]
    ranks = Ranks(workers, **options)
    yield ranks
    ranks.stop()


@pytest.fixture
def running(group):
    """Runs a function of all ranks in a thread; its results are appended to the list."""
    threads = []

    def start(function, *args):
        results = []

        def work():
            results.extend(group.answers(f"{BEHAVIOURS}:{function}", *args))

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return threads[-1], results

    return start


@pytest.fixture
def ask(group, capsys, monkeypatch):
    """Asks the group; returns the JSON, or the line on stderr."""

    def run(*arguments, **environment):
        with monkeypatch.context() as patch:
            tls = variables() if group._tls else {}
            for name, value in {**tls, **environment}.items():
                patch.setenv(name, value)
            address = f"127.0.0.1:{group._ports.ports[0]}"
            code = main(["doctor", "--job", address, *arguments])
        out, err = capsys.readouterr()
        if code:
            assert (code, out, err.count("\n")) == (1, "", 1)
            return err
        return json.loads(out) if "--json" in arguments else out

    return run


def until(condition):
    while not condition():
        time.sleep(0.02)


@exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_trains_and_one_whose_worker_sleeps(running, ask, tmp_path, kind):
    size, sleeper = KINDS[kind][0], KINDS[kind][0] - 1
    thread, results = running("train", str(tmp_path), sleeper)
    until(lambda: (tmp_path / f"{sleeper}-3").exists())

    def is_stuck():
        found.update(ask("--json", "--interval", "0.2"))
        return found["waited_for"] == [sleeper]

    found: dict = {}
    until(is_stuck)
    assert found["size"] == size
    assert f" for worker {sleeper} (127.0.0.1:" in found["headline"]
    assert "which is in no collective for" in found["headline"]
    assert "on_train_batch_end (" in found["headline"]
    asleep = found["ranks"][sleeper]["activity"]
    assert (asleep["operations"], asleep["workers"]) == ([], 0)
    for other in found["ranks"][:sleeper]:
        assert other["activity"]["operations"][0]["waits_for"] == [sleeper]
        assert other["activity"]["workers"] > 0.9
    (tmp_path / "go").touch()

    def is_training():
        found.update(ask("--json"))
        return all(one["activity"]["steps_per_second"] > 0 for one in found["ranks"])

    until(is_training)
    assert found["headline"].startswith(f"All {size} ranks are running: ")
    assert {one["state"] for one in found["ranks"]} == {"answered"}
    for one in found["ranks"]:
        activity = one["activity"]
        assert activity["rows_per_second"] > 0
        assert activity["resident_bytes"] > 1e7
        moved = activity["sent_per_second"] + activity["shared_per_second"]
        assert moved > 0
    text = ask()
    assert len(text.splitlines()) == 3 + size
    (tmp_path / "stop").touch()
    thread.join()
    assert all(done for done, _ in results), results


@exhaustive
@pytest.mark.parametrize(
    ("kind", "training", "place", "late"),
    [
        ("2", "fit", "input", 0),
        ("3", "int8", "input", 1),
        ("2x2", "fit", "input", 1),
        ("4 on 2 hosts", "fit", "input", 3),
        ("2 hosts", "1f1b", "input", 0),
        ("3", "1f1b", "compute", 1),
        ("4 on 2 hosts", "1f1b", "callback", 2),
        ("2 hosts", "int8", "callback", 0),
        ("4 on 2 hosts", "int8", "compute", 1),
        ("2x2", "fit", "callback", 0),
    ],
)
def test_where_a_worker_is_that_is_late(running, ask, tmp_path, kind, training, place, late):
    thread, results = running("train_with_a_late_worker", str(tmp_path), training, place, late)
    until(lambda: (tmp_path / "late").exists() or not thread.is_alive())
    found: dict = {}

    def is_stuck():
        found.update(ask("--json", "--interval", "0.2"))
        return found["waited_for"] == [late]

    until(is_stuck)
    (tmp_path / "go").touch()
    thread.join()
    assert all(done for done, _ in results), results
    cause = found["headline"].partition(f" for worker {late} (127.0.0.1:")[2]
    assert "which is in no collective for" in cause, found["headline"]
    assert ("for its next batch" in cause) == (place == "input")
    assert ("main thread is in wait (" in cause) == (place == "callback")
    asleep = found["ranks"][late]["activity"]
    assert (asleep["operations"], asleep["workers"]) == ([], 0)
    assert (asleep["input"] > 0.9) == (place == "input")
    others = [one["activity"] for one in found["ranks"] if one["rank"] != late]
    assert all(other["operations"] and other["input"] < 0.1 for other in others)


@exhaustive
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("kind", ["3 on 2 hosts"])
def test_a_worker_that_is_late_to_an_exchange(running, ask, tmp_path, late):
    thread, results = running("exchange", str(tmp_path), late)
    until(lambda: (tmp_path / str(late)).exists())

    found: dict = {}

    def is_waited_for():
        found.update(ask("--json", "--interval", "0.2"))
        return found["waited_for"] == [late]

    until(is_waited_for)
    assert "2 of 3 ranks wait in exchange 'what is late' (number " in found["headline"]
    assert f" for worker {late} (127.0.0.1:" in found["headline"]
    others = [one["activity"] for one in found["ranks"] if one["rank"] != late]
    assert [one["operations"][0]["waits_for"] for one in others] == [[late], [late]]
    assert [one["idle"] for one in others] == [None, None]
    assert min(one["workers"] for one in others) > 0.9
    (tmp_path / "go").touch()
    thread.join()
    assert results == [(True, ["0", "1", "2"])] * 3


@exhaustive
@pytest.mark.parametrize(
    ("kind", "stopped"), [("3 on 2 hosts", 2), ("2", 1), ("2 hosts", 1), ("4 on 2 hosts", 2)]
)
def test_a_worker_that_is_stopped_does_not_respond(running, ask, tmp_path, kind, stopped):
    thread, results = running("train", str(tmp_path))
    until(lambda: (tmp_path / "0-3").exists())
    pid = ask("--json")["ranks"][stopped]["activity"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found: dict = {}

        def is_waited_for():
            found.update(ask("--json", "--interval", "0.2"))
            return found["waited_for"] == [stopped]

        until(is_waited_for)
        assert found["ranks"][stopped]["state"] == "unresponsive"
        assert found["ranks"][stopped]["silence"] > 0
        assert "which does not respond, last heard from" in found["headline"]
    finally:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "stop").touch()
    thread.join()
    assert all(done for done, _ in results), results


@exhaustive
@pytest.mark.parametrize("kind", ["2", "2 in TLS"])
def test_who_may_not_ask(group, ask, kind):
    group.run(f"{BEHAVIOURS}:train_steps", 1)
    assert "their secrets differ" in ask(TFDIST_SECRET="another")
    if kind == "2":
        assert "it does not use TLS" in ask(**variables())
    else:
        assert "it uses TLS" in ask(**dict.fromkeys(variables(), ""))
        assert "certificate" in ask(**variables("stranger", "other_ca"))
    assert "No rank is in a collective" in ask()


@exhaustive
@pytest.mark.parametrize("kind", ["3 on 2 hosts"])
def test_the_result_is_the_same_while_the_job_is_asked(group, running, ask):
    expected = group.run(f"{BEHAVIOURS}:train_steps", 20)
    thread, results = running("train_steps", 20)
    count = 0
    while thread.is_alive():
        ask("--json", "--interval", "0.01")
        count += 1
    assert count > 3
    assert results == [(True, weights) for weights in expected]


@exhaustive
def test_tensorflows_collectives_cannot_be_asked(capsys):
    group = Ranks(2, native=False)
    try:
        group.run(f"{BEHAVIOURS}:train_steps", 1)
        assert main(["doctor", "--job", f"127.0.0.1:{group._ports.ports[0]}"]) == 1
        assert "TensorFlow's collectives" in capsys.readouterr().err
    finally:
        group.stop()
