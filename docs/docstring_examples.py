"""Shows the section "Example" of docstrings as code, like "Examples", which griffe knows."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
