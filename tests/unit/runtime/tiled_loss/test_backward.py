"""What backward brings, and who asks for gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy

close = torch.testing.assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.0, 1 / 3, 2.0**16])
def test_the_incoming_gradient_scales(
    heads: SimpleNamespace, factor: float, dtype: torch.dtype
) -> None:
    case = heads.case(bias=True, dtype=dtype)
    expected = heads.numbers(heads.plain_cross_entropy, case, factor)
    actual = heads.numbers(tiled_cross_entropy, case, factor, tile=4)
    step = torch.finfo(dtype).eps
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, theirs, rtol=2 * step, atol=4 * step * float(theirs.abs().max()))


@pytest.mark.parametrize("needy", ["hidden", "weight", "bias"])
def test_only_those_who_ask_get_a_gradient(heads: SimpleNamespace, needy: str) -> None:
    case = heads.case(bias=True)
    gradients = []
    for loss in (heads.plain_cross_entropy, tiled_cross_entropy):
        leaves = dict(zip(("hidden", "weight", "bias"), case.parameters(), strict=True))
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == needy)
        loss(leaves["hidden"], leaves["weight"], case.labels, bias=leaves["bias"]).backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
    assert [n for n, g in gradients[1].items() if g is not None] == [needy]
    close(gradients[1][needy], gradients[0][needy])


def test_without_gradients_there_is_a_loss_alone(heads: SimpleNamespace) -> None:
    case = heads.case(bias=True)
    hidden, weight, bias = case.parameters()
    expected = heads.plain_cross_entropy(hidden, weight, case.labels, bias=bias).detach()
    with torch.no_grad():
        close(tiled_cross_entropy(hidden, weight, case.labels, bias=bias, tile=4), expected)
    with torch.inference_mode():
        inside = tiled_cross_entropy(hidden, weight, case.labels, bias=bias, tile=4)
    assert not inside.requires_grad
    close(inside.clone(), expected)
    frozen = tiled_cross_entropy(case.hidden, case.weight, case.labels, bias=case.bias, tile=4)
    assert frozen.grad_fn is None
    close(frozen, expected)


def test_a_kept_graph_gives_the_same_gradients_again(heads: SimpleNamespace) -> None:
    case = heads.case()
    hidden, weight = case.parameters()
    loss = 3 * tiled_cross_entropy(hidden, weight, case.labels, tile=4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    last = torch.autograd.grad(loss, (hidden, weight))
    close(second, first, rtol=0, atol=0)
    close(last, first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_refused(heads: SimpleNamespace) -> None:
    case = heads.case()
    hidden, weight = case.parameters()
    loss = tiled_cross_entropy(hidden, weight, case.labels)
    with pytest.raises(UsageError, match="only once"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_gradients_accumulate(heads: SimpleNamespace) -> None:
    batches = [heads.case(seed=seed) for seed in range(3)]
    summed = []
    for loss in (heads.plain_cross_entropy, tiled_cross_entropy):
        weight = batches[0].weight.clone().requires_grad_()
        for batch in batches:
            (loss(batch.hidden, weight, batch.labels) / len(batches)).backward()
        summed.append(weight.grad)
    close(summed[1], summed[0])


def test_accumulated_parts_with_num_items_are_one_batch(heads: SimpleNamespace) -> None:
    case = heads.case((6, 7))
    items = int((case.labels != heads.IGNORED).sum())
    whole = heads.numbers(heads.plain_cross_entropy, case)
    hidden, weight = case.parameters()
    for rows, labels in zip(hidden.split(2), case.labels.split(2), strict=True):
        tiled_cross_entropy(rows, weight, labels, num_items=items, tile=4).backward()
    close([hidden.grad, weight.grad], whole[1:])


def test_a_tied_weight_gets_both_gradients(heads: SimpleNamespace) -> None:
    case = heads.case()
    inputs = case.labels.clamp(min=0)
    gradients = []
    for loss in (heads.plain_cross_entropy, tiled_cross_entropy):
        weight = case.weight.clone().requires_grad_()
        hidden = torch.tanh(F.embedding(inputs, weight))
        loss(hidden, weight, case.labels).backward()
        gradients.append(weight.grad)
    close(gradients[1], gradients[0])


def test_the_weight_gradient_is_handed_over_without_a_copy(heads: SimpleNamespace) -> None:
    case = heads.case()
    hidden, weight = case.parameters()
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = tiled_cross_entropy(hidden, weight, case.labels, tile=4)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() in seen


def test_gradients_too_small_for_float16_survive_with_a_scaler(heads: SimpleNamespace) -> None:
    """1e-8 is zero in float16; a scaler's 2**16 makes it a number."""
    case = heads.case((4, 16), 64, 32)
    options: dict[str, Any] = {"num_items": 10**6, "tile": 10}
    exact = heads.numbers(tiled_cross_entropy, case.to(torch.float64), **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    hidden, weight = case.parameters()
    optimizer = torch.optim.SGD([hidden, weight], lr=1.0)
    with torch.autocast("cpu", torch.float16):
        loss = tiled_cross_entropy(hidden, weight, case.labels, **options)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for leaf, truth in zip((hidden, weight), exact[1:], strict=True):
        assert leaf.grad is not None
        assert (leaf.grad.double() - truth).abs().max() <= 5e-3 * truth.abs().max()


def test_a_scaler_sees_overflow(heads: SimpleNamespace) -> None:
    case = heads.case(dtype=torch.float16)
    hidden, weight = case.parameters()
    loss = tiled_cross_entropy(hidden, weight, case.labels, reduction="sum")
    (loss * 2.0**20).backward()
    assert weight.grad is not None
    assert weight.grad.isinf().any()
