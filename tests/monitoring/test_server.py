"""Where metrics are served; why they are not, in one line."""

from __future__ import annotations

import socket
import sys
from urllib.request import urlopen

from tfdist._src.cluster import Topology, Worker
from tfdist._src.cluster.cluster_spec import port_of
from tfdist._src.monitoring import server
from tfdist._src.monitoring.training import record
from tfdist._src.options import Options


def test_workers_of_a_host_count_up_from_its_first():
    for addresses, ports in [
        ([], [9400]),
        (["a:1"], [9400]),
        (["a:1", "a:2", "a:3"], [9400, 9401, 9402]),
        (["a:1", "b:1", "a:2", "b:2"], [9400, 9400, 9401, 9401]),
        (["[fd00::1]:1", "[fd00::2]:1", "[fd00::1]:2"], [9400, 9400, 9401]),
    ]:
        assert [port_of(9400, addresses, rank) for rank in range(len(ports))] == ports


def test_a_server_or_one_line(monkeypatch, capsys):
    monkeypatch.setattr(record, "keeps_durations", False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert server.start(Options(metrics_port=port), Topology()) is None
        line = capsys.readouterr().err
        assert line.startswith(f"tfdist: no metrics are served: it cannot listen on port {port} of")
        assert "Choose another TFDIST_METRICS_PORT" in line and line.count("\n") == 1
    serving = server.start(Options(metrics_port=port), Topology())
    # Nobody else reaches it, unless that is asked for.
    assert serving.server_address[0] == "127.0.0.1"
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        assert b"\ntfdist_workers 1.0\n" in answer.read()
    serving.shutdown()
    serving.server_close()
    assert record.keeps_durations

    both = Topology((Worker("worker", 0, "a:1"), Worker("worker", 1, "a:2")), rank=1)
    assert server.start(Options(metrics_port=65535), both) is None
    line = capsys.readouterr().err
    assert line.startswith(
        "tfdist: worker 1 (a:2) serves no metrics: it cannot listen on port 65536"
    )
    assert line.count("\n") == 1
    monkeypatch.delitem(sys.modules, "tfdist._src.monitoring.collector", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert server.start(Options(metrics_port=9400), Topology()) is None
    line = capsys.readouterr().err
    assert "`pip install 'tfdist[metrics]'`" in line and line.count("\n") == 1
