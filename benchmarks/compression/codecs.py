"""The names of the codecs to compare."""

from __future__ import annotations

from benchmarks.compression.quiet import without_tensorflows_words

with without_tensorflows_words():
    from tfdist.compression import CODECS, Codec

NONE = "none"
AUTO = "auto"
KNOWN = tuple(dict.fromkeys([NONE, *CODECS, AUTO]))
USUAL = (NONE, "fp16", "int8", "onebit", "topk", "powersgd", AUTO)


def compression_of(name: str) -> str | None:
    """Converts a codec's name to the argument `compression` of tfdist's strategy."""
    return None if name == NONE else name


def codec_of(name: str) -> Codec | None:
    """Returns the codec with this name and default settings; None for `none` and `auto`."""
    return CODECS[name]() if name in CODECS else None
