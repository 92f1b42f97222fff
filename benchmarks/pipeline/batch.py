"""What the models are: their sizes, and the batch that each step is fed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """A GPT and its batch.

    Attributes:
        blocks: of attention and a hidden layer.
        width: of the values between them.
        length: characters in a row.
        rows: in a batch.
        vocabulary: different characters.
    """

    blocks: int
    width: int
    length: int
    rows: int
    vocabulary: int = 256


WORKLOADS = {"gpt": Workload(8, 256, 128, 32), "tiny": Workload(8, 16, 8, 16, vocabulary=16)}
HEADS = 4
