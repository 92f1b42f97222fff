"""Groups of real processes connect: every descriptor leads to the right rank, and none leaks."""

import pytest

from tests.harness.tiers import some


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_members_on_one_host_connect_and_leave_nothing(run, count):
    body = f"""
    members = list(range({count}))
    before = descriptors()
    mesh = connect_mesh(members)
    check(mesh, members, [0] * {count}) if {count} > 1 else None
    held = len(descriptors()) - len(before)
    mesh.close()
    mesh.close()
    report(held=held, same=nothing_left(before), lines=lines, segment=mesh.segment, files=files())
    """
    for found in run(count, body):
        # For each other rank a control connection, and the memory.
        assert found["held"] == (count if count > 1 else 0)
        assert found["same"] and not found["lines"] and not found["files"]
        assert (found["segment"] == -1) == (count == 1)


@pytest.mark.parametrize(
    "hosts", some(["ab", "aabb", "abab", "abca", "abcd"], always=["ab", "abca"])
)
def test_members_on_several_hosts_connect_and_leave_nothing(run, hosts):
    numbers = [sorted(set(hosts)).index(host) for host in hosts]
    body = f"""
    members = list(range({len(hosts)}))
    before = descriptors()
    mesh = connect_mesh(members)
    check(mesh, members, {numbers})
    mesh.close()
    report(same=nothing_left(before), lines=lines)
    """
    for found in run(len(hosts), body, hosts=hosts):
        assert found == {"same": True, "lines": []}


def test_splits_in_any_order_and_again(run):
    body = """
    hosts = ["a", "a", "b", "b"]
    before = descriptors()
    for groups in ([[0, 1], [2, 3]], [[2, 0], [3, 1]], [[3, 2, 0], [1]], [[1, 0], []], [[]]):
        members = next((group for group in groups if rank in group), [])
        mesh = connect_mesh(members, name=str(groups))
        if members and len(members) > 1:
            keys = [hosts[member] for member in members]
            check(mesh, members, [list(dict.fromkeys(keys)).index(key) for key in keys])
        else:
            assert (mesh is None) == (not members)
            session.exchange("written", b""), session.exchange("read", b"")
        if mesh is not None:
            if len(members) == 1:
                assert (mesh.control, mesh.data, mesh.segment) == ((-1,), (-1,), -1)
            mesh.close()
    report(same=nothing_left(before), lines=lines)
    """
    for found in run(4, body, hosts="aabb"):
        assert found == {"same": True, "lines": []}


def test_several_meshes_while_the_port_is_taken(run):
    body = """
    meshes = [connect_mesh([0, 1])]
    port = int(session.topology.me.address.rpartition(":")[2])
    with socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True):
        meshes.append(connect_mesh([0, 1]))
        for mesh in meshes:
            check(mesh, [0, 1], [0, 1])
    meshes.append(connect_mesh([0, 1]))
    meshes[0].close()
    for mesh in meshes[1:]:
        check(mesh, [0, 1], [0, 1])
    with socket.socket(fileno=os.dup(meshes[2].control[1 - rank])) as sock:
        ports = [sock.getsockname()[1], sock.getpeername()[1]]
    own = [int(worker.address.rpartition(":")[2]) for worker in session.topology.workers]
    # Rank 1 dials rank 0 at the port of TF_CONFIG, which firewalls let through.
    report(own=ports[rank] == own[0])
    """
    assert run(2, body, hosts="ab") == [{"own": True}] * 2


def test_descriptors_that_were_handed_over_stay_open(run):
    body = """
    mesh = connect_mesh([0, 1])
    mesh.hand_over()
    mesh.close()
    check(mesh, [0, 1], [0, 1])
    child = os.fork()
    if child == 0:
        os.fstat(mesh.control[1 - rank])
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    report(ok=True)
    """
    assert run(2, body, hosts="ab") == [{"ok": True}] * 2


def test_a_forked_child_inherits_nothing(run):
    body = """
    mesh = connect_mesh([0, 1])
    if rank == 1:
        child = os.fork()
        if child == 0:
            numbers = [*mesh.control, *mesh.data, mesh.segment]
            open_ones = [n for n in numbers if n >= 0 and n in descriptors()]
            os._exit(len(open_ones))
        report(left=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        report(left=0)
    """
    assert run(2, body) == [{"left": 0}] * 2


def test_full_memory_is_reported_once_and_replaced_by_tcp(run):
    body = """
    size = (lambda ranks: 1 << 50) if options.host == "a" else (lambda ranks: 4096 * ranks)
    before = descriptors()
    mesh = connect_mesh([0, 1, 2, 3], size=size)
    hosts = [0, 1, 2, 2]
    check(mesh, [0, 1, 2, 3], hosts)
    mesh.close()
    report(same=nothing_left(before), lines=lines)
    """
    found = run(4, body, hosts="aabb")
    assert [one["same"] for one in found] == [True] * 4
    assert [len(one["lines"]) for one in found] == [1, 0, 0, 0]
    (line,) = found[0]["lines"]
    for part in ("2 workers on this host", "/dev/shm", "slower TCP", "--shm-size"):
        assert part in line


def test_no_memory_at_all(run):
    body = """
    from tfdist._src.cluster.mesh import shared_memory
    shared_memory.MEMORY = "/nowhere"
    mesh = connect_mesh([0, 1])
    check(mesh, [0, 1], [0, 1])
    report(lines=lines)
    """
    found = run(2, body)
    assert "writable tmpfs" in found[0]["lines"][0] and not found[1]["lines"]
