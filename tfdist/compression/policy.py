"""Which gradients are compressed, how, and from when on."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tfdist.compression.codec import Codec


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is compressed by which codec; everything else is summed exactly.

    Gradients of vectors and scalars (biases, normalisation), of few values, of other types than
    float32, and sparse ones (`tf.IndexedSlices`) stay exact.

    Args:
        codec: for all gradients that are compressed.
        exclude: regular expressions; a variable stays exact where one of them is found in its path,
            such as `"embedding"` or `"^dense_1/kernel$"`.
        smallest: a gradient of fewer values stays exact.
        warmup_steps: the optimizer's first steps, all of them exact.
        within_hosts: compress also between the workers of one machine, which costs more time than
            it saves.

    Raises:
        ValueError: an expression or a number is not valid.

    Example:
        ```python
        tfdist.compression.Policy(tfdist.compression.OneBit(), exclude=("embedding",))
        ```
    """

    codec: Codec
    exclude: tuple[str, ...] = ()
    smallest: int = 4096
    warmup_steps: int = 0
    within_hosts: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, tuple):
            raise ValueError(
                "`exclude` is a tuple of regular expressions. "
                f'Received: {self.exclude!r}. Write ("embedding",).'
            )
        for expression in self.exclude:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(
                    f"`exclude` holds regular expressions. Received: {expression!r}: {error}."
                ) from None
        for name in ("smallest", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is 0 or more. Received: {getattr(self, name)}.")

    def compresses(self, gradient: Any, path: str) -> bool:
        """Whether the gradient of the variable with this path is compressed.

        Args:
            gradient: a tensor, or something sparse.
            path: of the variable, as Keras names it: `"layer/kernel"`.
        """
        shape = getattr(gradient, "shape", None)
        if type(gradient).__name__ == "IndexedSlices" or shape is None or shape.rank is None:
            return False
        if gradient.dtype.name != "float32" or shape.rank < 2:
            return False
        if (shape.num_elements() or 0) < self.smallest:
            return False
        return not any(re.search(expression, path) for expression in self.exclude)
