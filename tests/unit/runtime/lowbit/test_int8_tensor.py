"""int8 keeps each number within half a scale, and zero exact."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.runtime.lowbit.int8_tensor import quantize

numbers = st.floats(-(2.0**60), 2.0**60, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
rows = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=1, max_size=9)
)
ways = pytest.mark.parametrize(
    "how",
    [
        {"symmetric": True},
        {"symmetric": True, "per_channel": False},
        {"symmetric": False},
        {"symmetric": False, "axis": 1},
        {"symmetric": False, "per_channel": False},
    ],
    ids=lambda how: ", ".join(f"{name}={value}" for name, value in how.items()),
)


@ways
@settings(deadline=None, max_examples=60)
@given(rows)
def test_error_is_at_most_half_a_scale_or_refused(
    how: dict[str, Any], values: list[list[float]]
) -> None:
    weight = torch.tensor(values)
    other = [1 - how.get("axis", 0)]
    try:
        int8 = quantize(weight, **how)
    except UsageError as refusal:
        assert "would become all zero" in refusal.message and not how.get("per_channel", True)
        largest = weight.abs().amax(other)
        assert bool((largest[largest > 0] <= (weight.max() - weight.min()) / 254).any())
        return
    back = int8.dequantize()
    error = (back.double() - weight.double()).abs()
    rounding = 4 * torch.finfo(torch.float32).eps
    assert bool((error <= int8.scale * (0.5 + 256 * rounding)).all())
    assert bool((back[weight == 0] == 0).all())
    assert torch.equal(back.abs().amax(other) > 0, weight.abs().amax(other) > 0)


@ways
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_each_type(how: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 512).to(dtype)
    int8 = quantize(weight, **how)
    back = int8.dequantize()
    assert back.dtype == dtype
    allowed = int8.scale.double() / 2 + weight.double().abs() * torch.finfo(dtype).eps
    assert bool(((back.double() - weight.double()).abs() <= allowed * 1.001).all())
    assert int8.nbytes / weight.nbytes == pytest.approx(1 / weight.element_size(), rel=0.05)


def test_each_option_changes_the_result() -> None:
    weight = torch.rand(8, 16) + torch.arange(8.0)[:, None]
    found = [
        quantize(weight, symmetric=symmetric, **how).dequantize()
        for symmetric in (True, False)
        for how in ({"axis": 0}, {"axis": 1}, {"per_channel": False})
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


def test_numbers_of_one_sign_are_finer_when_asymmetric() -> None:
    weight = torch.rand(4, 1000)
    errors = [
        float((quantize(weight, symmetric=s).dequantize() - weight).abs().max())
        for s in (True, False)
    ]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_rows(symmetric: bool, per_channel: bool) -> None:
    int8 = quantize(torch.randn(10, 6), symmetric=symmetric, per_channel=per_channel)
    for indices in (torch.tensor([[3, 3], [9, 0]]), torch.tensor(4)):
        assert torch.equal(int8.rows(indices), int8.dequantize()[indices])
    with pytest.raises(IndexError):
        int8.rows(torch.tensor([-1]))


def test_channels_of_zeros_stay_and_are_counted() -> None:
    weight = torch.randn(5, 7)
    weight[2] = 0
    for symmetric, per_channel in product((True, False), repeat=2):
        int8 = quantize(weight, symmetric=symmetric, per_channel=per_channel)
        assert int8.num_zero_channels == 1 and not int8.dequantize()[2].any()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_one_scale_made_the_channels_beside_a_large_number_zero(symmetric: bool, axis: int) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Linear(64, 64).weight.detach() * 0.01
    weight[5, 7] = 100.0
    weight[9 if axis == 0 else slice(None), slice(None) if axis == 0 else 9] = 0
    with pytest.raises(UsageError, match="62 of 64 channels would become all zero") as refusal:
        quantize(weight, symmetric=symmetric, axis=axis, per_channel=False)
    assert "scale per channel" in str(refusal.value.hint)
    each = quantize(weight, symmetric=symmetric, axis=axis)
    assert each.num_zero_channels == 1, "the one that is zero"


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.tensor([[1.0, math.nan]]), "NaN"),
        (torch.tensor([[1.0, math.inf]]), "infinities"),
        (torch.tensor([[1e-40, 0.0]]), "too small"),
        (torch.tensor([[1, 2]]), "no int8 form"),
        (torch.empty(0, 3), "no int8 form"),
    ],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_refusals(weight: Any, words: str, symmetric: bool) -> None:
    with pytest.raises(UsageError, match=words):
        quantize(weight, symmetric=symmetric)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_largest_numbers_of_a_type_stay_finite(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    weight = torch.tensor([[most, -most], [most, 0], [0, -most]], dtype=dtype)
    int8 = quantize(weight, symmetric=False)
    for back in (int8.dequantize(), int8.rows(torch.arange(3)), int8.dequantize(torch.float64)):
        assert bool(back.isfinite().all())
    error = (int8.dequantize().double() / most - weight.double() / most).abs()
    assert bool((error <= 2 / 255 * 0.51).all()), "half a scale"
