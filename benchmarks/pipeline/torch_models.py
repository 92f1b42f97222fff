"""The stages of a GPT in torch. It has the same layers as the GPT of `keras_models`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.pipeline.batch import HEADS, Workload
from benchmarks.step_time.torch_models import Block


class Embed(nn.Module):
    """The embeddings of characters and positions."""

    def __init__(self, size: Workload) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


def stage(size: Workload, index: int, stages: int) -> nn.Module:
    """Returns one stage of the model. All stages have the same number of blocks.

    If there is only one stage, it is the whole model.

    Args:
        size: the sizes of the model.
        index: the index of the stage.
        stages: the number of stages.

    Raises:
        ValueError: the number of blocks is not a multiple of the number of stages.
    """
    if size.blocks % stages:
        raise ValueError(f"{size.blocks} blocks do not divide into {stages} stages")
    parts: list[nn.Module] = [Block(size.width, HEADS) for _ in range(size.blocks // stages)]
    if index == 0:
        parts.insert(0, Embed(size))
    if index == stages - 1:
        parts += [nn.LayerNorm(size.width, eps=1e-3), nn.Linear(size.width, size.vocabulary)]
    return nn.Sequential(*parts)
