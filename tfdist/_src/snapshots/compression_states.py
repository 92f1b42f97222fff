"""What this worker's codecs keep from step to step, such as the errors of compression."""

from __future__ import annotations

from typing import Any

from tfdist._src.internals.optimizer import updating_optimizers
from tfdist._src.keras.saving.compression_files import compressor_of
from tfdist._src.snapshots.part_file import Array


def codec_arrays(model: Any, rank: int) -> dict[str, Array]:
    """This worker's state, by name."""
    return {
        f"{_prefix(number, rank)}{name}": value
        for number, optimizer in enumerate(_optimizers(model))
        if (state := getattr(optimizer, "compression_state", None)) is not None
        for name, value in state.values().items()
    }


def load_codec_arrays(model: Any, rank: int, arrays: dict[str, Array]) -> None:
    """Restores this worker's state; variables that are created later get their values then.

    Args:
        model: the model in training.
        rank: this worker's rank.
        arrays: by name, as returned by `codec_arrays`.
    """
    compressor = compressor_of(model)
    for number, optimizer in enumerate(_optimizers(model)):
        prefix = _prefix(number, rank)
        own = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
        if not own or compressor is None:
            continue
        if not hasattr(optimizer, "compression_state"):
            optimizer.compression_state = compressor.new_state()
        optimizer.compression_state.load(own)


def _optimizers(model: Any) -> list[Any]:
    if compressor_of(model) is None or model.optimizer is None:
        return []
    return updating_optimizers(model.optimizer)


def _prefix(number: int, rank: int) -> str:
    return f"compression/worker {rank}/optimizer {number}/"
