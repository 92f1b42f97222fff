"""What workers print is shown on the driver of Spark, line by line."""

from __future__ import annotations

import pytest

from tests.strangers.listeners import driver_log_module, until

SECRET = "hush"


@pytest.fixture
def module():
    return driver_log_module()


def test_lines_of_several_workers(module, capsys):
    with module.DriverLog(SECRET, 2) as log:
        clients = [module.DriverLogClient(("127.0.0.1", log.port), SECRET) for _ in range(2)]
        for number in range(100):
            for rank, client in enumerate(clients):
                client.send(f"[{rank}] {number} ü\n".encode())
        clients[1].send(b"[1] without an end")
        for client in clients:
            client.close()
    printed = capsys.readouterr().out
    for rank in range(2):
        lines = [line for line in printed.splitlines() if line.startswith(f"[{rank}]")]
        assert lines[:100] == [f"[{rank}] {number} ü" for number in range(100)]
    assert "[1] without an end" in printed
    assert "no worker has connected" not in printed


def test_a_line_without_an_end_is_not_kept_for_ever(module, capsys, monkeypatch):
    monkeypatch.setattr(module, "_MAX_LINE", 1000)
    with module.DriverLog(SECRET, 1) as log:
        client = module.DriverLogClient(("127.0.0.1", log.port), SECRET)
        client.send(b"x" * 5000)
        seen = []
        until(lambda: seen.append(capsys.readouterr().out) or "xxx" in "".join(seen))
        client.close()


def test_no_worker_comes(module, capsys, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.0)
    with module.DriverLog(SECRET, 1):
        seen = []
        until(lambda: seen.append(capsys.readouterr().out) or "not started yet" in "".join(seen))
    assert "no worker has connected to the driver" in capsys.readouterr().out


def test_a_client_without_a_driver_goes_on(module, capsys):
    with module.DriverLog(SECRET, 1) as log:
        other = module.DriverLogClient(("127.0.0.1", log.port), "another")
        other.send(b"a line\n")
        assert "the driver shows no further output of this worker" in capsys.readouterr().out
        module.DriverLogClient(("127.0.0.1", log.port), SECRET).close()
    gone = module.DriverLogClient(("127.0.0.1", log.port), SECRET)
    gone.send(b"a line\n")
    assert "the driver shows no further output of this worker" in capsys.readouterr().out
    module.DriverLogClient(("", 0), SECRET).send(b"a line\n")
