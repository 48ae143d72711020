"""The full logits never exist, and a tile is as large as it was asked to be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memfit.errors import UsageError
from memfit.measure.allocations import peak_above_start, record
from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy
from memfit.runtime.tiled_loss.tiles import TILE_BYTES, bytes_per_logit, row_stride, rows_per_tile

CPU = torch.device("cpu")
ROWS, VOCAB, WIDTH, TILE = 256, 2000, 16, 16


class _Largest(TorchDispatchMode):
    """Remembers the most elements of a result."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_no_result_is_larger_than_a_tile_or_the_weight(
    heads: SimpleNamespace, autocast: bool, dtype: torch.dtype
) -> None:
    case = heads.case((ROWS,), VOCAB, WIDTH, dtype=dtype)
    with _Largest() as seen, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        heads.numbers(tiled_cross_entropy, case, tile=TILE, label_smoothing=0.1)
    assert seen.elements == max(TILE, WIDTH) * VOCAB


def test_peak_is_the_gradients_and_a_tile(heads: SimpleNamespace) -> None:
    case = heads.case((ROWS,), VOCAB, WIDTH)
    hidden, weight = case.parameters()

    def step() -> None:
        tiled_cross_entropy(hidden, weight, case.labels, tile=TILE).backward()

    def plain_step() -> None:
        heads.plain_cross_entropy(hidden, weight, case.labels).backward()

    step()
    peaks = []
    for work in (step, plain_step):
        hidden.grad = weight.grad = None
        peaks.append(peak_above_start(record(work, CPU)))
    gradients = 4 * (VOCAB * WIDTH + ROWS * WIDTH)
    tile = TILE * VOCAB * bytes_per_logit(torch.float32, compiled=False)
    assert peaks[0] <= gradients + tile + 16 * 2**10
    assert peaks[1] >= 2 * 4 * ROWS * VOCAB


def test_evaluation_takes_a_tile_alone(heads: SimpleNamespace) -> None:
    case = heads.case((ROWS,), VOCAB, WIDTH)

    def evaluate() -> None:
        tiled_cross_entropy(case.hidden, case.weight, case.labels, tile=TILE)

    evaluate()
    tile = TILE * VOCAB * bytes_per_logit(torch.float32, compiled=False)
    assert peak_above_start(record(evaluate, CPU)) <= tile + 16 * 2**10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_tile_fills_its_bytes(dtype: torch.dtype, compiled: bool) -> None:
    rows = rows_per_tile(10**6, 50257, dtype, compiled=compiled)
    taken = rows * 50257 * bytes_per_logit(dtype, compiled)
    assert 0.8 * TILE_BYTES < taken <= TILE_BYTES


def test_a_tile_has_one_row_at_least_and_all_at_most() -> None:
    assert rows_per_tile(100, 50257, torch.float32, tile_bytes=1, compiled=False) == 1
    assert rows_per_tile(100, 10, torch.float32, compiled=False) == 100
    with pytest.raises(UsageError, match="tile_bytes is 0"):
        rows_per_tile(100, 10, torch.float32, tile_bytes=0, compiled=False)


@pytest.mark.parametrize("rows", [1, 100, 2560, 2561, 8184, 8192, 10**5])
def test_tiles_are_about_equal(rows: int) -> None:
    tile = rows_per_tile(rows, 50257, torch.bfloat16, compiled=True)
    most = rows_per_tile(10**9, 50257, torch.bfloat16, compiled=True)
    assert most == 2560 and tile <= most
    tiles = -(-rows // tile)
    assert tiles == -(-rows // most)  # no more than there have to be
    assert tiles * tile - rows < 128 * tiles
    assert tile == rows if tiles == 1 else tile % 128 == 0


def test_rows_begin_at_whole_multiples() -> None:
    assert [row_stride(vocab) for vocab in (1, 64, 50257)] == [64, 64, 50304]


def test_tile_bytes_bound_the_largest_result(heads: SimpleNamespace) -> None:
    case = heads.case((ROWS,), VOCAB, 4)
    with _Largest() as seen:
        heads.numbers(tiled_cross_entropy, case, tile_bytes=10 * 4 * row_stride(VOCAB))
    assert seen.elements == 10 * VOCAB
