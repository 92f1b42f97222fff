"""The program that `tfdist run --hosts` starts by ssh on each host, to become the host's launcher.

It reads the environment and the launcher's arguments from standard input, as lines of JSON, so that
no list of processes shows the secret or the variables. Later lines contain the signals that
`tfdist run --hosts` has received. The launcher receives SIGTERM when the connection ends, or after
`TFDIST_HEARTBEAT_TIMEOUT` seconds of silence, because a machine that loses power does not close its
connections.
"""

import json
import os
import select
import signal
import socket
import sys
from typing import IO, Any

from tfdist._src.launch.cli import main as run_command
from tfdist._src.launch.ssh import MARK, SSH_FAILED
from tfdist._version import __version__


def main() -> int:
    """Runs the agent. The command-line argument is the descriptor to which it writes its report."""
    report = int(sys.argv[1]) if len(sys.argv) > 1 else sys.stdout.fileno()
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)  # The workers must not read this process's input.
    os.close(nowhere)
    task = _next(orders)
    if task is None:
        return 1
    os.environ.update(task["environment"])
    silence = float(task["silence"])
    line = f"\n{MARK}{json.dumps(_description())}\n"
    os.write(report, line.encode())
    if report > 2:
        os.close(report)
    order = _next(orders, silence)
    if order is None:
        return 1
    _forward_signals(orders, silence)
    orders.close()
    code = run_command(["run", *order["run"]])
    return code if code != SSH_FAILED else 1


def _next(orders: IO[bytes], silence: float | None = None) -> dict[str, Any] | None:
    """Reads the next order; None if the sender is gone, or silent for `silence` seconds."""
    line = b""
    while not line.strip() or not line.endswith(b"\n"):  # An empty line is a sign of life.
        # Read byte by byte, because the process that forwards signals reads the rest.
        if not select.select([orders], [], [], silence)[0] or not (byte := orders.read(1)):
            return None
        line += byte
    order: dict[str, Any] = json.loads(line)
    return order


def _description() -> dict[str, Any]:
    """Describes this host to `tfdist run --hosts`: the ssh addresses, and a free port."""
    client, _, server, _ = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {"version": __version__, "client": client, "server": server, "port": port}


def _forward_signals(orders: IO[bytes], silence: float) -> None:
    """Forks a process that forwards signals to the launcher, which must be single-threaded."""
    launcher = os.getpid()
    if os.fork():
        return
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)  # ssh waits until every process has closed them.
        while (order := _next(orders, silence)) is not None and os.getppid() == launcher:
            os.kill(launcher, int(order["signal"]))
        if os.getppid() == launcher:
            os.kill(launcher, signal.SIGTERM)  # Not SIGHUP, which nohup makes a launcher ignore.
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
