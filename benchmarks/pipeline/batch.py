"""The sizes of the models, and of the batch of each step."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """A GPT and its batch.

    Attributes:
        blocks: the number of blocks, each with attention and a hidden layer.
        width: the number of values per character between the blocks.
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
