"""The ways to watch a training that are compared."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Watch:
    """A way to watch; its callbacks are in `watchers`.

    Attributes:
        recorded: whether the recorder is on, as always outside of this benchmark.
        scraped: whether the metrics are scraped once a second.
    """

    recorded: bool = True
    scraped: bool = False


WATCHES = {
    "none": Watch(recorded=False),
    "none_again": Watch(recorded=False),
    "recorder": Watch(),
    "throughput": Watch(),
    "straggler": Watch(),
    "timeline": Watch(),
    "metrics": Watch(scraped=True),
    "all": Watch(scraped=True),
}
