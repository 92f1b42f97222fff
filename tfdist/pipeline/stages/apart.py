"""The communication of what is computed apart from others."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Apart:
    """That of a microbatch, which knows nothing of the others."""

    def reduce(self, tensors: Sequence[tf.Tensor], hows: Sequence[str]) -> list[tf.Tensor]:
        raise AssertionError(f"A microbatch reduces {tensors}.")

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        raise AssertionError(f"A microbatch gathers {tensors}.")

    def begin(self) -> None:
        raise AssertionError("A microbatch communicates.")


class Single:
    """That of the only replica, which has all rows."""

    def reduce(self, tensors: Sequence[tf.Tensor], hows: Sequence[str]) -> list[tf.Tensor]:
        return list(tensors)

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(tensors)

    def begin(self) -> None:
        pass
