"""The names of what is compared."""

from __future__ import annotations

from benchmarks.compression.quiet import without_tensorflows_words

with without_tensorflows_words():
    from tfdist.compression import CODECS, Codec

NONE = "none"
AUTO = "auto"
KNOWN = tuple(dict.fromkeys([NONE, *CODECS, AUTO]))
USUAL = (NONE, "fp16", "int8", "onebit", "topk", "powersgd", AUTO)


def compression_of(name: str) -> str | None:
    """What `tfdist.MultiWorkerMirroredStrategy` takes as `compression`."""
    return None if name == NONE else name


def codec_of(name: str) -> Codec | None:
    """The codec with its defaults; None where a name stands for none, or for a choice of them."""
    return CODECS[name]() if name in CODECS else None
