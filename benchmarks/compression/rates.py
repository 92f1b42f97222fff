"""The rate at which a host may send, as `tc` writes it."""

from __future__ import annotations

import re

UNLIMITED = "none"


def is_rate(text: str) -> bool:
    """Whether a text is a number with a unit of `tc`, such as `100mbit`, or `none`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]i?)?(bit|bps)", text, re.IGNORECASE)
    return text == UNLIMITED or bool(match and float(match[1]))


def limit_of(rate: str) -> str:
    """Returns the rate as an argument of `make_hosts`."""
    return "" if rate == UNLIMITED else rate
