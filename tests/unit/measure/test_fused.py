"""What fused code moves: what it writes for others, and what it reads in every pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from memfit.measure import fused
from memfit.measure.fused import FUSION_FACTOR, bytes_fused, bytes_read_more, is_elementwise

aten = torch.ops.aten
SIZE = 64 * 64 * 4
Half = Callable[..., fx.GraphModule]
Halves = tuple[fx.GraphModule, fx.GraphModule]


def test_what_a_product_of_the_backward_reads_has_to_be_written(half: Half) -> None:
    """A weight that is cast and an activation, both made again: that is read anyway."""
    forward = half(
        [
            ("cast", aten.sin.default, (0,)),
            ("turned", aten.t.default, (2,)),
            ("product", aten.mm.default, (1, 3)),
            ("active", aten.sin.default, (4,)),
            ("scaled", aten.sin.default, (5,)),
        ],
        ["weight", "x"],
    )
    backward = half(
        [
            ("turned", aten.t.default, (0,)),
            ("to_x", aten.mm.default, (1, 3)),  # reads the weight, cast, as a view
            ("active", aten.sin.default, (2,)),
            ("to_product", aten.mul.Tensor, (4, 2)),
            ("to_weight", aten.mm.default, (5, 6)),
        ],
        ["cast", "gradient", "product"],
    )
    moved = bytes_fused(forward, backward)
    assert moved["cast"] == 2 * SIZE  # read and written in full
    assert moved["active"] == FUSION_FACTOR * SIZE + SIZE  # what it reads is read anyway
    assert moved["scaled"] == moved["to_product"] * 2 / 3 == FUSION_FACTOR * 2 * SIZE
    assert moved["turned"] == 0


def test_a_sum_of_the_backward_reads_what_is_fused_into_it(half: Half) -> None:
    forward = half([("active", aten.sin.default, (0,))], ["x"])
    backward = half([("total", aten.sum.dim_IntList, (0,))], ["active"])
    assert bytes_fused(forward, backward) == {"active": FUSION_FACTOR * 2 * 64 * 64 * 4}


def test_elementwise_means_pointwise_view_or_cast() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")

    def elementwise(target: object) -> bool:
        return is_elementwise(graph.create_node("call_function", target, (x,)))

    assert all(map(elementwise, (aten.tanh.default, aten.view.default, aten._to_copy.default)))
    assert not any(map(elementwise, (aten.mm.default, aten.sum.default, aten.var_mean.correction)))
    assert not is_elementwise(x)


@pytest.fixture
def normalised(half: Half) -> Halves:
    """A mask of what is returned, and what a product reads and fused code as a mask, too."""
    forward = half(
        [
            ("product", aten.mm.default, (0, 0)),
            ("active", aten.relu.default, (1,)),
            ("other", aten.mm.default, (2, 0)),
            ("returned", aten.relu.default, (3,)),
            ("mask", aten.le.Scalar, (4,)),
        ],
        ["x"],
        outputs=(4, 1, 2, 5),
    )
    forward.graph.find_nodes(op="call_function", target=aten.le.Scalar)[0].meta["val"] = (
        torch.empty(64, 64, dtype=torch.bool, device="meta")
    )
    backward = half(
        [
            ("masked", aten.mul.Tensor, (0, 1)),
            ("total", aten.sum.default, (4,)),
            ("centred", aten.sub.Tensor, (4, 5)),  # after the sum: a second pass
            ("to_active", aten.mm.default, (6, 2)),
            ("masked_again", aten.mul.Tensor, (7, 2)),
            ("to_product", aten.mul.Tensor, (8, 3)),
        ],
        ["gradient", "mask", "active", "product"],
    )
    backward.graph.find_nodes(op="call_function", target=aten.sum.default)[0].meta["val"] = (
        torch.empty((), device="meta")
    )
    return forward, backward


def test_a_mask_that_is_made_again_is_made_from_more_bytes_in_every_pass(
    normalised: Halves, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Over few numbers the sum and what reads it are one loop; the forward writes no mask.
    assert bytes_read_more(*normalised)["mask"] == SIZE - SIZE // 4 - SIZE // 4
    monkeypatch.setattr(fused, "_SHORT", 64 * 64 - 1)
    assert bytes_read_more(*normalised)["mask"] == 2 * (SIZE - SIZE // 4) - SIZE // 4


def test_what_is_written_for_a_product_need_not_be_read_where_its_source_is(
    normalised: Halves,
) -> None:
    assert bytes_read_more(*normalised)["active"] == -SIZE


def test_products_and_what_fused_code_does_not_read_count_nothing(normalised: Halves) -> None:
    assert bytes_read_more(*normalised).keys() == {"mask", "active"}
