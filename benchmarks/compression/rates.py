"""Parses the flag `--rate`: the maximum rate at which a host sends, in the notation of `tc`."""

from __future__ import annotations

import re

UNLIMITED = "none"


def is_rate(text: str) -> bool:
    """Whether a text is `none`, or a positive number with a unit of `tc`, such as `100mbit`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]i?)?(bit|bps)", text, re.IGNORECASE)
    return text == UNLIMITED or bool(match and float(match[1]))


def limit_of(rate: str) -> str:
    """Converts a value of the flag `--rate` to the argument `rate` of `make_hosts`."""
    return "" if rate == UNLIMITED else rate
