"""The tiled loss and its gradients are those of the full logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import UsageError
from memfit.runtime.tiled_loss import one_pass
from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy

HALVES = [torch.bfloat16, torch.float16]
CHOICES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.2},
    "smoothed sum": {"label_smoothing": 1.0, "reduction": "sum"},
    "another ignored label": {"ignore_index": 28},
}
close = torch.testing.assert_close


def error(actual: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    """The largest error of each tensor against its largest element."""
    pairs = zip(actual, exact, strict=True)
    return [float((a.double() - e).abs().max() / e.abs().max()) for a, e in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tile", [1, 4, 7, 21, 100])
@pytest.mark.parametrize("choice", CHOICES)
def test_loss_and_gradients_are_those_of_the_full_logits(
    heads: SimpleNamespace, choice: str, tile: int, bias: bool, dtype: torch.dtype
) -> None:
    case, options = heads.case(bias=bias, dtype=dtype), CHOICES[choice]
    if "ignore_index" in options:
        case.labels[case.labels == heads.IGNORED] = 0
    expected = heads.numbers(heads.plain_cross_entropy, case, **options)
    close(heads.numbers(tiled_cross_entropy, case, tile=tile, **options), expected)


@pytest.mark.parametrize("vocab", [5, 8, 29])
@pytest.mark.parametrize("bias", [False, True])
def test_odd_columns_may_be_computed_apart(
    heads: SimpleNamespace, bias: bool, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are on CUDA, whose matrix products are slow on odd sizes."""
    monkeypatch.setattr(one_pass, "_odd_columns", lambda weight: len(weight) % 8)
    case = heads.case(vocab=vocab, bias=bias)
    expected = heads.numbers(heads.plain_cross_entropy, case)
    close(heads.numbers(tiled_cross_entropy, case, tile=4), expected)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 12),
    vocab=st.integers(1, 40),
    tile=st.integers(1, 14),
    ignored=st.sampled_from([0.0, 0.5, 0.95]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_any_sizes_and_magnitudes(
    heads: SimpleNamespace,
    rows: int,
    vocab: int,
    tile: int,
    ignored: float,
    smoothing: float,
    scale: float,
    seed: int,
) -> None:
    double = torch.float64  # large weights make large what float32 rounds away
    case = heads.case((rows,), vocab, 5, ignored=ignored, bias=True, seed=seed, dtype=double)
    case.weight.mul_(scale)
    expected = heads.numbers(heads.plain_cross_entropy, case, label_smoothing=smoothing)
    actual = heads.numbers(tiled_cross_entropy, case, label_smoothing=smoothing, tile=tile)
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, theirs, rtol=1e-9, atol=1e-9 * scale)


@pytest.mark.parametrize("tile", [3, 21])
def test_gradcheck_in_double(heads: SimpleNamespace, tile: int) -> None:
    case = heads.case(bias=True, dtype=torch.float64)

    def loss(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return tiled_cross_entropy(
            hidden, weight, case.labels, bias=bias, label_smoothing=0.1, tile=tile
        )

    assert torch.autograd.gradcheck(loss, case.parameters())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("choice", ["mean", "smoothing"])
def test_half_precision_is_as_near_the_truth_as_the_full_logits(
    heads: SimpleNamespace, choice: str, dtype: torch.dtype
) -> None:
    case = heads.case((6, 16), 300, 32, bias=True, dtype=dtype)
    exact = heads.numbers(heads.plain_cross_entropy, case.to(torch.float64), **CHOICES[choice])
    plain = heads.numbers(heads.plain_cross_entropy, case, **CHOICES[choice])
    tiled = heads.numbers(tiled_cross_entropy, case, tile=20, **CHOICES[choice])
    assert [t.dtype for t in tiled] == [torch.float32, dtype, dtype, dtype]
    for ours, theirs in zip(error(tiled, exact), error(plain, exact), strict=True):
        assert ours <= 1.5 * theirs + 1e-5


def test_many_tiles_lose_nothing_of_a_half_precision_weight_gradient(
    heads: SimpleNamespace,
) -> None:
    case = heads.case((512,), 40, 8, dtype=torch.bfloat16)
    exact = heads.numbers(heads.plain_cross_entropy, case.to(torch.float64))
    whole = heads.numbers(tiled_cross_entropy, case)
    small = heads.numbers(tiled_cross_entropy, case, tile=2)
    assert error(small, exact)[2] <= 1.2 * error(whole, exact)[2]


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_makes_half_logits_from_float_weights(
    heads: SimpleNamespace, dtype: torch.dtype
) -> None:
    case = heads.case((6, 16), 300, 32, bias=True)
    exact = heads.numbers(heads.plain_cross_entropy, case.to(torch.float64))
    with torch.autocast("cpu", dtype):
        plain = heads.numbers(heads.plain_cross_entropy, case)
        tiled = heads.numbers(tiled_cross_entropy, case, tile=20)
    close(tiled[0], plain[0], rtol=1e-6, atol=1e-6)
    assert {t.dtype for t in tiled} == {torch.float32}
    for ours, theirs in zip(error(tiled, exact), error(plain, exact), strict=True):
        assert ours <= 1.5 * theirs + 1e-5


def test_autocast_leaves_doubles_alone(heads: SimpleNamespace) -> None:
    case = heads.case(dtype=torch.float64)
    expected = heads.numbers(heads.plain_cross_entropy, case)
    with torch.autocast("cpu", torch.bfloat16):
        close(heads.numbers(tiled_cross_entropy, case, tile=4), expected)


def test_shifted_labels_predict_the_next_position(heads: SimpleNamespace) -> None:
    case = heads.case((3, 7))

    def cut(
        hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: Any
    ) -> Any:
        return heads.plain_cross_entropy(hidden[:, :-1], weight, labels[:, 1:], **options)

    expected = heads.numbers(cut, case)
    close(heads.numbers(tiled_cross_entropy, case, shift=True, tile=4), expected)


def test_everything_ignored_is_nan_with_no_gradient_as_in_torch(heads: SimpleNamespace) -> None:
    case = heads.case()
    case.labels.fill_(heads.IGNORED)
    expected = heads.numbers(heads.plain_cross_entropy, case)
    actual = heads.numbers(tiled_cross_entropy, case, tile=4)
    assert actual[0].isnan()
    close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_rows(heads: SimpleNamespace, reduction: str) -> None:
    case = heads.case((0,))
    expected = heads.numbers(heads.plain_cross_entropy, case, reduction=reduction)
    actual = heads.numbers(tiled_cross_entropy, case, reduction=reduction)
    close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("items", [5, torch.tensor(5)])
def test_num_items_divides_the_sum(heads: SimpleNamespace, items: int | torch.Tensor) -> None:
    case = heads.case()
    expected = heads.numbers(
        lambda *a, **o: heads.plain_cross_entropy(*a, reduction="sum", **o) / 5, case
    )
    close(heads.numbers(tiled_cross_entropy, case, num_items=items, tile=4), expected)


def test_hidden_may_lie_anyhow_in_memory(heads: SimpleNamespace) -> None:
    case = heads.case((4, 6))
    turned = heads.Case(
        case.hidden.transpose(0, 1), case.weight.t().contiguous().t(), case.labels.t()
    )
    expected = heads.numbers(heads.plain_cross_entropy, turned)
    close(heads.numbers(tiled_cross_entropy, turned, tile=5), expected)


def test_certain_predictions_neither_overflow_nor_vanish(heads: SimpleNamespace) -> None:
    case = heads.case((5,), 9, 4)
    case.weight.mul_(1e4)
    expected = heads.numbers(heads.plain_cross_entropy, case)
    actual = heads.numbers(tiled_cross_entropy, case, tile=2)
    assert all(t.isfinite().all() for t in actual)
    close(actual, expected)


@pytest.mark.slow
def test_compiled_tiles_are_compiled_once(heads: SimpleNamespace) -> None:
    from torch._dynamo.utils import counters  # loads dynamo, which takes seconds

    case = heads.case((22,), 64, 16, bias=True, dtype=torch.bfloat16)
    expected = heads.numbers(tiled_cross_entropy, case, tile=8, compiled=False)
    before = counters["stats"]["unique_graphs"]
    for _ in range(2):  # 22 rows: the last tile is not a whole one
        close(heads.numbers(tiled_cross_entropy, case, tile=8, compiled=True), expected)
    assert counters["stats"]["unique_graphs"] == before + 1
    loss = tiled_cross_entropy(
        case.hidden, case.weight, case.labels, bias=case.bias, tile=8, compiled=True
    )
    close(loss, expected[0])
    assert counters["stats"]["unique_graphs"] == before + 2


@pytest.mark.parametrize("wrong", [29, -3, 2**40])
@pytest.mark.parametrize("trains", [True, False])
def test_a_label_that_is_no_class_is_refused(wrong: int, trains: bool) -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=trains), torch.randn(29, 4)
    labels = torch.tensor([0, 28, wrong, -100, 2])
    with pytest.raises(UsageError, match=f"1 of 5 labels .* 29 rows: the first is {wrong}") as said:
        tiled_cross_entropy(hidden, weight, labels)
    assert "0 to 28, or -100" in (said.value.hint or "")


def test_another_error_is_not_taken_for_a_wrong_label(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("out of something")

    monkeypatch.setattr("memfit.runtime.tiled_loss.cross_entropy.tiled_sum", fail)
    with pytest.raises(RuntimeError, match="out of something"):
        tiled_cross_entropy(torch.randn(2, 4), torch.randn(3, 4), torch.tensor([0, 2]))


@pytest.mark.parametrize("name", ["hidden", "weight", "labels", "bias"])
def test_what_is_no_tensor_is_refused(name: str) -> None:
    given = {"hidden": torch.randn(1, 4), "weight": torch.randn(3, 4), "labels": torch.tensor([0])}
    with pytest.raises(UsageError, match=f"{name} is a list, not a tensor") as said:
        tiled_cross_entropy(**{**given, name: [0]})  # type: ignore[arg-type]
    assert said.value.hint
