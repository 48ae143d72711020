"""What cannot be is refused, with what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"weight": torch.zeros(29, 9)}, r"\(3, 7, 8\) does not meet .* \(29, 9\)"),
    "weight of one dimension": ({"weight": torch.zeros(29)}, "does not meet"),
    "labels cut": ({"labels": torch.zeros(3, 6, dtype=torch.int64)}, r"\(3, 6\).*one label"),
    "probabilities": ({"labels": torch.zeros(3, 7)}, "labels are torch.float32"),
    "integer weight": ({"weight": torch.zeros(29, 8, dtype=torch.int8)}, "weight is torch.int8"),
    "bias": ({"bias": torch.zeros(28)}, r"\(28,\) for 29 classes"),
    "dtypes": ({"weight": torch.zeros(29, 8).bfloat16()}, "hidden torch.float32, weight torch.bf"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    "no reduction": ({"reduction": "none"}, "reduction is 'none'"),
    "two divisors": ({"reduction": "sum", "num_items": 3}, "num_items"),
    "two tiles": ({"tile": 3, "tile_bytes": 3}, "both given"),
    "no items": ({"num_items": 0}, "num_items is 0"),
    "fewer than no items": ({"num_items": -3}, "num_items is -3"),
    "items in words": ({"num_items": "x"}, "num_items is 'x'"),
    "part of a row": ({"tile": 2.5}, "tile is 2.5 rows"),
    "short labels": (
        {"labels": torch.zeros(3, 7, dtype=torch.int32)},
        "int32, not torch.int64, as",
    ),
    "no tile": ({"tile": 0}, "tile is 0 rows"),
    "no bytes": ({"tile_bytes": 0}, "tile_bytes is 0"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_refused_with_a_hint(heads: SimpleNamespace, wrong: str) -> None:
    case = heads.case()
    change, message = WRONG[wrong]
    given = {"hidden": case.hidden, "weight": case.weight, "labels": case.labels} | change
    with pytest.raises(UsageError, match=message) as refused:
        tiled_cross_entropy(**given)
    assert refused.value.hint


@pytest.mark.parametrize("label", [29, -1])
def test_labels_out_of_bounds_are_an_error(heads: SimpleNamespace, label: int) -> None:
    case = heads.case()
    case.labels[1, 1] = label
    with pytest.raises(UsageError, match=f"no class of a weight of 29 rows: the first is {label}"):
        tiled_cross_entropy(case.hidden, case.weight, case.labels, tile=4)
