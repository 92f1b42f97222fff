"""What is compared: steps with a feature, and steps without it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

# `none_again` tells by how much equal steps differ.
FEATURES = ("none", "none_again", "agreement")


def tracing(feature: str) -> AbstractContextManager[Any]:
    """Within this context, a step is traced with the feature, and without the others."""
    from tfdist.trainer.fit import atomic_step

    if feature == "agreement":
        return contextlib.nullcontext()
    return mock.patch.object(atomic_step, "applies", lambda strategy: False)
