"""The agent: the program that `tfdist run --hosts` starts by ssh on each host.

The agent reads orders from its standard input. Each order is a line of JSON. The first order
contains environment variables, the second one the arguments of the host's launcher. They are not on
the agent's command line, so that a list of processes does not show the secret. After the second
order, the agent runs the launcher in its own process. Each later order contains a signal that
`tfdist run --hosts` has received and that the launcher should receive, too.

The launcher also receives SIGTERM if the connection ends, or if no order or sign of life arrives
for `TFDIST_HEARTBEAT_TIMEOUT` seconds. The time limit is necessary because a machine that loses
power does not close its connections.
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
    """Runs the agent, which becomes the launcher of its host.

    The agent writes its report, a description of this host, to the file descriptor that is its
    command-line argument; to stdout if there is no argument.

    Returns:
        The exit code of the launcher, except that 255 becomes 1, because ssh itself exits with 255
        if it fails. 1 if the connection has ended before the launcher was started.
    """
    report = int(sys.argv[1]) if len(sys.argv) > 1 else sys.stdout.fileno()
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)  # The workers inherit descriptor 0, and must not read the orders.
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
    """Reads the next order; returns None if `orders` ends or is silent for `silence` seconds."""
    line = b""
    while not line.strip() or not line.endswith(b"\n"):  # An empty line is only a sign of life.
        # Read only one byte at a time: the lines after this order are for the process that forwards
        # signals.
        if not select.select([orders], [], [], silence)[0] or not (byte := orders.read(1)):
            return None
        line += byte
    order: dict[str, Any] = json.loads(line)
    return order


def _description() -> dict[str, Any]:
    """Returns the agent's report: its version, the addresses of the ssh connection, a free port."""
    client, _, server, _ = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {"version": __version__, "client": client, "server": server, "port": port}


def _forward_signals(orders: IO[bytes], silence: float) -> None:
    """Forks a process that sends the signals in `orders` to this process, the launcher.

    Because of the fork, this process must have only one thread.
    """
    launcher = os.getpid()
    if os.fork():
        return
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            # ssh ends only when every process has closed these streams.
            os.dup2(nowhere, stream)
        while (order := _next(orders, silence)) is not None and os.getppid() == launcher:
            os.kill(launcher, int(order["signal"]))
        if os.getppid() == launcher:
            # Not SIGHUP, because a launcher that was started with nohup ignores SIGHUP.
            os.kill(launcher, signal.SIGTERM)
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
