"""How far the clocks of workers are ahead of the chief's."""

from __future__ import annotations

from typing import Any


def clock_offsets(records: list[dict[str, Any]]) -> list[tuple[int, int | None]]:
    """Each worker's clock minus the chief's and the uncertainty of that, in nanoseconds.

    Where the two have not compared their clocks, the hosts' time of day is used, with an unknown
    uncertainty (None).

    Args:
        records: of each worker, by rank; see `Timeline`.
    """
    chief = records[0]
    measured = {0: (0, 0)}
    for communicator in chief["communicators"]:
        if communicator["size"] != len(records):
            continue
        for peer in communicator["peers"]:
            found = peer["clock_offset_ns"], peer["clock_uncertainty_ns"]
            if None not in found and found[1] <= measured.get(peer["rank"], found)[1]:
                measured[peer["rank"]] = found
    steady, unix = chief["clock"]
    return [
        measured.get(rank, (record["clock"][0] - record["clock"][1] - (steady - unix), None))
        for rank, record in enumerate(records)
    ]
