"""Only processes with the job's secret can join; the others get a helpful error."""

import dataclasses
import json
import socket
import struct
import threading
import time

import pytest

from tests.harness.deadlines import FAR
from tfdist._src.cluster import Topology
from tfdist._src.cluster.auth.handshake import (
    MAGIC,
    handshake,
    new_challenge,
    new_secret,
    prove,
    proves,
)
from tfdist._src.cluster.auth.identity import Identity
from tfdist._src.cluster.cluster_spec import Worker
from tfdist._src.cluster.net.framing import HELLO_LIMIT, WireError, encode, read_exactly, read_frame
from tfdist.errors import ClusterError

WORKERS = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
LISTENER = Identity.of(Topology(WORKERS, 0, "worker", 0))
DIALER = Identity.of(Topology(WORKERS, 1, "worker", 1))


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(FAR)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def shake(pair, in_parallel):
    """Both ends of a handshake, each with its secret; returns what each got or raised."""

    def both(one, two, admit=None, dialer=DIALER):
        deadline = time.monotonic() + FAR
        secrets, mine = (one, two), (dialer, LISTENER)

        def end(n):
            extra = {"admit": admit} if n == 1 else {}
            try:
                return handshake(pair[n], mine[n], secrets[n], deadline, first=n == 0, **extra)
            except (OSError, WireError):
                pair[n].shutdown(socket.SHUT_RDWR)
                raise

        return in_parallel(end, [0, 1])

    return both


@pytest.mark.parametrize(
    "secret", ["", "s", "ü" * 1000, "\udcff", pytest.param(new_secret(), id="new")]
)
def test_the_same_secret(shake, secret):
    assert shake(secret, secret) == [LISTENER, DIALER]


@pytest.mark.parametrize(
    ("one", "two"), [("", "s"), ("s", ""), ("s", "t"), ("s", "s "), ("a", "á")]
)
def test_different_secrets_are_refused_on_both_sides(shake, one, two):
    dialed, listened = shake(one, two)
    assert isinstance(dialed, ClusterError)
    where = f"the other end refused {DIALER}: their secrets differ"
    set_here = "(one is set here)" if one else "(none is set here)"
    assert str(dialed) == f"{where} {set_here}. Set the same TFDIST_SECRET on all workers."
    assert isinstance(listened, WireError)
    assert f"it claims to be {DIALER}, but does not have the secret" in str(listened)
    assert "set the same TFDIST_SECRET" in str(listened)


def test_a_dialer_is_accepted_only_after_admit(shake):
    def admit(hello):
        assert hello == DIALER
        raise WireError("it does not fit")

    dialed, listened = shake("s", "s", admit)
    assert isinstance(dialed, OSError)
    assert str(listened) == "it does not fit"


def test_only_authenticated_peers_reach_admit(shake):
    seen = []
    shake("t", "s", seen.append)
    assert seen == []


def test_different_protocols_are_refused_on_both_sides(shake):
    dialed, listened = shake("s", "s", dialer=dataclasses.replace(DIALER, protocol=99))
    assert isinstance(dialed, ClusterError)
    assert "different protocols" in str(dialed)
    assert isinstance(listened, WireError)


def test_proofs_depend_on_everything():
    given = ["s", "role", b"one", b"two"]
    proof = prove(*given)
    assert proves(proof, *given)
    for other in (
        ["t", "role", b"one", b"two"],
        ["s", "other", b"one", b"two"],
        ["s", "role", b"onet", b"wo"],
        ["s", "role", b"two", b"one"],
        ["s", "role", b"one"],
    ):
        assert not proves(proof, *other)
    for nonsense in (None, 3, "", "ä", "\udcff", proof.upper(), proof[:-1], [proof]):
        assert not proves(nonsense, *given)
    assert len({new_challenge() for _ in range(100)}) == 100


class Impostor:
    """A peer without the secret that deviates from the protocol."""

    def __init__(self, sock):
        self.sock = sock

    def read(self, magic=False):
        if magic:
            assert read_exactly(self.sock, len(MAGIC), time.monotonic() + FAR) == MAGIC
        return read_frame(self.sock, HELLO_LIMIT, time.monotonic() + FAR)[0]

    def say(self, header, magic=False):
        self.sock.sendall((MAGIC if magic else b"") + encode(header))


def challenge(value="0" * 64):
    return {"kind": "challenge", "protocol": LISTENER.protocol, "challenge": value}


def listeners_proof(mine, proof="0" * 64):
    return {**dataclasses.asdict(mine), "kind": "proof", "proof": proof}


def hello(mine, challenge):
    return {"kind": "hello", **dataclasses.asdict(mine), "challenge": challenge}


def failing(sock, first, mine):
    """Runs a handshake that must fail in a thread; returns a function to get its error."""
    errors = []

    def run():
        try:
            handshake(sock, mine, "s", time.monotonic() + FAR, first=first)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def error():
        thread.join()
        return errors[0]

    return error


@pytest.mark.parametrize("mine", [LISTENER, DIALER])
def test_reflection_proves_nothing(pair, mine):
    """The impostor sends back the dialer's challenge and proof."""
    error = failing(pair[0], True, DIALER)
    impostor = Impostor(pair[1])
    said = impostor.read(magic=True)
    impostor.say(challenge(said["challenge"]), magic=True)
    proof = impostor.read()
    assert proof["kind"] == "proof"
    impostor.say(listeners_proof(mine, proof["proof"]))
    assert isinstance(error(), WireError)
    assert "does not have the secret" in str(error())


def test_reflection_at_the_listener_proves_nothing(pair):
    error = failing(pair[0], False, LISTENER)
    impostor = Impostor(pair[1])
    impostor.say(hello(DIALER, "0" * 64), magic=True)
    said = impostor.read(magic=True)
    impostor.say({"kind": "proof", "proof": said["challenge"]})
    assert impostor.read() == {"kind": "refused"}
    assert isinstance(error(), WireError)


def test_a_listener_without_the_secret_is_rejected(pair):
    error = failing(pair[0], True, DIALER)
    impostor = Impostor(pair[1])
    impostor.read(magic=True)
    impostor.say(challenge(), magic=True)
    impostor.read()
    impostor.say(listeners_proof(LISTENER))
    assert isinstance(error(), WireError)


def test_a_recorded_conversation_cannot_be_replayed(in_parallel):
    deadline = time.monotonic() + FAR
    recorded = []

    def record(source, target):
        while data := source.recv(4096):
            recorded.append((source, data))
            target.sendall(data)

    ends = [socket.socketpair() for _ in range(2)]
    ways = ((ends[0][1], ends[1][1]), (ends[1][1], ends[0][1]))
    recorders = [threading.Thread(target=record, args=way, daemon=True) for way in ways]
    for recorder in recorders:
        recorder.start()
    both = in_parallel(
        lambda n: handshake(ends[n][0], (DIALER, LISTENER)[n], "s", deadline, first=n == 0), [0, 1]
    )
    assert both == [LISTENER, DIALER]
    words = b"".join(data for source, data in recorded if source is ends[0][1])
    one, two = socket.socketpair()
    with one, two:
        error = failing(one, False, LISTENER)
        two.sendall(words)
        assert isinstance(error(), WireError)
        assert "does not have the secret" in str(error())
    for near, _ in ends:
        near.shutdown(socket.SHUT_WR)  # the end of what a recorder reads
    for recorder in recorders:
        recorder.join()
    for pair in ends:
        for end in pair:
            end.close()


@pytest.mark.parametrize("change", [{"rank": 7}, {"purpose": "other"}, {"pid": 1}])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_modified_hello_is_rejected(in_parallel, change, changed):
    """A man in the middle modifies one field of one hello."""
    ends = [socket.socketpair() for _ in range(2)]
    for pair in ends:
        for end in pair:
            end.settimeout(FAR)

    def between():
        for n in (0, 1):
            read_exactly(ends[n][1], len(MAGIC), time.monotonic() + FAR)
            said, _ = read_frame(ends[n][1], HELLO_LIMIT, time.monotonic() + FAR)
            if n == changed:
                said.update(change)
            ends[1 - n][1].sendall(MAGIC + encode(said))
        for n in (0, 1):
            ends[1 - n][1].sendall(ends[n][1].recv(4096))

    middle = threading.Thread(target=between, daemon=True)
    middle.start()
    deadline = time.monotonic() + FAR
    dialed, listened = in_parallel(
        lambda n: handshake(ends[n][0], (DIALER, LISTENER)[n], "s", deadline, first=n == 0), [0, 1]
    )
    assert isinstance(listened, WireError)
    assert isinstance(dialed, ClusterError)
    middle.join()
    for pair in ends:
        for end in pair:
            end.close()


def test_the_job_keeps_waiting_for_the_right_worker(addresses, attempt):
    cluster = addresses(3)
    coordinator = attempt(cluster, 0, secret="right")
    other = attempt(cluster, 1, secret="right")
    wrong = attempt(cluster, 2, secret="wrong")
    error = wrong.failed()
    assert isinstance(error, ClusterError)
    for part in (f"worker 0 ({cluster[0]})", f"worker 2 ({cluster[2]})", "Set the same TFDIST_SEC"):
        assert part in str(error)
    for one in (attempt(cluster, 2, secret="right"), coordinator, other):
        one.met()
    (line,) = [line for line in coordinator.lines if "dropped" in line]
    assert f"it claims to be worker 2 ({cluster[2]}), process " in line
    assert "127.0.0.1:" in line
    shown = " ".join([str(error), *coordinator.lines])
    assert "wrong" not in shown and "right" not in shown


def test_processes_without_the_secret_cannot_fail_the_job(addresses, attempt):
    """A different cluster, version or rank fails the job only if the process has the secret."""
    cluster = addresses(3)
    coordinator = attempt(cluster[:2], 0, secret="s")
    assert "secrets differ" in str(attempt([cluster[0], cluster[2]], 1).failed())
    for one in (coordinator, attempt(cluster[:2], 1, secret="s")):
        one.met()


def test_rank_0_without_the_secret_is_rejected(addresses, attempt, dial):
    """An impostor at rank 0's address that accepts everyone."""
    cluster = addresses(2)
    worker = attempt(cluster, 1, secret="s")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(cluster[0].rpartition(":")[2])))
        listener.listen()
        sock, _ = listener.accept()
    with sock:
        sock.settimeout(FAR)
        impostor = Impostor(sock)
        impostor.read(magic=True)
        chief = Identity.of(Topology(worker.topology.workers, 0, "worker", 0))
        impostor.say(challenge(), magic=True)
        impostor.read()
        impostor.say(listeners_proof(chief))
        impostor.say({"kind": "go"})
    for one in (attempt(cluster, 0, secret="s"), worker):
        one.met()


def test_a_worker_with_another_purpose(addresses, attempt, dial):
    cluster = addresses(2)
    coordinator = attempt(cluster, 0, secret="s")
    hello = Identity.of(Topology(coordinator.topology.workers, 1, "worker", 1), "something else")
    with dial(cluster[0]) as sock, pytest.raises(OSError):
        handshake(sock, hello, "s", time.monotonic() + FAR, first=True)
    for one in (attempt(cluster, 1, secret="s"), coordinator):
        one.met()
    lines = [line for line in coordinator.lines if "connected for 'something else'" in line]
    assert len(lines) == 1


@pytest.mark.parametrize(("rank", "purpose"), [(2, "join"), (0, "something else")])
def test_another_worker_at_the_address_of_rank_0(addresses, attempt, rank, purpose):
    cluster = addresses(3)
    worker = attempt(cluster, 1, secret="s")
    hello = Identity.of(Topology(worker.topology.workers, rank, "worker", rank), purpose)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(cluster[0].rpartition(":")[2])))
        listener.listen()
        sock, _ = listener.accept()
        with sock:
            handshake(sock, hello, "s", time.monotonic() + FAR, first=False)
            sock.sendall(encode({"kind": "go"}))
    for one in (attempt(cluster, 0, secret="s"), attempt(cluster, 2, secret="s"), worker):
        one.met()


@pytest.mark.parametrize(
    "words",
    [
        b"\x00" * 100,
        MAGIC + struct.pack("!II", 2, 0) + b"{}",
        MAGIC + encode(hello(DIALER, "x" * 64)),
        MAGIC + encode(hello(DIALER, 3)),
        MAGIC + encode(hello(DIALER, "0" * 64)) + encode({"kind": "proof"}),
        MAGIC + encode(hello(DIALER, "0" * 64)) + encode({"kind": "proof", "proof": {}}),
        MAGIC + encode(hello(DIALER, "0" * 64)) + encode({"kind": "go"}),
        MAGIC + encode(hello(DIALER, "0" * 64)) + json.dumps({"proof": 1}).encode() * 9,
    ],
)
def test_a_stranger_that_sends_garbage_is_dropped(addresses, attempt, dial, until, words):
    cluster = addresses(2)
    coordinator = attempt(cluster, 0, secret="s")
    with dial(cluster[0]) as stranger:
        stranger.sendall(words)
        until(lambda: coordinator.lines)
        attempt(cluster, 1, secret="s").met()
        coordinator.met()
    lines = [line for line in coordinator.lines if "dropped a connection from 127." in line]
    assert len(lines) == 1
