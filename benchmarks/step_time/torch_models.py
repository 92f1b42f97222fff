"""The models of `keras_models` in torch, with the same layers. They output logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def tiny() -> nn.Module:
    """Returns a small model for tests."""
    return nn.Linear(8, 4)


def mlp() -> nn.Module:
    """Returns a model with 8.4 million parameters. Communication dominates its training step."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 10))


def convolve(before: int, filters: int, stride: int = 1) -> nn.Module:
    """Returns a convolution, batch normalization with Keras's default arguments, and ReLU."""
    return nn.Sequential(
        nn.Conv2d(before, filters, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(filters, eps=1e-3, momentum=0.01),
        nn.ReLU(),
    )


class Residual(nn.Module):
    """A residual block: the sum of a long branch and a short branch.

    The long branch consists of two convolutions. If the block reduces the size of the image, the
    short branch is a 1x1 convolution with the same stride. Otherwise, it is the identity.
    """

    def __init__(self, before: int, filters: int, stride: int = 2) -> None:
        super().__init__()
        self.short = nn.Conv2d(before, filters, 1, stride) if stride > 1 else nn.Identity()
        self.long = nn.Sequential(convolve(before, filters, stride), convolve(filters, filters))

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + self.long(x)


def cnn() -> nn.Module:
    """Returns a residual network for 32x32 images: seven convolutions with batch normalization."""
    blocks = [Residual(before, filters) for before, filters in ((32, 32), (32, 64), (64, 128))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(convolve(3, 32), *blocks, *head)


def resnet() -> nn.Module:
    """Returns ResNet-20 for 32x32 images: 19 convolutions of 3x3 with batch normalization."""
    blocks = [Residual(16, 16, 1) for _ in range(3)]
    for filters in (32, 64):
        blocks += [Residual(filters // 2, filters), *(Residual(filters, filters, 1) for _ in "12")]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(convolve(3, 16), *blocks, *head)


class Block(nn.Module):
    """A transformer block: causal attention and a hidden layer, each after layer normalization."""

    def __init__(self, width: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width, eps=1e-3)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_hidden = nn.LayerNorm(width, eps=1e-3)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.queries_keys_values(self.before_attention(x)).view(
            rows, length, 3, self.heads, -1
        )
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.before_hidden(x))))


class GPT(nn.Module):
    """A causal transformer with six blocks and width 256 for sequences of 128 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 256)
        self.positions = nn.Embedding(128, 256)
        self.blocks = nn.Sequential(*(Block(256) for _ in range(6)))
        self.head = nn.Sequential(nn.LayerNorm(256, eps=1e-3), nn.Linear(256, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


class LSTM(nn.Module):
    """A model with two LSTM layers of 256 units for sequences of 64 tokens.

    In contrast to Keras, torch's LSTM layers have two bias vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.layers = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.layers(self.tokens(tokens))[0]
        return self.head(states[:, -1])  # type: ignore[no-any-return]


BUILDERS = {"tiny": tiny, "mlp": mlp, "cnn": cnn, "resnet": resnet, "gpt": GPT, "lstm": LSTM}
