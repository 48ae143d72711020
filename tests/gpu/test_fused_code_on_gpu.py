"""What inductor makes of a plan's graphs on a GPU."""

from __future__ import annotations

import torch
from torch._inductor.utils import fresh_cache, run_and_get_code

from memfit.runtime.compile.read_back import BARRIER, wait_before_reading_back

ROWS, WIDTH, RUNS = 8192, 1280, 20


def normalise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer norm that hands over what its backward reads, as a plan may have it do."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + 1e-5)
    normalised = (x - mean) * scale
    return normalised, scale / WIDTH, (normalised * weight + bias).bfloat16()


def test_a_loop_that_reads_back_what_an_earlier_one_stored_waits_for_it() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    weight, bias = torch.randn(2, WIDTH, device="cuda")
    with fresh_cache(), wait_before_reading_back():
        torch._dynamo.reset()
        compiled = torch.compile(normalise, dynamic=False)
        first, codes = run_and_get_code(compiled, x, weight, bias)
        assert any(BARRIER in code for code in codes)
    for _ in range(RUNS):
        for made, expected in zip(compiled(x, weight, bias), first, strict=True):
            assert torch.equal(made, expected)
    assert torch.allclose(first[2].float(), normalise(x, weight, bias)[2].float(), atol=0.1)
