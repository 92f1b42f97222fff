"""Which of several descriptors have something to read."""

from __future__ import annotations

import select
from collections.abc import Mapping


def readable(descriptors: Mapping[int, int]) -> list[int]:
    """The keys whose descriptors can be read without blocking."""
    poll = select.poll()
    keys = {}
    for key, descriptor in descriptors.items():
        poll.register(descriptor, select.POLLIN)
        keys[descriptor] = key
    return [keys[descriptor] for descriptor, _ in poll.poll(0)]
