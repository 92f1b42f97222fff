"""The policy that selects the gradients to compress and the codec, and the names of the codecs."""

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
    """Selects the gradients to compress, and the codec that compresses them.

    All other gradients are summed exactly. These include the gradients of vectors and scalars (such
    as biases and the parameters of normalization layers), gradients with few values, and gradients
    with a type other than float32. Sparse gradients (`tf.IndexedSlices`) are also summed exactly,
    unless `sparse` is True.

    Args:
        codec: the codec for all compressed gradients, or `Auto()` to choose a codec by measurement.
        exclude: regular expressions, such as `"embedding"` or `"^dense_1/kernel$"`. The gradient of
            a variable is not compressed if one of the expressions matches a part of the variable's
            path.
        smallest: gradients with fewer values than this number are not compressed.
        warmup_steps: the number of steps at the beginning of training in which no gradients are
            compressed. If the codec's `warmup_steps` is larger, it is used instead.
        within_hosts: whether to also compress gradients that are sent to workers of the same host.
            This makes it possible to try out a codec on a single host.
        sparse: whether to convert sparse gradients to dense gradients, and to compress these. The
            optimizer then also receives dense gradients.

    Raises:
        ValueError: an argument is invalid.

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
        """Whether this policy compresses the gradient of a variable, provided that it is dense.

        Args:
            variable: a Keras variable. Its path, such as `"layer/kernel"`, is compared with
                `exclude`.
        """
        if not may_be_compressed(variable) or math.prod(variable.shape) < self.smallest:
            return False
        return not any(re.search(expression, variable.path) for expression in self.exclude)


def may_be_compressed(variable: Any) -> bool:
    """Whether there can be a policy that compresses the gradient of this Keras variable."""
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
    """Returns a codec's name in `CODECS`, or its class name if it is not in `CODECS`.

    Returns `"none"` for None.
    """
    if codec is None:
        return "none"
    names = (name for name, kind in CODECS.items() if type(codec) is kind)
    return next(names, type(codec).__name__)


def read(compression: CompressionLike) -> Policy | None:
    """Converts the argument `compression` of a strategy to a policy.

    Args:
        compression: None, the name of a codec, `"auto"`, a codec, an `Auto` object, or a policy.

    Returns:
        The policy; None for no compression.

    Raises:
        ValueError: `compression` is none of these.
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
