"""Small models that each show one thing, and workloads around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.workload import Workload

torch.set_num_threads(1)  # the models are too small to be shared between cores

WIDTH = 16


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks between an embedding-like layer and a head."""

    def __init__(self, blocks: int = 4, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedStack(Stack):
    """The head shares its weight with the stem."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.stem.weight


class Reused(Stack):
    """Every block is called twice in the step, in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class ConvBlock(nn.Module):
    """Convolution, normalisation, ReLU, twice, with a shortcut."""

    def __init__(self, width: int, norm: Callable[[int], nn.Module], inplace: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = norm(width)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + x)


class ConvNet(nn.Module):
    """A ResNet in small: stem, two stages of blocks in Sequentials, a head."""

    def __init__(
        self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, inplace: bool = False
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(ConvBlock(8, norm, inplace), ConvBlock(8, norm, inplace))
        self.layer2 = nn.Sequential(ConvBlock(8, norm, inplace), ConvBlock(8, norm, inplace))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class PreActivation(nn.Module):
    """A block whose first operator changes its input in place.

    With `reads_input` it adds the changed input, which is another one when nothing is changed.
    """

    def __init__(self, width: int, reads_input: bool) -> None:
        super().__init__()
        self.reads_input = reads_input
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(x)
        return (x if self.reads_input else y) + self.conv2(self.norm(self.conv1(y)))


class PreActivationNet(nn.Module):
    def __init__(self, reads_input: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(PreActivation(8, reads_input) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """nn.MultiheadAttention uses its out_proj's weight without calling it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class AttentionNet(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Counting(nn.Module):
    """A block that changes a buffer of its own and uses it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.count += 1
        self.average.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        return x + self.out(torch.tanh(y * self.count + self.average))


class CountingNet(Stack):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList(Counting(WIDTH) for _ in range(3))


@dataclass
class Cargo:
    """What `Arguments` passes on: a pytree that torch does not know as such."""

    hidden: torch.Tensor
    scale: float


class Arguments(nn.Module):
    """Takes a tuple, a dict, keywords and plain values; returns a tuple with a dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.other = nn.Linear(width, width)

    def forward(
        self,
        pair: tuple[torch.Tensor, torch.Tensor],
        *,
        extra: dict[str, torch.Tensor],
        scale: float,
        flag: bool = False,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
        left, right = pair
        left = F.gelu(self.linear(left)) * scale + extra["bias"]
        right = torch.tanh(self.other(right + left)) if flag else right
        return (left, right), {"bias": extra["bias"] + left.mean()}


class ArgumentsNet(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Arguments(width) for _ in range(4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        pair, extra = (x, x.sin()), {"bias": x.mean(1, keepdim=True)}
        for block in self.blocks:
            pair, extra = block(pair, extra=extra, scale=0.5, flag=True)
        return self.head(pair[0] + pair[1] + extra["bias"])


class SkipNet(Stack):
    """Later blocks also get the first block's output, as in a U-Net."""

    class Join(Block):
        def forward(self, x: torch.Tensor, skip: torch.Tensor | None = None) -> torch.Tensor:
            y = super().forward(x)
            return y if skip is None else y * skip.sigmoid()

    def __init__(self) -> None:
        super().__init__(blocks=1)
        self.blocks = nn.ModuleList(SkipNet.Join() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.stem(x))
        skip = x
        for block in self.blocks[1:4]:
            x = block(x, skip)
        del skip
        return self.head(self.blocks[4](x))


class Siamese(nn.Module):
    """Used twice in one step by its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(blocks=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x)


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def sequences(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, 8)


def images(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8)


def workload(
    model: Callable[[], nn.Module],
    batch: Callable[[], Any] = sequences,
    loss: Callable[[nn.Module, Any], torch.Tensor] = squared,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Workload:
    """The same workload, weights and batch, every time."""
    torch.manual_seed(0)
    built = model()
    return Workload(built, loss, optimizer(built.parameters(), lr=0.01), batch())


@pytest.fixture(scope="session")
def zoo() -> SimpleNamespace:
    """The models of this file and what is needed to train them."""
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    return SimpleNamespace(**public)
