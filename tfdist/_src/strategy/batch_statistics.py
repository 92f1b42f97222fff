"""The rows by whose statistics batch normalization normalizes: a setting of the strategies."""

from __future__ import annotations

from typing import Literal

from tfdist._src.group.group import Group

BatchStatistics = Literal["global", "replica"]
_CHOICES = ("global", "replica")


def check_batch_statistics(given: str | None) -> None:
    """Checks a strategy's argument.

    Raises:
        ValueError: it is neither None nor a known choice.
    """
    if given is not None and given not in _CHOICES:
        raise ValueError(
            f"`batch_statistics` must be one of {', '.join(map(repr, _CHOICES))}. "
            f"Received: {given!r}."
        )


def agreed_batch_statistics(group: Group, given: str | None) -> str:
    """The setting of a strategy, the same on all workers, all of which call this.

    Args:
        group: the workers.
        given: this worker's argument; None for `TFDIST_BATCH_STATISTICS`.

    Raises:
        ProgramMismatchError: the workers differ.
    """
    chosen = group.options.batch_statistics if given is None else given
    group.agree("batch_statistics", chosen)
    return chosen
