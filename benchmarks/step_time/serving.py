"""Runs a worker's process that `Members` has started, and reports its failure."""

from __future__ import annotations

import json
import sys
import textwrap
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.step_time.members import MAX_TEXT


def serve(work: Callable[..., None]) -> None:
    """Calls a function with the worker's order, and returns when the driver is gone.

    Args:
        work: takes the pipe to the driver, and the rest of the order as keyword arguments. It
            raises `EOFError` when it reads from the pipe and the driver is gone.
    """
    order = json.loads(sys.argv[1])
    pipe = Connection(order.pop("file"))
    try:
        work(pipe, **order)
    except EOFError:
        pass  # The driver is gone.
    except Exception as error:
        traceback.print_exc()
        pipe.send(textwrap.shorten(f"{type(error).__name__}: {error}", MAX_TEXT))
