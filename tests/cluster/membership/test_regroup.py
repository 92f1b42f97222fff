"""Workers are killed, stopped and replaced; the others form a new group in their processes."""

import contextlib
import signal
import time

import pytest

from tests.certificates import variables
from tests.harness.netns import ip, two_hosts
from tests.harness.tiers import exhaustive, some
from tfdist._src.cluster import from_tf_config
from tfdist._src.cluster.auth.handshake import MAGIC, handshake
from tfdist._src.cluster.auth.identity import REGROUP, Identity
from tfdist._src.cluster.membership.joining import join_running
from tfdist._src.cluster.membership.record import folder
from tfdist._src.cluster.net.framing import encode
from tfdist._src.cluster.observation import ask
from tfdist._src.options import Options
from tfdist.errors import ClusterError, TlsError

from ..conftest import tf_config

NEVER = {"TFDIST_HEARTBEAT_TIMEOUT": "3600"}
SOON = {"TFDIST_HEARTBEAT_TIMEOUT": "2"}


def survivors(workers, dead):
    return [worker for index, worker in enumerate(workers) if index not in dead]


def formed(workers, generation, members):
    """Waits until all have formed the group of these members, in this order."""
    names = ",".join(map(str, members))
    for rank, worker in enumerate(workers):
        line = worker.until(f"members {names}.")
        assert f"generation {generation} rank {rank} members" in line


@pytest.mark.parametrize(
    ("count", "dead"),
    some(
        [(2, [1]), (2, [0]), (3, [1]), (3, [0]), (4, [2]), (4, [0]), (4, [1, 3]), (4, [0, 1])],
        always=[(3, [0])],
    ),
)
def test_the_others_go_on_when_some_are_killed(group, count, dead):
    # With these limits nothing can be noticed by silence.
    _, workers = group(count, **NEVER)
    for index in dead:
        workers[index].kill()
    left = [index for index in range(count) if index not in dead]
    rest = survivors(workers, dead)
    for worker in rest:
        assert "is lost" in worker.until("failed")
    # A worker that is found dead a little later costs another generation.
    names = ",".join(map(str, left))
    for rank, worker in enumerate(rest):
        assert f"rank {rank} members {names}." in worker.until(f"members {names}.")
    if len(dead) == 1:
        for worker in workers:
            worker.kill()


@exhaustive
def test_one_after_the_other_until_one_is_left(group):
    _, workers = group(4, **NEVER)
    for generation, victim in enumerate([0, 2, 1], start=1):
        workers[victim].kill()
        victims = [0, 2, 1][:generation]
        left = [index for index in range(4) if index not in victims]
        formed(survivors(workers, victims), generation, left)


@exhaustive
@pytest.mark.parametrize("phase", ["prepare", "accept", "arrive"])
def test_another_is_killed_while_the_new_group_forms(group, phase):
    # Of two that are left when the third is dead, rank 0 needs nobody to accept what it proposes.
    lost = signal.SIGSTOP if phase == "accept" else signal.SIGKILL
    _, workers = group(3, {2: {"DIE_IN": phase}}, **(SOON if phase == "accept" else NEVER))
    workers[1].send_signal(lost)
    workers[0].until("members 0.")


@exhaustive
@pytest.mark.parametrize("phase", ["propose", "decided", "receive"])
def test_the_one_that_leads_is_killed_while_the_new_group_forms(group, phase):
    _, workers = group(4, {0: {"DIE_IN": phase}}, **NEVER)
    workers[1].kill()
    for worker in (workers[2], workers[3]):
        worker.until("members 2,3.")


@exhaustive
@pytest.mark.parametrize("busy", [0, 2])
def test_a_worker_that_is_busy_for_too_long_is_left_out_and_learns_of_it(group, busy):
    limits = {"TFDIST_START_TIMEOUT": "5", "TFDIST_COLLECTIVE_TIMEOUT": "5"}
    _, workers = group(4, {busy: {"BUSY": "20"}}, **NEVER, **limits)
    workers[3].kill()
    left = [index for index in range(3) if index != busy]
    names = ",".join(map(str, left))
    for index in left:
        workers[index].until(f"members {names}.")
    line = workers[busy].until("ended")
    assert "was given up: generation" in line and "formed without it, by 2 workers" in line
    for index in left:
        assert workers[index].poll() is None


@exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_worker_is_given_up_and_learns_of_it(group, victim):
    _, workers = group(3, **SOON)
    workers[victim].send_signal(signal.SIGSTOP)
    left = [index for index in range(3) if index != victim]
    formed(survivors(workers, [victim]), 1, left)
    workers[victim].send_signal(signal.SIGCONT)
    line = workers[victim].until("ended")
    assert "was given up: generation 1 of the group was formed without it, by 2 workers" in line
    workers[victim].rest()


@exhaustive
def test_half_of_a_group_goes_on_only_with_its_first_member(group):
    _, workers = group(2, **SOON, TFDIST_START_TIMEOUT="5")
    workers[0].send_signal(signal.SIGSTOP)
    line = workers[1].until("ended")
    assert "1 of 2 workers of the last group are present, which is no majority in time" in line
    assert "worker 0 (" in line and "does not answer" in line
    workers[0].send_signal(signal.SIGCONT)
    formed([workers[0]], 1, [0])


@exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_those_that_have_noticed_nothing_are_told(group, rank):
    _, workers = group(3, {rank: {"FAIL": "1"}}, **NEVER)
    formed(workers, 1, [0, 1, 2])


@exhaustive
def test_the_new_group_uses_tls(group, start):
    secure = {**NEVER, **variables(), "TFDIST_SECRET": "s"}
    cluster, workers = group(3, **secure)
    workers[1].kill()
    formed([workers[0], workers[2]], 1, [0, 2])
    workers[1] = start(cluster, 1, **secure)
    formed([workers[0], workers[2], workers[1]], 2, [0, 2, 1])


@exhaustive
def test_too_few_are_left(group):
    _, workers = group(3, **NEVER, MIN_WORKERS="3", TFDIST_START_TIMEOUT="3")
    workers[1].kill()
    line = workers[0].until("ended")
    assert "2 of at least 3 workers remain after 3 s; missing: worker 1 (" in line
    assert "is dead" in line


def test_those_that_are_released_need_not_be_a_minority(group):
    _, workers = group(3, **NEVER, LEAVING="0 1")
    for worker in workers[:2]:
        worker.until("released")
    line = workers[2].until("form generation 1")
    assert line.count("has left") == 2
    formed(workers[2:], 1, [2])


def test_a_check_ends_waits(group, start, addresses):
    cluster, workers = group(3, **NEVER, MIN_WORKERS="3", MAX_WORKERS="3")
    joins = start([*cluster, *addresses(1)], 3, **NEVER)
    joins.until("waits")
    joins.send_signal(signal.SIGTERM)
    workers[2].kill()
    # Of those that wait for a third one, the second one follows the first.
    for worker in (workers[1], workers[0]):
        worker.until("failed")
        worker.send_signal(signal.SIGTERM)
    for worker in (joins, workers[1], workers[0]):
        worker.rest()
        assert worker.returncode == 75


def test_a_worker_joins_and_a_dead_rank_0_is_replaced(group, start, addresses):
    cluster, workers = group(2, **NEVER)
    wider = [*cluster, *addresses(1)]
    workers.append(start(wider, 2, **NEVER))
    workers[2].until("waits")
    formed(workers, 1, [0, 1, 2])
    workers[0].kill()
    formed(workers[1:], 2, [1, 2])
    replacement = start(wider, 0, **NEVER)
    replacement.until("waits")
    formed([*workers[1:], replacement], 3, [1, 2, 0])


@exhaustive
def test_workers_wait_for_the_smallest_group_and_not_more_than_the_largest_join(group, start):
    cluster, workers = group(2, **NEVER, MIN_WORKERS="2", MAX_WORKERS="2")
    extra = start([*cluster, "127.0.0.1:1"], 1, **NEVER, MIN_WORKERS="2", MAX_WORKERS="2")
    assert "in use by process" in extra.rest()  # the address of a living worker
    workers[0].kill()
    workers[1].until("failed")
    replacement = start(cluster, 0, **NEVER, MIN_WORKERS="2", MAX_WORKERS="2")
    replacement.until("waits")
    formed([workers[1], replacement], 1, [1, 0])


@exhaustive
def test_a_replacement_proves_the_death_of_a_worker_of_another_host(group, start):
    hosts = [{"TFDIST_HOST": "a"}, {"TFDIST_HOST": "b"}]
    cluster, workers = group(2, dict(enumerate(hosts)), **NEVER)
    workers[0].kill()
    workers[1].until("failed")  # Alone it is no majority, and it cannot see why 0 is silent.
    replacement = start(cluster, 0, **NEVER, **hosts[0])
    formed([workers[1], replacement], 1, [1, 0])


@exhaustive
def test_whoever_leads_takes_newcomers_when_rank_0_is_dead(group, start, addresses):
    cluster, workers = group(2, **NEVER, MIN_WORKERS="2")
    workers[0].kill()
    workers[1].until("failed")
    newcomer = start([*cluster, *addresses(1)], 2, **NEVER, MIN_WORKERS="2")
    formed([workers[1], newcomer], 1, [1, 2])


@exhaustive
@pytest.mark.parametrize("index", [0, 1])
def test_a_newcomer_may_name_another_one_that_has_yet_to_join(group, start, addresses, index):
    """It begins to wait for a job of the two, and learns that the other one is in this job."""
    cluster, workers = group(2, **NEVER)
    one, two = addresses(2)
    pair = [two, one] if index == 0 else [one, two]
    second = start(pair, index, **NEVER)
    second.until("waiting for")
    first = start([cluster[0], one], 1, **NEVER)
    first.until("waits")
    second.until("waits")
    for rank, worker in enumerate([*workers, first, second]):
        worker.until(f"generation 2 rank {rank} ")


@exhaustive
def test_a_joiner_that_dies_while_it_waits_is_forgotten(group, start, addresses):
    cluster, workers = group(2, **NEVER, MAX_WORKERS="2")
    wider = [*cluster, *addresses(2)]
    one = start(wider, 2, **NEVER)
    one.until("waits")
    one.kill()
    workers[1].kill()
    workers[0].until("members 0.")
    assert workers[0].poll() is None


@exhaustive
@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=exhaustive)])
def test_strangers_are_refused(group, start, dial, tls):
    more = variables() if tls else {}
    secret = {"TFDIST_SECRET": "s", **more}
    cluster, workers = group(2, **NEVER, **secret)
    topology = from_tf_config(tf_config([*cluster, "127.0.0.1:1"], 2))
    if tls:
        with pytest.raises(TlsError):
            join_running(topology, Options(secret="s"))
    else:
        with pytest.raises(ClusterError, match="their secrets differ"):
            join_running(topology, Options(secret="other"))
    garbage = [b"GET / HTTP/1.1\r\n\r\n", MAGIC + encode({"kind": "hello"})]
    for one in garbage:
        with dial(cluster[1]) as sock:
            sock.sendall(one)
            while sock.recv(4096):
                pass
    if not tls:  # a member of the job that sends nonsense
        for header in ({"kind": "prepare"}, {"kind": "x"}, {"kind": "enter", "view": {}}):
            with dial(cluster[1]) as sock:
                hello = Identity.of(topology, REGROUP)
                handshake(sock, hello, "s", time.monotonic() + 60, first=True)
                sock.sendall(encode(header))
                while sock.recv(4096):
                    pass
        # An observer is answered at the same address.
        assert len(ask(cluster[0], Options(secret="s"))) == 2
    workers[0].kill()
    formed(workers[1:], 1, [1])


@exhaustive
@pytest.mark.parametrize("how", [{}, {"EXITS": "1"}])
def test_records_are_removed(group, how):
    left = set(folder().glob("*"))  # by jobs that were killed, perhaps with the same addresses
    cluster, workers = group(3, **NEVER, **how, END_WITH="2")

    def records():
        found = []
        for path in set(folder().glob("*")) - left:  # those of other jobs, too
            with contextlib.suppress(FileNotFoundError):
                found += [path] * (cluster[0] in path.read_text())
        return found

    assert len(records()) == 3
    workers[1].kill()
    for worker in (workers[0], workers[2]):
        worker.until("members 0,2.")
        worker.rest()
    assert not records()


@pytest.fixture
def hosts():
    with two_hosts("split", "10.79.0") as names:
        yield names


@exhaustive
@pytest.mark.parametrize("smaller_side", [0, 1])
def test_a_cut_network_leaves_one_group(hosts, start, smaller_side):
    cluster = ["10.79.0.1:2222", "10.79.0.2:2222", "10.79.0.1:2223", "10.79.0.2:2223"]
    sides = [0, 1, 0, 1]
    if smaller_side == 0:
        cluster, sides = cluster[:2] + cluster[3:], [0, 1, 1]
    workers = [
        start(
            cluster,
            index,
            ("ip", "netns", "exec", hosts[side]),
            TFDIST_SECRET="s",
            TFDIST_HOST=f"h{side}",
            TFDIST_HEARTBEAT_TIMEOUT="2",
            TFDIST_START_TIMEOUT="12",
        )
        for index, side in enumerate(sides)
    ]
    for worker in workers:
        worker.until("met")
    ip("-n", hosts[0], "link", "set", "eth0", "down")
    # More than half goes on, or half with rank 0.
    winner = 1 - smaller_side
    left = [index for index, side in enumerate(sides) if side == winner]
    formed([workers[index] for index in left], 1, left)
    for index, side in enumerate(sides):
        if side != winner:
            assert "cannot continue" in workers[index].until("ended")
