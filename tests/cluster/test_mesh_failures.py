"""A failure to connect a group is reported on all ranks, leaks nothing, and is recoverable."""

import pytest

from tests.harness.deadlines import FAR
from tests.harness.tiers import exhaustive

ATTEMPT = """
from tfdist._src.cluster.mesh import full_mesh, shared_memory
from tfdist._src.cluster.rendezvous import connector
from tfdist.errors import ClusterError, PeerLostError

def attempt(*args, **kwargs):
    '''The error, and whether anything leaked.'''
    before = descriptors()
    error = failure(*args, **kwargs)
    return {"error": error, "same": nothing_left(before)}

def failure(*args, **kwargs):
    try:
        connect_mesh(*args, **kwargs)
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""

def again():
    '''The session still works: the group can be connected now.'''
    mesh = connect_mesh([0, 1, 2])
    check(mesh, [0, 1, 2], [sorted(set(HOSTS)).index(host) for host in HOSTS])
    mesh.close()
    return True

def fail(*args, **kwargs):
    raise OSError(110, "Connection timed out")
"""


@pytest.fixture
def attempts(run):
    """Runs a body on three ranks, two of them colocated; returns their common error."""

    def start(body, hosts="aab", **environment):
        found = run(3, f"HOSTS = {hosts!r}\n{ATTEMPT}\n{body}", hosts=hosts, **environment)
        for one in found:
            assert one["same"] and one.get("again", True), found
        (error,) = {one["error"] for one in found}
        return error

    return start


def test_a_member_that_does_not_join(run):
    body = f"""{ATTEMPT}
if rank == 2:
    over = threading.Event()
    session.on_peer_left(lambda message: over.set())
    over.wait()
    report()
else:
    found = attempt([0, 1, 2], options=Options(start_timeout=1.0))
    report(**found, address=str(session.topology.workers[2]))
"""
    found = run(3, body)[:2]
    for one in found:
        assert one["error"].startswith(
            "RendezvousError: exchange \"mesh 'test': members\" timed out after 1"
        )
        assert f"1 of 3 workers: {one['address']}." in one["error"]
        assert "TFDIST_START_TIMEOUT" in one["error"]
        assert one["same"]


@exhaustive
@pytest.mark.parametrize("who", [1, 2])
def test_a_member_that_cannot_be_reached(attempts, who):
    body = f"""
options = Options(start_timeout=3.0, host=options.host)
real = connector.dial_endpoints
if rank == {who}:
    connector.dial_endpoints = fail
found = attempt([0, 1, 2], options=options)
connector.dial_endpoints = real
report(**found, again=again())
"""
    error = attempts(body)
    assert error.startswith("RendezvousError: mesh 'test' is incomplete after 3 s: worker")
    assert f"worker {who} (127.0.0.1:" in error
    assert ") cannot reach worker 0 (127.0.0.1:" in error
    assert "(Connection timed out)" in error
    assert ("cannot reach worker 1" in error) == (who == 2)
    assert "TFDIST_START_TIMEOUT" in error and "firewalls" in error


@exhaustive
def test_a_member_that_rejects_everyone(attempts):
    """The error names it."""
    body = """
real = full_mesh.FullMeshConnector._screen
def reject(self, hello):
    raise full_mesh.WireError("no")
if rank == 1:
    full_mesh.FullMeshConnector._screen = reject
found = attempt([0, 1, 2], options=Options(start_timeout=3.0, host=options.host))
full_mesh.FullMeshConnector._screen = real
report(**found, again=again())
"""
    error = attempts(body)
    assert "worker 2 (127.0.0.1:" in error
    assert ") cannot reach worker 1 (127.0.0.1:" in error
    assert "(connection closed)" in error or "(Connection reset by peer)" in error
    assert "reach worker 0" not in error


def test_a_member_that_cannot_listen(attempts):
    body = """
real = mesh_module.listen_near
def fail_to_listen(address, name):
    raise ClusterError(f"{name}: no port is left. Fix it.")
if rank == 2:
    mesh_module.listen_near = fail_to_listen
found = attempt([0, 1, 2])
mesh_module.listen_near = real
report(**found, again=again())
"""
    error = attempts(body)
    assert error.startswith("ClusterError: worker 2 (127.0.0.1:")
    assert error.endswith("no port is left. Fix it.")


@exhaustive
@pytest.mark.parametrize(
    ("failure", "kind", "parts"),
    [
        (
            "raise FileNotFoundError(2, 'No such file or directory')",
            "ClusterError",
            ["worker 1 (", "memory of worker 0 (", "No such file or directory", "TFDIST_HOST"],
        ),
        ("raise RuntimeError('on fire')", "RendezvousError", ["worker 1 (", "on fire"]),
        ("raise MemoryError()", "RendezvousError", ["worker 1 (", "MemoryError"]),
    ],
)
def test_a_member_that_cannot_open_the_memory(attempts, failure, kind, parts):
    body = f"""
real = shared_memory.open_segment
def fail_to_open(name, size):
    {failure}
if rank == 1:
    shared_memory.open_segment = fail_to_open
found = attempt([0, 1, 2])
assert not files()
shared_memory.open_segment = real
report(**found, again=again())
"""
    error = attempts(body)
    assert error.startswith(f"{kind}: ")
    for part in parts:
        assert part in error


@exhaustive
@pytest.mark.parametrize(
    ("size", "parts"),
    [
        ("lambda ranks: 4096 + rank", ["worker 1 (", "4096 bytes here instead of 4097"]),
        ("lambda ranks: 0", ["worker 0 (", "segment_bytes must return a size >= 1"]),
        ("lambda ranks: 1 // rank", ["worker 0 (", "ZeroDivisionError"]),
    ],
)
def test_invalid_segment_sizes(attempts, size, parts):
    error = attempts(f"report(**attempt([0, 1, 2], size={size}), again=again())")
    for part in parts:
        assert part in error


@pytest.mark.parametrize(
    ("members", "kind", "parts"),
    [
        ("[0, 1, 2] if rank else [0, 1]", "ProgramMismatch", ["passed the members [0, 1]", "same"]),
        ("[0, 1, 2] if rank else [2, 1, 0]", "ProgramMismatch", ["[2, 1, 0]", "[0, 1, 2]"]),
        ("[0, 1, 2] if rank else []", "ProgramMismatch", ["worker 1 (", "worker 0 (", "[]"]),
        ("[0, 1]", "ClusterError", ["worker 2 (", "process's rank 2", "[0, 1]"]),
        ("[0, 1, 2, 3]", "ClusterError", ["worker 0 (", "from 0 to 2", "[0, 1, 2, 3]"]),
        ("[0, 1, 2, 2]", "ClusterError", ["worker 0 (", "distinct ranks"]),
    ],
)
def test_invalid_members_are_refused(attempts, members, kind, parts):
    error = attempts(f"report(**attempt({members}), again=again())")
    assert error.startswith(kind)
    for part in ["mesh 'test'", *parts]:
        assert part in error


def test_a_process_in_no_group_raises_the_same_error(attempts):
    body = """
if rank == 1:
    mesh_module.subgroups.host_key = fail
report(**attempt([0, 1] if rank < 2 else []))
"""
    error = attempts(body)
    assert "worker 1 (" in error and "Connection timed out" in error


def test_a_rank_with_another_secret_is_named(attempts):
    """The options of one rank have changed since it joined."""
    body = """
other = Options(secret="other", host=options.host)
found = attempt([0, 1, 2], options=other if rank == 1 else options)
report(**found, again=again())
"""
    error = attempts(body, TFDIST_SECRET="one")
    assert error.startswith("ClusterError: worker ")
    assert "worker 1 (" in error and "Set the same TFDIST_SECRET" in error


def test_different_names_are_a_program_mismatch(run):
    body = f"{ATTEMPT}\nreport(**attempt([0, 1], name='ab'[rank]))"
    for one in run(2, body):
        assert one["error"].startswith("ProgramMismatchError") and one["same"]


@pytest.mark.parametrize(
    "where", ["full_mesh.FullMeshConnector.start", "shared_memory.open_segment"]
)
def test_a_member_that_dies(run, where):
    body = f"""{ATTEMPT}
def die(*args):
    os.kill(os.getpid(), 9)
if rank == 1:
    {where} = die
error = failure([0, 1, 2])
report(error=error, worker=str(session.topology.workers[1]), left=files())
"""
    found = run(3, body)
    for one in (found[0], found[2]):
        assert one["error"].startswith(f"PeerLostError: rank 1, {one['worker']} is lost")
        assert not one["left"]


@exhaustive
def test_too_few_descriptors(attempts):
    body = """
import resource
mesh_module.allow_descriptors = lambda count: None
before = resource.getrlimit(resource.RLIMIT_NOFILE)
if rank == 2:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(descriptors()) + 4, before[1]))
found = attempt([0, 1, 2], options=Options(start_timeout=3.0, host=options.host))
resource.setrlimit(resource.RLIMIT_NOFILE, before)
report(**found, again=again())
"""
    error = attempts(body)
    assert "worker 2 (" in error and "Too many open files" in error


def test_the_other_rank_hears_of_an_interrupt_at_once(run):
    """The other rank learns of it although it would wait for its connections for longer."""
    body = f"""{ATTEMPT}
import signal
wait = full_mesh.FullMeshConnector.wait
def for_long(self, seconds, check):
    self._deadline = time.monotonic() + {FAR}
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    wait(self, {FAR}, check)
full_mesh.FullMeshConnector.wait = for_long
if rank == 1:
    def interrupt(*args):
        raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    connector.dial_endpoints = fail
before = descriptors()
try:
    connect_mesh([0, 1])
except KeyboardInterrupt:
    tell("REPORT", json.dumps(dict(interrupted=True, same=nothing_left(before))))
    os._exit(0)
except PeerLostError as error:
    report(lost=str(error))
"""
    found = run(2, body, hosts="aa")
    assert found[1] == {"interrupted": True, "same": True}
    assert "rank 1, worker 1 (" in found[0]["lost"]
