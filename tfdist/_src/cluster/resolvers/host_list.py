"""Slurm's lists of hosts, `gpu[01-03,7],login`, written out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tfdist.errors import ClusterError

_MOST = 1 << 20
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str, variable: str) -> list[str]:
    """The hosts of a list, in its order.

    Args:
        text: the list; brackets hold numbers and ranges, whose leading zeros are kept.
        variable: what error messages call it.

    Raises:
        ClusterError: it is malformed.

    Example:
        >>> expand("a[08-10,2]x[1-2],b", "LIST")
        ['a08x1', 'a08x2', 'a09x1', 'a09x2', 'a10x1', 'a10x2', 'a2x1', 'a2x2', 'b']
    """
    try:
        hosts = list(itertools.islice(_hosts(text), _MOST))
    except ValueError:
        hosts = []
    if not hosts:
        raise ClusterError(
            f"{variable} is not a list of hosts such as 'gpu[01-03],login'. Received: "
            f"{text[:200]!r}. Let srun set it, or set TF_CONFIG."
        )
    return hosts


def _hosts(text: str) -> Iterator[str]:
    for entry in re.split(r",(?![^\[]*\])", text.strip()):
        parts = list(_PART.finditer(entry))
        if not entry or "".join(part[0] for part in parts) != entry:
            raise ValueError(entry)
        choices = [[part[2]] if part[2] else _numbers(part[1]) for part in parts]
        yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        if match is None:
            raise ValueError(entry)
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST:
            raise ValueError(entry)
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers
