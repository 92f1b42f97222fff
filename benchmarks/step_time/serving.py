"""Runs a worker in a process that `Members` has started, and reports a failure to the driver."""

from __future__ import annotations

import json
import sys
import textwrap
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.step_time.members import MAX_TEXT


def serve(work: Callable[..., None]) -> None:
    """Runs the main function of a worker until the driver closes the pipe.

    The arguments of the function are in the worker's order, the last argument on the command line.
    If the function fails, sends the reason to the driver.

    Args:
        work: the main function. It takes the pipe to the driver, and the worker's order as keyword
            arguments. It serves requests until `pipe.recv()` raises `EOFError`, because the driver
            has closed the pipe.
    """
    order = json.loads(sys.argv[1])
    pipe = Connection(order.pop("file"))
    try:
        work(pipe, **order)
    except EOFError:
        pass  # The driver has closed the pipe.
    except Exception as error:
        traceback.print_exc()
        pipe.send(textwrap.shorten(f"{type(error).__name__}: {error}", MAX_TEXT))
