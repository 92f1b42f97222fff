"""The batches of workers that read files of their own, or whatever else is not divided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnBatches:
    """What another worker needs to know of such data, to take part in a running epoch.

    Attributes:
        generation: of the group for which the data has been distributed.
        count: how many batches an epoch has; None if that is unknown.
        ends_together: whether all workers have as many.
        is_shared_out: whether the workers share the data out; not those of a single pipeline, which
            all read it.
    """

    generation: int = -1
    count: int | None = None
    ends_together: bool = False
    is_shared_out: bool = False
