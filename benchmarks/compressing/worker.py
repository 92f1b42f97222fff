"""A worker's process: settings that the frameworks read when they are imported, then steps.

It is started by `team` with one argument, the order as JSON: what `Team` says and the number of
the file that leads to the driver.
"""

from __future__ import annotations

import json
import sys
import textwrap
import traceback
from multiprocessing.connection import Connection

from stepping.place import take_place

from compressing.tasks import TASKS

LONGEST = 500


def work(pipe: Connection, codec: str, model: str, rank: int, addresses: list[str]) -> None:
    """Trains until the driver is gone.

    Args:
        pipe: to the driver.
        codec: a name of `codecs`.
        model: a key of `TASKS`.
        rank: of this worker, which is also the number of its core.
        addresses: of all workers.
    """
    take_place(rank, addresses)
    try:
        from compressing.training import train

        train(TASKS[model], codec, len(addresses), pipe)
    except EOFError:
        pass  # The driver is gone.
    except Exception as error:
        traceback.print_exc()
        pipe.send(textwrap.shorten(f"{type(error).__name__}: {error}", LONGEST))


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    work(Connection(order.pop("file")), **order)
