"""Metrics that take up the values of microbatches as the parts of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def weighing(metrics: Sequence[Any], step: Any) -> Iterator[None]:
    """While it lasts, metrics take up values by the share of the rows that they are of."""
    for metric in metrics:

        def update(value: Any, sample_weight: Any = None, metric: Any = metric) -> None:
            type(metric).update_state(metric, value, sample_weight=step.share)

        metric.update_state = update
    try:
        yield
    finally:
        for metric in metrics:
            del metric.update_state
