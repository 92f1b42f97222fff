"""SIGTERM ends each wait for other workers while a group forms."""

from __future__ import annotations

import ast
import pathlib
import signal
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

import tfdist
from tests.harness.deadlines import FAR
from tfdist._src.cluster import Session, Topology, Worker
from tfdist._src.comm.cause import FAILED, LEFT, LOST, OTHER, SILENT, Cause
from tfdist._src.options import Options
from tfdist._src.recovery import preemption as handling
from tfdist._src.recovery.agreement import GroupShrinks
from tfdist._src.recovery.next_group import NextGroup
from tfdist._src.recovery.preemption import preemption
from tfdist._src.recovery.recovery import await_end, find_farewell, is_loss
from tfdist.errors import GroupLostError, RendezvousError

ROOT = pathlib.Path(tfdist.__file__).parent / "_src"
PARTS = ("recovery", "snapshots", "cluster/membership")
# These call `check` while they wait, and must be given one.
CHECKING = {"regroup", "await_end", "_form"}
WAITING = {"wait", "sleep", "poll", "select", "ask", "exchange", "join", *CHECKING}
IN_A_THREAD = "runs in a thread of its own"
TOGETHER = "all workers are in the same call, as in a step"
SAVING = "the state is being saved"
# Other functions that wait, and why SIGTERM need not end them.
OTHERS = {
    "cluster/membership/contact.py:MemberProbe._run": IN_A_THREAD,
    "cluster/membership/contact.py:MemberProbe._rest": IN_A_THREAD,
    "cluster/membership/contact.py:MemberProbe._replaced": IN_A_THREAD,
    "cluster/membership/joining.py:JobSearch._run": IN_A_THREAD,
    "cluster/membership/joining.py:find.ask": IN_A_THREAD,
    "recovery/fit_calls.py:_watch": IN_A_THREAD,
    "cluster/membership/liveness.py:ask": "waits for 2 s at most",
    "cluster/membership/liveness.py:inspect": "asks a few, each for 2 s at most",
    "cluster/membership/regrouping.py:inquire": "asks each for 2 s at most, in a thread",
    "cluster/membership/regrouping.py:say_farewell": "waits for 3 s at most",
    "cluster/membership/record.py:is_dead": "waits as long as its caller says",
    "cluster/membership/regrouping.py:Regrouping._yield": "waits for 1.1 s at most",
    "cluster/membership/liveness.py:LivenessServer.serve": "does not wait",
    "cluster/membership/membership.py:Membership.__init__": "SIGTERM ends the process then",
    "cluster/membership/membership.py:Membership.release": TOGETHER,
    "recovery/recovery.py:go_back": TOGETHER,
    "recovery/recovery.py:Recovery.batch_begins": TOGETHER,
    "recovery/recovery.py:Recovery._enter": TOGETHER,
    "recovery/preemption.py:release": TOGETHER,
    "snapshots/restore.py:read_newest": TOGETHER,
    "snapshots/snapshot_series.py:SnapshotSeries._set_workers": TOGETHER,
    "snapshots/workers.py:broadcast_bytes": TOGETHER,
    "snapshots/workers.py:writes_shared_state": TOGETHER,
    **{
        f"snapshots/snapshot_series.py:{name}": SAVING
        for name in (
            "SnapshotSeries.change_workers",
            "SnapshotSeries.finish_last",
            "SnapshotSeries.wait",
            "SnapshotSeries.end",
            "SnapshotWriter.submit",
            "SnapshotWriter.wait",
        )
    },
}


def name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_wait(call: ast.Call) -> bool:
    return name_of(call) in WAITING and not (name_of(call) == "join" and call.args)  # of texts


def unchecked(node: ast.AST, owner: str = "") -> set[str]:
    """The functions in which SIGTERM does not end some wait."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            name = f"{owner}.{child.name}" if owner else child.name
            found |= unchecked(child, name)
            if isinstance(child, ast.FunctionDef):
                calls = [one for one in _own(child) if isinstance(one, ast.Call)]
                checks = any(name_of(call) == "check" for call in calls)
                if not all(_is_checked(call, checks) for call in calls if is_wait(call)):
                    found.add(name)
    return found


def _own(function: ast.FunctionDef) -> list[ast.AST]:
    """The nodes of a function without those of the functions in it."""
    nodes, rest = [], list(ast.iter_child_nodes(function))
    while rest:
        node = rest.pop()
        if not isinstance(node, ast.FunctionDef):
            nodes.append(node)
            rest += ast.iter_child_nodes(node)
    return nodes


def _is_checked(call: ast.Call, checks: bool) -> bool:
    given = any(getattr(one, "id", "") == "check" for one in call.args)
    given |= any(word.arg == "check" for word in call.keywords)
    return given or (checks and name_of(call) not in CHECKING)


def test_each_wait_has_a_check():
    found = {
        f"{part}/{path.name}:{name}"
        for part in PARTS
        for path in sorted((ROOT / part).glob("*.py"))
        for name in unchecked(ast.parse(path.read_text()))
    }
    assert found == set(OTHERS)


class Ended(Exception):
    """SIGTERM has had the effect that it has outside of `fit`."""


@pytest.fixture
def training(monkeypatch):
    """A training that SIGTERM asks to save its state."""

    def end(number, frame):
        raise Ended

    monkeypatch.setattr(handling, "_FORMS_SECONDS", 0.3)
    before = signal.signal(signal.SIGTERM, end)
    with preemption.heeding():
        yield
        preemption.asked = False
    signal.signal(signal.SIGTERM, before)


class Members:
    """Form a group once they have been waited for."""

    waiting = ()

    def __init__(self, seconds):
        self.until = time.monotonic() + seconds

    def regroup(self, *, check, **terms):
        while time.monotonic() < self.until:
            check()
            time.sleep(0.01)
        return "a group"


def after_a_loss(group):
    return group.first()


def after_a_farewell(group):
    return group.after(GroupShrinks({1}))


@pytest.mark.parametrize("form", [after_a_loss, after_a_farewell])
@pytest.mark.parametrize("saves", [False, True])
def test_those_that_are_left_wait_for_others(training, form, saves):
    callbacks = [SimpleNamespace(on_group_wait=lambda *_: True)] if saves else []

    def group(seconds):
        session = SimpleNamespace(lost_ranks=[1])
        workers = SimpleNamespace(session=session, topology=SimpleNamespace(size=3))
        stages = SimpleNamespace(group=workers, most=lambda most: most, divided=False)
        delivered = SimpleNamespace(callbacks=callbacks)
        members = Members(seconds)
        return NextGroup(stages, delivered, members, min_workers=3, max_workers=None)

    signal.raise_signal(signal.SIGTERM)
    # The state is saved in the first step of a group that forms soon.
    assert form(group(0.1)) == "a group"
    assert preemption.asked
    with pytest.raises(Ended):
        form(group(FAR))


ME, OTHER_ONE = Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1")
GROUP = Topology((ME, OTHER_ONE))


@pytest.fixture
def session():
    session = Session(Topology(), {}, Options())
    session.topology = GROUP
    yield session
    session.close()


def caused(event, worker=OTHER_ONE):
    return Cause(f"{worker} is what it is.", event, str(worker))


UNAVAILABLE = tf.errors.UnavailableError(None, None, "a message that nobody reads")


def test_those_that_are_left_wait_for_a_worker_whose_step_has_failed(training, session):
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Ended):
        await_end(caused(FAILED), session, FAR, check=preemption.later_check())


@pytest.mark.parametrize("event", [FAILED, LEFT])
def test_a_worker_that_has_said_farewell_is_lost_later(session, event):
    farewell = find_farewell(UNAVAILABLE, GROUP, [caused(OTHER), caused(event)])
    assert farewell.event == event
    session.fail("its process has ended")
    assert await_end(farewell, session, FAR, check=lambda: None)


def test_a_worker_that_leaves_is_not_lost(session):
    session._state.leave("it has left")
    assert not await_end(caused(LEFT), session, FAR, check=lambda: None)


def test_nobody_waits_for_a_farewell_of_its_own():
    for causes in ([], [caused(OTHER)], [caused(FAILED, ME)], [caused(FAILED, f"{ME} GPU:1")]):
        assert find_farewell(UNAVAILABLE, GROUP, causes) is None
    for error in (ValueError(), GroupLostError()):
        assert find_farewell(error, GROUP, [caused(FAILED)]) is None


def test_whether_an_error_is_a_loss_is_known_at_once():
    tree = ast.parse((ROOT / "recovery" / "recovery.py").read_text())
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    calls = [one for one in _own(functions["is_loss"]) if isinstance(one, ast.Call)]
    assert calls and not any(is_wait(call) or name_of(call) == "await_end" for call in calls)


@pytest.mark.parametrize("event", [LOST, SILENT])
def test_a_loss_that_only_the_core_has_seen(session, event):
    causes = [caused(OTHER), caused(event)]
    for error in (ValueError(), GroupLostError()):
        assert not is_loss(error, session, causes)
    assert is_loss(UNAVAILABLE, session, causes)
    # The next group is formed with what the core knows.
    assert session.lost_ranks == [1]
    assert session.silent_ranks == [1] * (event == SILENT)
    assert session.failure == "rank 1, worker 1 (b:1) is what it is; see its log"
    assert is_loss(UNAVAILABLE, session, [])


@pytest.mark.parametrize("event", [OTHER, LEFT, FAILED])
def test_events_of_living_workers_are_no_loss(session, event):
    assert not is_loss(UNAVAILABLE, session, [caused(event)])
    assert session.failure is None


def test_an_error_after_which_the_session_has_ended_otherwise(session):
    session._state.fail(RendezvousError("not in time"))
    assert not is_loss(UNAVAILABLE, session, [])
