"""Heads with labels, and the plain way to their loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

IGNORED = -100


@dataclass(frozen=True)
class Case:
    """Inputs of a head and of its loss."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    bias: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> Case:
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype), bias=bias)

    def parameters(self) -> list[torch.Tensor]:
        """Fresh leaves that need gradients."""
        given = [self.hidden, self.weight, self.bias]
        return [t.detach().clone().requires_grad_() for t in given if t is not None]


def case(
    rows: tuple[int, ...] = (3, 7),
    vocab: int = 29,
    width: int = 8,
    *,
    bias: bool = False,
    ignored: float = 0.3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random inputs, some labels ignored, the first one never."""
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocab, rows, generator=source)
    labels[torch.rand(rows, generator=source) < ignored] = IGNORED
    labels.view(-1)[:1] = vocab - 1
    return Case(
        torch.randn(*rows, width, generator=source, dtype=torch.float64).to(dtype),
        torch.randn(vocab, width, generator=source, dtype=torch.float64).to(dtype),
        labels,
        torch.randn(vocab, generator=source, dtype=torch.float64).to(dtype) if bias else None,
    )


def plain_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The loss by way of the full logits, upcast as transformers does."""
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(wide, labels.flatten(), **options)


Loss = Callable[..., torch.Tensor]


def numbers(loss: Loss, given: Case, factor: float = 1.0, **options: Any) -> list[torch.Tensor]:
    """The loss and the gradients of hidden, weight and bias."""
    leaves = given.parameters()
    bias = leaves[2] if given.bias is not None else None
    value = loss(leaves[0], leaves[1], given.labels, bias=bias, **options)
    (value * factor).backward()
    return [value.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


@pytest.fixture(scope="session")
def heads() -> SimpleNamespace:
    return SimpleNamespace(
        IGNORED=IGNORED,
        Case=Case,
        case=case,
        numbers=numbers,
        plain_cross_entropy=plain_cross_entropy,
    )
