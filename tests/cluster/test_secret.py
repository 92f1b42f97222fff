"""Only who holds the job's secret takes part; who does not learns what to do."""

import dataclasses
import json
import socket
import struct
import threading
import time

import pytest

from tests.deadlines import FAR
from tfdist.cluster import Topology
from tfdist.cluster.auth.handshake import MAGIC, handshake
from tfdist.cluster.auth.hmac_challenge import new_challenge, new_secret, prove, proves
from tfdist.cluster.auth.identity import Identity
from tfdist.cluster.net.framing import HELLO_LIMIT, WireError, encode, read_exactly, read_frame
from tfdist.cluster.spec.topology import Worker
from tfdist.errors import ClusterError

WORKERS = (Worker("worker", 0, "a:1"), Worker("worker", 1, "b:1"))
LISTENER = Identity.of(Topology(WORKERS, 0, "worker", 0))
DIALLER = Identity.of(Topology(WORKERS, 1, "worker", 1))


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(FAR)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def shake(pair, together):
    """Both ends of a handshake, each with its secret; returns what each got or raised."""

    def both(one, two, admit=None, dialler=DIALLER):
        deadline = time.monotonic() + FAR
        secrets, mine = (one, two), (dialler, LISTENER)

        def end(n):
            extra = {"admit": admit} if n == 1 else {}
            try:
                return handshake(pair[n], mine[n], secrets[n], deadline, first=n == 0, **extra)
            except (OSError, WireError):
                pair[n].shutdown(socket.SHUT_RDWR)
                raise

        return together(end, [0, 1])

    return both


@pytest.mark.parametrize(
    "secret", ["", "s", "ü" * 1000, "\udcff", pytest.param(new_secret(), id="new")]
)
def test_the_same_secret(shake, secret):
    assert shake(secret, secret) == [LISTENER, DIALLER]


@pytest.mark.parametrize(
    ("one", "two"), [("", "s"), ("s", ""), ("s", "t"), ("s", "s "), ("a", "á")]
)
def test_another_secret(shake, one, two):
    dialled, listened = shake(one, two)
    assert isinstance(dialled, ClusterError)
    where = f"{LISTENER} refused {DIALLER}: the two do not hold the same secret"
    set_here = "(one is set here)" if one else "(none is set here)"
    assert str(dialled) == f"{where} {set_here}. Set the same TFDIST_SECRET on all workers."
    assert isinstance(listened, WireError)
    assert f"it says that it is {DIALLER}, and does not hold the secret" in str(listened)
    assert "set the same TFDIST_SECRET" in str(listened)


def test_nobody_is_told_that_it_is_accepted_before_it_is(shake):
    def admit(hello):
        assert hello == DIALLER
        raise WireError("it does not fit")

    dialled, listened = shake("s", "s", admit)
    assert isinstance(dialled, OSError)
    assert str(listened) == "it does not fit"


def test_only_the_proven_are_looked_at(shake):
    seen = []
    shake("t", "s", seen.append)
    assert seen == []


def test_another_protocol(shake):
    dialled, listened = shake("s", "s", dialler=dataclasses.replace(DIALLER, protocol=99))
    assert isinstance(dialled, ClusterError)
    assert "different protocols" in str(dialled)
    assert isinstance(listened, WireError)


def test_proofs_differ_by_everything():
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
    """The other end, which holds no secret and plays by its own rules."""

    def __init__(self, sock):
        self.sock = sock

    def read(self, magic=False):
        if magic:
            assert read_exactly(self.sock, len(MAGIC), time.monotonic() + FAR) == MAGIC
        return read_frame(self.sock, HELLO_LIMIT, time.monotonic() + FAR)[0]

    def say(self, header, magic=False):
        self.sock.sendall((MAGIC if magic else b"") + encode(header))


def hello(mine, challenge):
    return {"kind": "hello", **dataclasses.asdict(mine), "challenge": challenge}


def failing(sock, first, mine):
    """A handshake that must fail, in a thread; returns how to get its error."""
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


@pytest.mark.parametrize("mine", [LISTENER, DIALLER])
def test_reflection_proves_nothing(pair, mine):
    """The impostor gives back the dialler's own challenge and its own proof."""
    error = failing(pair[0], True, DIALLER)
    impostor = Impostor(pair[1])
    said = impostor.read(magic=True)
    impostor.say({**said, "rank": mine.rank}, magic=True)
    proof = impostor.read()
    assert proof["kind"] == "proof"
    impostor.say(proof)
    assert isinstance(error(), WireError)
    assert "does not hold the secret" in str(error())


def test_reflection_at_the_listener_proves_nothing(pair):
    error = failing(pair[0], False, LISTENER)
    impostor = Impostor(pair[1])
    impostor.say(hello(DIALLER, "0" * 64), magic=True)
    said = impostor.read(magic=True)
    impostor.say({"kind": "proof", "proof": said["challenge"]})
    assert impostor.read() == {"kind": "refused"}
    assert isinstance(error(), WireError)


def test_a_listener_without_the_secret_gets_no_further(pair):
    error = failing(pair[0], True, DIALLER)
    impostor = Impostor(pair[1])
    impostor.read(magic=True)
    impostor.say(hello(LISTENER, "0" * 64), magic=True)
    impostor.read()
    impostor.say({"kind": "proof", "proof": "0" * 64})
    assert isinstance(error(), WireError)


def test_a_recorded_conversation_cannot_be_played_again(together):
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
    both = together(
        lambda n: handshake(ends[n][0], (DIALLER, LISTENER)[n], "s", deadline, first=n == 0), [0, 1]
    )
    assert both == [LISTENER, DIALLER]
    words = b"".join(data for source, data in recorded if source is ends[0][1])
    one, two = socket.socketpair()
    with one, two:
        error = failing(one, False, LISTENER)
        two.sendall(words)
        assert isinstance(error(), WireError)
        assert "does not hold the secret" in str(error())
    for near, _ in ends:
        near.shutdown(socket.SHUT_WR)  # the end of what a recorder reads
    for recorder in recorders:
        recorder.join()
    for pair in ends:
        for end in pair:
            end.close()


@pytest.mark.parametrize("change", [{"rank": 7}, {"purpose": "other"}, {"pid": 1}])
@pytest.mark.parametrize("changed", [0, 1])
def test_a_hello_that_was_changed_on_the_way_proves_nothing(together, change, changed):
    """Somebody between the two passes everything on but one word of one hello."""
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
    dialled, listened = together(
        lambda n: handshake(ends[n][0], (DIALLER, LISTENER)[n], "s", deadline, first=n == 0), [0, 1]
    )
    assert isinstance(listened, WireError)
    assert isinstance(dialled, ClusterError)
    middle.join()
    for pair in ends:
        for end in pair:
            end.close()


def test_the_job_goes_on_waiting_for_the_right_one(addresses, attempt):
    places = addresses(3)
    hub = attempt(places, 0, secret="right")
    other = attempt(places, 1, secret="right")
    wrong = attempt(places, 2, secret="wrong")
    error = wrong.failed()
    assert isinstance(error, ClusterError)
    for part in (f"worker 0 ({places[0]})", f"worker 2 ({places[2]})", "Set the same TFDIST_SEC"):
        assert part in str(error)
    for one in (attempt(places, 2, secret="right"), hub, other):
        one.met()
    (line,) = [line for line in hub.lines if "dropped" in line]
    assert f"it says that it is worker 2 ({places[2]}), process " in line
    assert "127.0.0.1:" in line
    shown = " ".join([str(error), *hub.lines])
    assert "wrong" not in shown and "right" not in shown


def test_without_the_secret_nobody_ends_the_job(addresses, attempt):
    """Another cluster, version or rank is news only from one that holds the secret."""
    places = addresses(3)
    hub = attempt(places[:2], 0, secret="s")
    assert "same secret" in str(attempt([places[0], places[2]], 1).failed())
    for one in (hub, attempt(places[:2], 1, secret="s")):
        one.met()


def test_rank_0_without_the_secret_is_none(addresses, attempt, dial):
    """An impostor at rank 0's address that accepts everybody."""
    places = addresses(2)
    worker = attempt(places, 1, secret="s")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(places[0].rpartition(":")[2])))
        listener.listen()
        sock, _ = listener.accept()
    with sock:
        sock.settimeout(FAR)
        impostor = Impostor(sock)
        impostor.read(magic=True)
        chief = Identity.of(Topology(worker.topology.workers, 0, "worker", 0))
        impostor.say(hello(chief, "0" * 64), magic=True)
        impostor.read()
        impostor.say({"kind": "proof", "proof": "0" * 64})
        impostor.say({"kind": "go"})
    for one in (attempt(places, 0, secret="s"), worker):
        one.met()


def test_a_worker_that_came_for_something_else(addresses, attempt, dial):
    places = addresses(2)
    hub = attempt(places, 0, secret="s")
    hello = Identity.of(Topology(hub.topology.workers, 1, "worker", 1), "something else")
    with dial(places[0]) as sock, pytest.raises(OSError):
        handshake(sock, hello, "s", time.monotonic() + FAR, first=True)
    for one in (attempt(places, 1, secret="s"), hub):
        one.met()
    assert len([line for line in hub.lines if "came for 'something else'" in line]) == 1


@pytest.mark.parametrize(("rank", "purpose"), [(2, "join"), (0, "something else")])
def test_a_worker_at_rank_0s_address_that_is_not_there_for_it(addresses, attempt, rank, purpose):
    places = addresses(3)
    worker = attempt(places, 1, secret="s")
    hello = Identity.of(Topology(worker.topology.workers, rank, "worker", rank), purpose)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(places[0].rpartition(":")[2])))
        listener.listen()
        sock, _ = listener.accept()
        with sock:
            handshake(sock, hello, "s", time.monotonic() + FAR, first=False)
            sock.sendall(encode({"kind": "go"}))
    for one in (attempt(places, 0, secret="s"), attempt(places, 2, secret="s"), worker):
        one.met()


@pytest.mark.parametrize(
    "words",
    [
        b"\x00" * 100,
        MAGIC + struct.pack("!II", 2, 0) + b"{}",
        MAGIC + encode(hello(DIALLER, "x" * 64)),
        MAGIC + encode(hello(DIALLER, 3)),
        MAGIC + encode(hello(DIALLER, "0" * 64)) + encode({"kind": "proof"}),
        MAGIC + encode(hello(DIALLER, "0" * 64)) + encode({"kind": "proof", "proof": {}}),
        MAGIC + encode(hello(DIALLER, "0" * 64)) + encode({"kind": "go"}),
        MAGIC + encode(hello(DIALLER, "0" * 64)) + json.dumps({"proof": 1}).encode() * 9,
    ],
)
def test_garbage(addresses, attempt, dial, until, words):
    places = addresses(2)
    hub = attempt(places, 0, secret="s")
    with dial(places[0]) as stranger:
        stranger.sendall(words)
        until(lambda: hub.lines)
        attempt(places, 1, secret="s").met()
        hub.met()
    assert len([line for line in hub.lines if "dropped a connection from 127." in line]) == 1
