"""Selects the gradients to compress, the codec, and the first step; lists the codecs by name."""

import dataclasses
import math
import re
from typing import Any, TypeAlias

from tfdist._src.compression.auto import Auto
from tfdist._src.compression.codecs import quantizers
from tfdist._src.compression.codecs.codec import Codec, check_types
from tfdist._src.compression.codecs.powersgd import PowerSGD
from tfdist._src.compression.codecs.sparsifiers import DGC, RandomK, Threshold, TopK


@dataclasses.dataclass(frozen=True)
class Policy:
    """Selects the gradients to compress, and their codec; all others are summed exactly.

    Gradients of vectors and scalars (biases, normalization), gradients with few values, and
    gradients of types other than float32 stay exact. So do sparse gradients (`tf.IndexedSlices`),
    unless `sparse` is set.

    Args:
        codec: the codec for all compressed gradients, or `Auto()`, which chooses one.
        exclude: regular expressions; a variable stays exact if one of them matches anywhere in its
            path, such as `"embedding"` or `"^dense_1/kernel$"`.
        smallest: gradients with fewer values stay exact.
        warmup_steps: the number of initial steps of the optimizer that are exact; the codec's
            number applies if it is larger.
        within_hosts: whether to also compress between workers of the same host, to try out a codec.
        sparse: whether to convert sparse gradients to dense gradients and compress these; the
            optimizer then receives dense gradients.

    Raises:
        ValueError: an expression or a number is invalid.

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
                "`codec` must be a codec such as tfdist.compression.Int8(), or "
                f"tfdist.compression.Auto(). Received: {self.codec!r}."
            )
        check_types(self)
        if not isinstance(self.exclude, tuple) or not all(isinstance(e, str) for e in self.exclude):
            raise ValueError(
                "`exclude` must be a tuple of regular expressions. "
                f'Received: {self.exclude!r}. Pass, for example, ("embedding",).'
            )
        for expression in self.exclude:
            try:
                re.compile(expression)
            except re.error as error:
                raise ValueError(
                    "`exclude` must contain valid regular expressions. "
                    f"Received: {expression!r}: {error}."
                ) from None
        for name in ("smallest", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be >= 0. Received: {getattr(self, name)}.")

    def compresses(self, variable: Any) -> bool:
        """Whether a variable's gradient is compressed if it is dense.

        Args:
            variable: a Keras variable, with a path such as `"layer/kernel"`.
        """
        if not may_be_compressed(variable) or math.prod(variable.shape) < self.smallest:
            return False
        return not any(re.search(expression, variable.path) for expression in self.exclude)


def may_be_compressed(variable: Any) -> bool:
    """Whether the gradient of a Keras variable can be compressed under any policy."""
    return variable.dtype == "float32" and len(variable.shape) >= 2


CompressionLike: TypeAlias = str | Codec | Auto | Policy | None
"""The type of `compression`: a name, a codec, an automatic choice, or a policy."""

CODECS: dict[str, type[Codec]] = {
    "fp16": quantizers.FP16,
    "bf16": quantizers.BF16,
    "fp8": quantizers.FP8,
    "int8": quantizers.Int8,
    "qsgd": quantizers.QSGD,
    "terngrad": quantizers.TernGrad,
    "natural": quantizers.Natural,
    "onebit": quantizers.OneBit,
    "signsgd": quantizers.SignSGD,
    "ef_signsgd": quantizers.EFSignSGD,
    "signum": quantizers.Signum,
    "topk": TopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "dgc": DGC,
    "powersgd": PowerSGD,
}
"""The codecs by the names that `compression` accepts."""


def name_of(codec: Codec | None) -> str:
    """A codec's name; `"none"` for None, and the class name of an unregistered codec."""
    if codec is None:
        return "none"
    names = (name for name, kind in CODECS.items() if type(codec) is kind)
    return next(names, type(codec).__name__)


def read(compression: CompressionLike) -> Policy | None:
    """Converts the argument `compression` to a policy.

    Args:
        compression: None, the name of a codec, `"auto"`, a codec, `Auto` or a policy.

    Returns:
        The policy; None for no compression.

    Raises:
        ValueError: the argument is none of these.
    """
    if compression is None or isinstance(compression, Policy):
        return compression
    if isinstance(compression, (Codec, Auto)):
        return Policy(compression)
    if isinstance(compression, str) and compression == "auto":
        return Policy(Auto())
    if isinstance(compression, str) and compression in CODECS:
        return Policy(CODECS[compression]())
    raise ValueError(
        f"`compression` must be one of {', '.join(map(repr, (*CODECS, 'auto')))}, a codec such as "
        f"tfdist.compression.Int8(), or a tfdist.compression.Policy. Received: {compression!r}."
    )
