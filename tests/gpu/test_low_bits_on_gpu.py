"""Optimizer state in few bits on a GPU, where its arithmetic is compiled."""

from __future__ import annotations

import math

import pytest
import torch

from memfit.measure.step import run_step, untouched
from memfit.planning.techniques import ROUNDED_STATE
from memfit.runtime.lowbit import pieces as in_pieces
from memfit.runtime.lowbit.bf16 import to_bf16_
from memfit.runtime.lowbit.log_codes import (
    BLOCK,
    RELATIVE_ERROR,
    SIGNED,
    UNSIGNED,
    Codebook,
    decode,
    encode_,
    num_blocks,
)
from memfit.runtime.lowbit.packed import Bits
from memfit.runtime.lowbit.pieces import PIECE, pieces
from memfit.runtime.lowbit.state import LowBitState
from memfit.runtime.setup import Setup
from memfit.targets import resolve_target

SIZES = {"n_layer": "4", "n_embd": "256", "n_head": "4", "vocab_size": "20000"}
MODULES = tuple(f"transformer.h.{n}" for n in range(4))
MIB = 2**20


@pytest.fixture(autouse=True)
def same_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or not, the same numbers are drawn."""
    monkeypatch.setattr(in_pieces, "COMPILED_PIECE", PIECE)


def round_trip(flat: torch.Tensor, book: Codebook, compiled: bool) -> torch.Tensor:
    codes = torch.empty_like(flat, dtype=torch.uint8)
    largest = flat.new_empty(num_blocks(flat.numel()))
    with pieces(compiled) as how:
        encode_(flat, codes, largest, book, torch.Generator("cuda").manual_seed(0), how)
        return decode(codes, largest, book, how)


@pytest.mark.parametrize("book", [SIGNED, UNSIGNED])
def test_compiled_codes_are_those_of_the_formula(book: Codebook) -> None:
    flat = torch.randn(2 * PIECE + 5 * BLOCK + 77, device="cuda")
    flat = flat if book.zero else flat.abs()
    flat[3] = 0.0
    kept, plain = round_trip(flat, book, True), round_trip(flat, book, False)
    assert float((kept != plain).float().mean()) < 1e-3  # logarithms differ in the last place
    smallest = float(flat.abs().max()) * book.smallest
    allowed = (flat.abs() * RELATIVE_ERROR * 1.0001).clamp(min=smallest)
    assert bool(((kept - flat).abs() <= allowed).all()) and float(kept[3]) == 0.0
    flat[0], flat[BLOCK] = math.nan, math.inf
    kept = round_trip(flat, book, True)
    assert bool(kept[: 2 * BLOCK].isnan().all() and kept[2 * BLOCK :].isfinite().all())


def test_compiled_bf16_is_the_same() -> None:
    flat = torch.randn(PIECE + 77, device="cuda")
    flat[:3] = torch.tensor([math.nan, math.inf, 0.0])
    found = []
    for compiled in (True, False):
        result = torch.empty_like(flat, dtype=torch.bfloat16)
        with pieces(compiled) as how:
            to_bf16_(flat, result, torch.Generator("cuda").manual_seed(0), how)
        found.append(result)
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ROUNDED_STATE)
@pytest.mark.parametrize("others", [(), ("step_in_backward",)])
def test_training_is_near(name: str, others: tuple[str, ...]) -> None:
    workload = resolve_target(
        "transformers:gpt2", device="cuda", batch=8, seq=256, overrides=SIZES, optimizer="adamw"
    )
    workload.model.eval()  # no dropout: attention draws no numbers
    found = []
    for names in ((), (*others, name)):
        with untouched(workload), Setup(names, workload.model, workload.optimizer, MODULES):
            for _ in range(3):
                run_step(workload)
            found.append([p.detach().clone() for p in workload.model.parameters()])
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bits", ["8bit", "bf16_sr"])
def test_memory_is_what_the_footprint_says(bits: Bits, compiled: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(4096, 1024, device="cuda"))  # four pieces
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    in_full = torch.cuda.memory_allocated()
    with LowBitState(optimizer, bits=bits, compiled=compiled) as low:
        optimizer.step()  # compiles
        said = low.footprint()
        before = torch.cuda.memory_allocated()
        assert abs(in_full - before - said.removed_bytes) <= MIB
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        held = torch.cuda.max_memory_allocated() - before
    assert 0.8 * said.working_bytes < held <= said.working_bytes + MIB
