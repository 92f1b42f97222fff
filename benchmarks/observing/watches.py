"""The ways to watch training that the benchmark compares."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Watch:
    """A way to watch training. The function `watchers.make` creates its callbacks.

    Attributes:
        recorded: whether the core's recorder is on. Outside of this benchmark, it is always on.
        scraped: whether the driver requests the metrics of all workers once a second.
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
