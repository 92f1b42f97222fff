"""The batches of workers that read files of their own, or whatever else is not divided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OwnBatches:
    """What is known of such data.

    Attributes:
        generation: of the group for which the data has been distributed.
        count: how many batches an epoch has; None if that is unknown.
        is_shared_out: whether each group can share the data out anew; not what the user has
            distributed, nor what the workers of a single pipeline read, all of them the same.
    """

    generation: int = -1
    count: int | None = None
    is_shared_out: bool = False
