"""Objects of Kubernetes as YAML."""

from __future__ import annotations

import json
import re
from typing import Any

# What no YAML parser takes for anything but a text.
_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def to_yaml(value: Any, indent: int = 0) -> str:
    """Mappings and lists block by block; texts that need it are quoted as in JSON.

    Args:
        value: dicts with texts as keys, lists, texts, integers and booleans.
        indent: the number of spaces before each line.

    Example:
        >>> print(to_yaml({"kind": "Job", "args": ["-u", "a b"], "spec": {}}), end="")
        kind: Job
        args:
        - "-u"
        - "a b"
        spec: {}
    """
    pad = " " * indent
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict) and item:
                lines.append(f"{pad}{_scalar(key)}:\n{to_yaml(item, indent + 2)}")
            elif isinstance(item, list) and item:
                lines.append(f"{pad}{_scalar(key)}:\n{to_yaml(item, indent)}")
            else:
                lines.append(f"{pad}{_scalar(key)}: {_scalar(item)}\n")
    else:
        for item in value:
            text = to_yaml(item, indent + 2) if _is_block(item) else f"{pad}  {_scalar(item)}\n"
            lines.append(f"{pad}- {text[indent + 2 :]}")
    return "".join(lines)


def _is_block(value: Any) -> bool:
    return isinstance(value, (dict, list)) and bool(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
