"""TLS between the workers: who can join, who is rejected, and the messages."""

import select
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest

from tests.certificates import FOLDER, files, variables
from tests.harness.deadlines import FAR
from tests.harness.tiers import some
from tfdist._src.cluster.auth.handshake import MAGIC, TLS_MAGIC
from tfdist._src.cluster.net import tls as tls_module
from tfdist._src.cluster.net.tls import Tls
from tfdist._src.options import Options
from tfdist.errors import TlsError


def refusal(**fields):
    with pytest.raises(TlsError) as raised:
        Tls.load(Options(**fields))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_certificates_are_loaded_from_the_options():
    loaded = Tls.load(Options(**files()))
    assert loaded.subject == "commonName=worker"
    assert "2120" in loaded.expires
    assert Tls.load(Options()) is None


@pytest.mark.parametrize("field", ["tls_certificate", "tls_key", "tls_ca"])
def test_all_three_files_are_required(field):
    variable = f"TFDIST_{field.upper()}"
    with pytest.raises(ValueError, match=f"Received: no {variable}. Set all three, or none"):
        Options(**{**files(), field: ""})
    with pytest.raises(ValueError, match="TLS needs TFDIST_TLS_CERTIFICATE, TFDIST_TLS_KEY, TFDI"):
        Options.from_environment({variable: "there.pem"})


@pytest.mark.parametrize("field", ["tls_certificate", "tls_key", "tls_ca"])
def test_an_invalid_file(field, tmp_path):
    variable = f"TFDIST_{field.upper()}"
    gone = tmp_path / "gone.pem"
    said = refusal(**{**files(), field: str(gone)})
    assert said.startswith(f"{variable}: {gone} cannot be read (No such file or directory)")
    for content in (b"", b"words\n", b"\xff\x00", (FOLDER / "make.sh").read_bytes()):
        gone.write_bytes(content)
        said = refusal(**{**files(), field: str(gone)})
        assert said.startswith(f"{variable}: {gone} contains no ")
    assert refusal(**{**files(), field: str(tmp_path)}).startswith(f"{variable}: {tmp_path} cannot")


def test_an_unusable_key():
    assert "does not match the certificate in" in refusal(**files(key="stranger"))
    assert "without a passphrase" in refusal(**files(key="locked"))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (files("expired"), "(certificate has expired)"),
        (files(ca="other_ca"), "(unable to get local issuer certificate)"),
    ],
)
def test_an_untrusted_certificate(given, reason):
    said = refusal(**given)
    assert said.startswith("TFDIST_TLS_CERTIFICATE: other workers would not trust ")
    assert reason in said


@pytest.mark.parametrize("size", [2, 3])
def test_a_session_exchanges_over_tls(sessions, in_parallel, until, size):
    group = sessions(size, secret="s", **files())
    payloads = [bytes([rank]) * 3_000_000 for rank in range(size)]
    for _ in range(3):
        got = in_parallel(lambda s: s.exchange("much", payloads[s.rank]), group)
        assert got == [payloads] * size
    group[0].notify("key", "text")
    assert [n.text for n in group[1].wait_notified("key", 1)] == ["text"]
    left = []
    group[0].on_peer_left(left.append)
    group[1].close()
    until(lambda: left)
    assert "has left the job" in left[0]


def test_both_ways_at_once(sessions, in_parallel):
    """Notices and results at the same time, with several sending threads."""
    one, two = sessions(2, **files())
    stop = threading.Event()

    def notices():
        while not stop.is_set():
            one.notify("n", "x" * 30_000)
            time.sleep(0.002)  # there is no flow control for notices

    thread = threading.Thread(target=notices)
    thread.start()
    payload = bytes(200_000)
    try:
        for number in range(30):
            results = in_parallel(lambda s: s.exchange(f"{number}", payload), [one, two])  # noqa: B023
            assert results[0][1] == payload
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("with_tls", [0, 1])
def test_a_worker_without_tls_is_refused(addresses, attempt, with_tls):
    cluster = addresses(2)
    given = [files() if rank == with_tls else {} for rank in (0, 1)]
    coordinator = attempt(cluster, 0, **given[0])
    error = attempt(cluster, 1, **given[1]).failed()
    assert isinstance(error, TlsError)
    assert f"worker 0 ({cluster[0]})" in str(error) and f"worker 1 ({cluster[1]})" in str(error)
    uses = "it uses TLS, but this worker does not" if with_tls == 0 else "it does not use TLS, but"
    assert uses in str(error)
    assert "on all workers, or on none" in str(error)
    for one in (coordinator, attempt(cluster, 1, **given[0])):
        one.met()
    (line,) = [line for line in coordinator.lines if "dropped" in line]
    assert line.startswith("dropped a connection from 127.0.0.1:")
    assert "on all workers, or on none" in line


@pytest.mark.parametrize(
    ("rank", "dialed", "listened"),
    [
        (0, "its certificate is not trusted here", "does not accept this worker's certificate"),
        (1, "its certificate is not trusted here", "does not accept this worker's certificate"),
    ],
)
def test_certificates_of_another_authority_are_refused(addresses, attempt, rank, dialed, listened):
    cluster = addresses(2)
    strange = files("stranger", "other_ca")
    given = [strange if r == rank else files() for r in (0, 1)]
    coordinator = attempt(cluster, 0, **given[0])
    error = attempt(cluster, 1, **given[1]).failed()
    assert isinstance(error, TlsError)
    assert f"no TLS with worker 0 ({cluster[0]}): {dialed} (" in str(error)
    for one in (coordinator, attempt(cluster, 1, **given[0])):
        one.met()
    assert any(listened in line for line in coordinator.lines), coordinator.lines


@pytest.mark.parametrize("rank", some([0, 1], always=[1]))
def test_an_expired_certificate(addresses, attempt, monkeypatch, rank):
    """It was valid when its worker started, by that worker's clock."""

    def trusted(server, client, options):
        pem = Path(options.tls_certificate).read_text()
        return "", "", ssl.PEM_cert_to_DER_cert(pem)

    monkeypatch.setattr(tls_module, "_check_trusted", trusted)
    cluster = addresses(2)
    # Nobody joins a rank 0 that nobody trusts.
    given = files() if rank else files("expired") | {"start_timeout": 10.0}
    coordinator = attempt(cluster, 0, **given)
    error = attempt(cluster, 1, **files("expired" if rank else "worker")).failed()
    assert isinstance(error, TlsError)
    assert f"worker 0 ({cluster[0]})" in str(error)
    assert "certificate has expired" in str(error) or "certificate expired" in str(error)
    if rank:
        attempt(cluster, 1, **files()).met()
        coordinator.met()
    else:
        coordinator.failed()
    assert any("expired" in line for line in coordinator.lines), coordinator.lines


def test_slow_strangers_do_not_delay_the_job(addresses, attempt, monkeypatch, dial):
    monkeypatch.setattr("tfdist._src.cluster.rendezvous.acceptor.ACCEPT_SECONDS", FAR)
    cluster = addresses(2)
    coordinator = attempt(cluster, 0, secret="s", **files())
    strangers = [dial(cluster[0]) for _ in range(4)]
    _, _, half, garbage = strangers
    strangers[1].sendall(TLS_MAGIC)
    half.sendall(TLS_MAGIC + b"\x16\x03\x01\x02\x00\x01\x00")
    garbage.sendall(TLS_MAGIC + b"GET / HTTP/1.1\r\n\r\n")
    attempt(cluster, 1, secret="s", **files()).met()
    coordinator.met()
    for one in strangers:
        one.close()


def test_nothing_is_sent_in_the_clear(addresses, attempt, dial):
    """Records the traffic between rank 1 and rank 0."""
    recorded = {}
    for given in ({}, files()):
        chief, worker, between = addresses(3)
        words = recorded[bool(given)] = bytearray()
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(between.rpartition(":")[2])))
            listener.listen()
            passing = threading.Thread(
                target=relay, args=(listener, chief, words, dial), daemon=True
            )
            passing.start()
            coordinator = attempt([chief, worker], 0, secret="s", **given)
            # Their clusters differ, which rank 0 reports: that, too, is a conversation.
            error = attempt([between, worker], 1, secret="s", **given).failed()
            assert "different clusters" in str(error)
            coordinator.failed()
            passing.join()
    for word in (b"hello", b"fingerprint", b"cluster", b"proof", b"challenge", b"kind"):
        assert word in recorded[False]
        assert word not in recorded[True]
    assert recorded[False].startswith(MAGIC)
    assert recorded[True].startswith(TLS_MAGIC)
    assert len(recorded[True]) > 1000


def relay(listener, chief, words, dial):
    # Rank 0 may not listen yet when rank 1 already speaks.
    with listener.accept()[0] as near, dial(chief) as far:
        while True:
            for sock in select.select([near, far], [], [])[0]:
                try:
                    data = sock.recv(65536)
                    words += data
                    (far if sock is near else near).sendall(data)
                except ConnectionError:  # closed before all of what was sent was read
                    return
                if not data:
                    return


@pytest.mark.parametrize("hosts", some(["aa", "ab", "aab"], always=["aab"]))
def test_a_mesh_connects_over_tls_and_leaves_nothing(run, hosts):
    """The sockets end up in the clear, with nothing left in their buffers."""
    size = len(hosts)
    body = f"""
    before = descriptors()
    mesh = connect_mesh(range({size}))
    check(mesh, list(range({size})), {[0 if h == "a" else 1 for h in hosts]})
    mesh.close()
    report(same=nothing_left(before), lines=lines)
    """
    for found in run(size, body, hosts, TFDIST_SECRET="s", **variables()):
        assert found == {"same": True, "lines": []}


def test_a_mesh_with_one_that_lost_its_files(run, tmp_path):
    """They are read again for each mesh; all ranks raise the same error."""
    body = """
    import dataclasses
    if rank == 1:
        options = dataclasses.replace(options, tls_ca="/gone.pem")
    try:
        connect_mesh([0, 1], options=options)
    except Exception as error:
        report(error=f"{type(error).__name__}: {error}")
    """
    found = run(2, body, "ab", **variables())
    assert found[0] == found[1]
    assert found[0]["error"].startswith("TlsError: TFDIST_TLS_CA: /gone.pem cannot be read (No su")


def test_a_killed_rank_is_noticed_at_once(job):
    body = """
    lost = threading.Event()
    session.on_peer_lost(lambda message: (tell("lost", message), lost.set()))
    lost.wait()
    """
    ranks = job(3, body, TFDIST_SECRET="s", **variables())
    ranks[1].kill()
    for rank in (0, 2):
        assert "worker 1" in ranks[rank].until("lost")


def test_the_variables_are_read(tmp_path):
    given = Options.from_environment(variables())
    assert given == Options(**files())
    assert given.tls and not Options().tls
