"""Which workers count as colocated, and the memory that they share."""

import os
import socket

import pytest

from tfdist._src.cluster.mesh import shared_memory, subgroups
from tfdist._src.cluster.mesh.shared_memory import Segment, open_segment
from tfdist._src.cluster.mesh.subgroups import host_key, numbered
from tfdist._src.options import Options


def files():
    return os.listdir(shared_memory.MEMORY)


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A folder instead of /dev/shm, which other jobs also use."""
    monkeypatch.setattr(shared_memory, "MEMORY", str(tmp_path))


def test_workers_with_one_kernel_network_and_memory_are_colocated():
    key = host_key(Options())
    assert key == host_key(Options())
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert file.read().strip() in key
    assert str(os.stat("/proc/self/ns/net").st_ino) in key
    assert str(os.stat("/dev/shm").st_dev) in key


@pytest.mark.parametrize("name", ["_BOOT", "_NETWORK", "MEMORY"])
def test_each_part_matters_and_may_be_unknown(monkeypatch, name, tmp_path):
    known = host_key(Options())
    monkeypatch.setattr(subgroups, name, str(tmp_path / "none"))
    unknown = host_key(Options())
    assert unknown != known
    assert unknown == host_key(Options())
    if name != "MEMORY":
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        assert host_key(Options()) != unknown


def test_tfdist_host_overrides_detection(monkeypatch):
    assert host_key(Options(host="a")) != host_key(Options(host="b"))
    assert host_key(Options(host="a")) != host_key(Options())
    before = host_key(Options(host="a"))
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    monkeypatch.setattr(subgroups, "_BOOT", "/none")
    assert host_key(Options(host="a")) == before


def test_hosts_are_numbered_in_order_of_appearance():
    assert numbered([]) == ()
    assert numbered(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)


def test_a_segment_is_shared_by_name_until_it_is_unlinked(memory):
    made = Segment(10_000)
    (name,) = files()
    path = os.path.join(shared_memory.MEMORY, name)
    assert made.name == name
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path).st_blocks * 512 >= 10_000
    opened = open_segment(name, 10_000)
    assert not os.get_inheritable(opened.fileno())
    made.unlink()
    made.unlink()
    assert files() == []
    os.pwrite(made.descriptor.fileno(), b"word", 9_996)
    assert os.pread(opened.fileno(), 10, 9_996) == b"word"
    opened.close()
    opened.close()
    made.descriptor.close()
    another = Segment(1)
    assert another.name != name
    another.unlink()
    another.descriptor.close()


def test_names_are_exclusive(memory, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    made = Segment(1)
    with pytest.raises(FileExistsError):
        Segment(1)
    made.unlink()
    made.descriptor.close()


def test_segment_too_large(monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda count: "f" * 2 * count)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught:
        Segment(1 << 50)
    assert "--shm-size" in shared_memory.remedy(caught.value)
    assert f"tfdist-{'f' * 32}" not in files()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["tfdist-", "tfdist-" + "g" * 32, "../etc/passwd", ""])
def test_segments_with_invalid_names_are_refused(name):
    with pytest.raises(ValueError, match="does not have the name"):
        open_segment(name, 1)


def test_symbolic_link_and_wrong_size(memory):
    before = len(os.listdir("/proc/self/fd"))
    made = Segment(100)
    name = f"tfdist-{'0' * 32}"
    link = os.path.join(shared_memory.MEMORY, name)
    os.symlink(os.path.join(shared_memory.MEMORY, made.name), link)
    try:
        with pytest.raises(OSError):
            open_segment(name, 100)
        with pytest.raises(ValueError, match="100 bytes here instead of 101"):
            open_segment(made.name, 101)
    finally:
        os.unlink(link)
        made.unlink()
        made.descriptor.close()
    assert len(os.listdir("/proc/self/fd")) == before
