"""Lists of hosts, as users of mpirun and horovodrun write them."""

from __future__ import annotations

import re

import pytest

from tfdist._src.launch.job.run_options import ListedHost, parse, parse_hosts, read_hostfile


def test_lists_of_hosts_are_parsed():
    for text, hosts in {
        "a": [("a", None)],
        "a:2,b:3": [("a", 2), ("b", 3)],
        " a:2 , ann@b.example.org ,": [("a", 2), ("ann@b.example.org", None)],
        "10.0.0.1:2,fd00::2,[fd00::3]:4,[fd00::4]": [
            ("10.0.0.1", 2), ("fd00::2", None), ("fd00::3", 4), ("fd00::4", None)
        ],
    }.items():  # fmt: skip
        assert parse_hosts(text) == tuple(ListedHost(*host) for host in hosts)
    assert ListedHost("ann@b").address == "b"


def test_wrong_lists_are_refused():
    for text, message in {
        "": "must name at least one host",
        "a:0": "must be an integer >= 1. Received: 'a:0'",
        "a:x": "must be an integer >= 1. Received: 'a:x'",
        "a:2,a:3": "names a twice",
        "-oProxyCommand=x": "must name a host. Received: '-oProxyCommand=x'",
        ":2": "must name a host. Received: ''",
        "[a]2": "must be HOST or HOST:N",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            parse_hosts(text)


def test_hostfiles_are_parsed_and_mistakes_named(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# all\n\na\nb max_slots=4 slots=2\nc:3 # new\nd  Slots = 4\n[::1] slots=5")
    assert [(host.name, host.workers) for host in read_hostfile(str(path))] == [
        ("a", None), ("b", 2), ("c", 3), ("d", 4), ("::1", 5)
    ]  # fmt: skip
    for text, message in {
        "a 2": "HOST slots=N. Received: 'a 2'",
        "a:4 slots=2": "HOST slots=N. Received: 'a:4 slots=2'",
        "#": "at least one",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
            read_hostfile(str(path))
    with pytest.raises(ValueError, match="No such file"):
        read_hostfile(str(tmp_path / "none"))


def test_what_the_launchers_of_the_hosts_are_passed():
    line = "--hosts a:2,b -x A --output all --ssh=ssh_2 -xB=1 --elastic --dry-run x.py -x C"
    options = parse(line.split())
    assert options.launcher_arguments == ("--output", "all", "--elastic", "x.py", "-x", "C")
    assert options.forward == ("A", "B=1")
    assert options.ssh == "ssh_2"


def test_what_excludes_each_other(capsys):
    for line, message in {
        "--hosts a -n 2 x.py": "-n is for one host and cannot be combined with --hosts",
        "--hosts a --node-rank 1 --nnodes 2 --rendezvous a:1 x.py": "--nnodes is for one host",
        "--hosts a --host b x.py": "--host is for one host",
        "-x A x.py": "-x requires --hosts or --hostfile",
        "--hosts a:x x.py": "must be an integer >= 1. Received: 'a:x'",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            parse(line.split())
        assert message in capsys.readouterr().err
