"""The prelude of the ranks in mesh tests: functions to check a mesh and to report."""

MESH = r"""
import contextlib, json, mmap, socket, struct
from pathlib import Path
from tfdist._src.cluster import connect
from tfdist._src.cluster.mesh import mesh as mesh_module
options = Options.from_environment()
lines = []
wait_messages.FIRST_SECONDS = options.start_timeout  # or a slow machine adds lines
session.exchange("begun", b"")  # now each thread of the session has its descriptors

def connect_mesh(members, name="test", options=options, size=lambda ranks: 4096 * ranks):
    return connect(session, name, members, options, size, announce=lines.append)

def descriptors():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the one that lists
            pass
    return found

def wait_for(condition):
    '''Whether it becomes true; some threads end a little later.'''
    end = time.monotonic() + 60
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return true

def nothing_left(before):
    '''Whether no new descriptors are open; a session may have ended since.'''
    return wait_for(lambda: descriptors().items() <= before.items())

def names():
    return {path for path in os.listdir("/dev/shm") if path.startswith("tfdist-")}

others = names()

def files():
    '''What this test has left in /dev/shm, which other jobs also use.'''
    wait_for(lambda: not names() - others)
    return sorted(names() - others)

def report(**words):
    tell("REPORT", json.dumps(words))
    with contextlib.suppress(Exception):  # in tests where the session has ended
        session.exchange("reported", b"")  # the first rank to exit ends all sessions

def talk(number, mine, theirs):
    '''Exchanges a word with the peer.'''
    with socket.socket(fileno=os.dup(number)) as sock:
        assert not os.get_blocking(number) and not os.get_inheritable(number)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        sock.settimeout(options.start_timeout)
        sock.sendall(mine.encode().ljust(64))
        assert sock.recv(64, socket.MSG_WAITALL).decode().strip() == theirs, theirs

def check(mesh, members, hosts):
    '''Checks that every descriptor leads to the right rank.'''
    me = members.index(rank)
    assert (mesh.rank, mesh.size, mesh.hosts) == (me, len(members), tuple(hosts)), mesh
    assert mesh.ranks == tuple(str(session.topology.workers[m]) for m in members)
    for other in range(mesh.size):
        assert (mesh.control[other] == -1) == (other == me), mesh
        assert (mesh.data[other] == -1) == (hosts[other] == hosts[me]), mesh
        for kind, number in (("control", mesh.control[other]), ("data", mesh.data[other])):
            if number >= 0:
                talk(number, f"{kind} {me} to {other}", f"{kind} {other} to {me}")
    local = [other for other in range(mesh.size) if hosts[other] == hosts[me]]
    assert (mesh.segment == -1) == (len(local) == 1), mesh
    if mesh.segment == -1:
        assert mesh.segment_bytes == 0
    else:
        assert mesh.segment_bytes == 4096 * len(local)
        status = os.fstat(mesh.segment)
        assert (status.st_size, status.st_nlink) == (mesh.segment_bytes, 0)
        assert status.st_mode & 0o777 == 0o600 and not os.get_inheritable(mesh.segment)
        assert status.st_blocks * 512 >= mesh.segment_bytes
        with mmap.mmap(mesh.segment, mesh.segment_bytes) as memory:
            assert memory[me] == 0
            memory[me] = 100 + me
            session.exchange("written", b"")
            assert [memory[other] for other in local] == [100 + other for other in local]
            session.exchange("read", b"")
            return
    session.exchange("written", b"")
    session.exchange("read", b"")
"""
