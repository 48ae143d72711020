"""What stands for logits looks like them, and refuses what would need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.in_model import TiledLoss
from memfit.runtime.tiled_loss.logits import Logits

VOCAB, WIDTH, ROWS, LENGTH = 8, 8, 3, 8  # all alike: sizes alone must not tell them apart
LABELS = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % VOCAB


def made(shape: tuple[int, ...] = (ROWS, LENGTH, WIDTH), **options: Any) -> Any:
    """Logits of a head named 'head'."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(WIDTH, VOCAB, **options)})
    TiledLoss(model, tile=2).install()
    return model["head"](torch.randn(shape, requires_grad=True))


def test_facts() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, 5)
    hidden = torch.randn(ROWS, LENGTH, WIDTH)
    plain = head(hidden)
    with TiledLoss(head, tile=2):
        logits = head(hidden.requires_grad_())
    assert isinstance(logits, Logits) and isinstance(logits, torch.Tensor)
    for fact in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"):
        assert getattr(logits, fact) == getattr(plain, fact), fact
    for method in ("size", "dim", "numel", "stride", "is_contiguous", "is_floating_point"):
        assert getattr(logits, method)() == getattr(plain, method)(), method
    assert len(logits) == len(plain) and logits.size(-1) == 5
    assert logits.untyped_storage().data_ptr() == hidden.data_ptr()
    assert repr(logits) == "Logits((3, 8, 5), torch.float32, of '', made in tiles)"
    assert not logits.detach().requires_grad and logits.requires_grad


def test_the_model_may_be_the_head() -> None:
    head, hidden, labels = nn.Linear(WIDTH, 5), torch.randn(4, WIDTH), torch.arange(4)
    expected = F.cross_entropy(head(hidden), labels)
    with TiledLoss(head, tile=2):
        torch.testing.assert_close(F.cross_entropy(head(hidden), labels), expected)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "tanh": torch.tanh,
    "clone": lambda x: x.clone(),
    "numpy": lambda x: x.detach().numpy(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0, 0].item(),
    "cat": lambda x: torch.cat([x, x]),
    "add": lambda x: x + 1,
    "mul": lambda x: 2 * x,  # with a bias
    "eq": lambda x: x == 3,
    "long": lambda x: x.long(),
    "backward": lambda x: x.backward(),
    "__setitem__": lambda x: x.__setitem__((..., 0), -1.0),
    "to": lambda x: x.to("meta"),
    "aten": lambda x: x.mT,
    "__get__": lambda x: x.data,
    "view": lambda x: x.view(-1, 2, 4),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "__getitem__": lambda x: x[..., :3],
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_needs_the_logits_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"head 'head' makes logits, and '.*{name}") as refused:
        CHANGES[name](made())
    assert "torch.no_grad()" in (refused.value.hint or "")
    assert "memfit.tiled_cross_entropy" in (refused.value.hint or "")


INDICES: dict[str, Any] = {
    "last": (..., 0),
    "last of all": (0, 0, 0),
    "some classes": (..., slice(0, 8, 2)),
    "classes in another order": (..., torch.arange(7, -1, -1)),
    "rows and classes": (slice(None), slice(None), slice(1, None)),
    "new last dimension": (..., None),
    "mask of all": torch.ones(ROWS, LENGTH, VOCAB, dtype=torch.bool),
    "unknown": [0, 1],
    "truth": True,
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_of_classes_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="__getitem__"):
        made()[INDICES[name]]


ROW_INDICES: list[Any] = [
    0,
    ...,
    (0, 1),
    (slice(None), -1),
    (..., 2, slice(None)),
    (slice(None), slice(1, None), slice(None)),
    (None, 1),
    (0, ...),
    (slice(None), None),
    torch.tensor([2, 0]),
    (slice(None), torch.tensor([[1, 2]])),
    LABELS > 3,
    (),
]


@pytest.mark.parametrize("index", ROW_INDICES, ids=str)
def test_indices_of_rows_pick_those_rows(index: Any) -> None:
    logits = made()
    head, hidden = logits.call.head, logits.rows.hidden
    picked = logits[index]
    expected = F.linear(hidden, head.weight, head.bias)[index]
    assert picked.shape == expected.shape
    torch.testing.assert_close(F.linear(picked.rows.hidden, head.weight, head.bias), expected)


LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "weighed classes": (
        lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), weight=torch.ones(VOCAB)),
        "weighs their classes",
    ),
    "a loss of each row": (
        lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), reduction="none"),
        "reduction is 'none'",
    ),
    "old words": (
        lambda x: F.cross_entropy(x.flatten(0, 1), LABELS.flatten(), size_average=False),
        "use reduction",
    ),
    "probabilities": (
        lambda x: F.cross_entropy(x[0], torch.full((LENGTH, VOCAB), 1 / VOCAB)),
        "labels",
    ),
    "probabilities of wrong shape": (
        lambda x: F.cross_entropy(x[0], torch.rand(LENGTH)),
        "not torch.int64",
    ),
    "classes in the last of three places": (
        lambda x: F.cross_entropy(x, LABELS),
        "not where cross_entropy wants them",
    ),
    "one row": (lambda x: F.cross_entropy(x[0, 0], LABELS[0, 0]), "wants them"),
    "too few labels": (lambda x: F.cross_entropy(x[0], LABELS[0, 1:]), "one label"),
    "logits as labels": (lambda x: F.cross_entropy(torch.rand(3, 8), x[0, :3]), "cross_entropy"),
    "another loss": (lambda x: F.mse_loss(x, torch.rand(ROWS, LENGTH, VOCAB)), "mse_loss"),
    "by way of nll_loss": (lambda x: F.nll_loss(x[0], LABELS[0]), "nll_loss"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_losses_are_refused(name: str) -> None:
    loss, message = LOSSES[name]
    with pytest.raises(UsageError, match=message) as refused:
        loss(made())
    assert refused.value.hint


def test_a_shape_that_does_not_fit_is_the_models_own_error() -> None:
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        made().view(-1, VOCAB - 1)
