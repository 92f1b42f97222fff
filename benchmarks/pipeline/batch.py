"""The sizes of the models and of their batches."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """The sizes of a GPT and of its batch.

    Attributes:
        blocks: the number of transformer blocks. Each consists of attention and a hidden layer.
        width: the number of values per character between two blocks.
        length: the number of characters in a row.
        rows: the number of rows in a batch.
        vocabulary: the number of different characters.
    """

    blocks: int
    width: int
    length: int
    rows: int
    vocabulary: int = 256


WORKLOADS = {"gpt": Workload(8, 256, 128, 32), "tiny": Workload(8, 16, 8, 16, vocabulary=16)}
HEADS = 4
