"""Which gradients are compressed, how, and from when on."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from tfdist.compression.auto import Auto
from tfdist.compression.codecs.codec import Codec
from tfdist.compression.settings import check_types


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is compressed by which codec; everything else is summed exactly.

    Gradients of vectors and scalars (biases, normalisation), of few values and of other types than
    float32 stay exact, and so do sparse ones (`tf.IndexedSlices`) unless `sparse` is set.

    Args:
        codec: for all gradients that are compressed, or `Auto()`, which chooses one.
        exclude: regular expressions; a variable stays exact where one of them is found in its path,
            such as `"embedding"` or `"^dense_1/kernel$"`.
        smallest: a gradient of fewer values stays exact.
        warmup_steps: the optimizer's first steps, all of them exact; or the codec's, if more.
        within_hosts: compress also between the workers of one machine, to try a codec there.
        sparse: compress sparse gradients as well, as dense ones; the optimizer gets them dense.

    Raises:
        ValueError: an expression or a number is not valid.

    Example:
        ```python
        tfdist.compression.Policy(tfdist.compression.OneBit(), exclude=("embedding",))
        ```
    """

    codec: Codec | Auto
    exclude: tuple[str, ...] = ()
    smallest: int = 4096
    warmup_steps: int = 0
    within_hosts: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.codec, (Codec, Auto)):
            raise ValueError(
                "`codec` is a codec such as tfdist.compression.Int8(), or "
                f"tfdist.compression.Auto(). Received: {self.codec!r}."
            )
        check_types(self)
        if not isinstance(self.exclude, tuple) or not all(isinstance(e, str) for e in self.exclude):
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

    def compresses(self, variable: Any) -> bool:
        """Whether a variable's gradient is compressed, if it is dense.

        Args:
            variable: of Keras; its path is such as `"layer/kernel"`.
        """
        if not may_be_compressed(variable) or math.prod(variable.shape) < self.smallest:
            return False
        return not any(re.search(expression, variable.path) for expression in self.exclude)


def may_be_compressed(variable: Any) -> bool:
    """Whether any policy compresses the gradient of a variable of Keras."""
    return variable.dtype == "float32" and len(variable.shape) >= 2
