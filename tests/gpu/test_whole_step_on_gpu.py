"""The rest of the step on a GPU: loss in tiles, stepping in backward, state on the host."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.ir.profile import Profile
from memfit.measure.memory import measure_peak, memory_cap
from memfit.measure.step import run_step, untouched
from memfit.planning.make_plan import minimum_feasible, page_bytes
from memfit.planning.techniques import APPROXIMATE, STEP
from memfit.runtime.apply import Applied
from memfit.runtime.setup import Setup
from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy
from memfit.targets import resolve_target
from memfit.verify.budget import check_budget
from memfit.verify.parameters import check_parameters
from memfit.workload import Workload

SIZES = {"n_layer": "4", "n_embd": "256", "n_head": "4", "vocab_size": "20000"}
MODULES = tuple(f"transformer.h.{n}" for n in range(4))
EXACT = [name for name in STEP if name not in (*APPROXIMATE, "step_on_host")]
SUBSETS = list(chain.from_iterable(combinations(EXACT, n) for n in range(1, len(EXACT) + 1)))
ROWS, WIDTH, VOCAB = 2048, 256, 20001
MIB = 2**20


def gpt2(dtype: str = "bf16") -> Workload:
    return resolve_target(
        "transformers:gpt2",
        device="cuda",
        batch=8,
        seq=256,
        dtype=dtype,
        overrides=SIZES,
        optimizer="adamw",
    )


def least_by_recompute(profile: Profile) -> int:
    """What the leanest plan holds, without the page that other processes may need more."""
    return minimum_feasible(profile)[0] - page_bytes(profile)


def state_bytes(workload: Workload) -> int:
    """AdamW's state: two numbers of four bytes for each parameter."""
    return 8 * sum(p.numel() for p in workload.model.parameters())


def head(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, device="cuda", dtype=dtype).mul_(0.05).requires_grad_()
    labels = torch.randint(VOCAB, (ROWS,), device="cuda")
    labels[::7] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_give_the_loss_and_its_gradients(dtype: torch.dtype, compiled: bool) -> None:
    hidden, weight, labels = head(dtype)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = functional.cross_entropy(exact[0] @ exact[1].T, labels)
    expected.backward()
    loss = tiled_cross_entropy(hidden, weight, labels, tile=300, compiled=compiled)
    loss.backward()
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    assert abs(loss.item() / expected.item() - 1) < tolerance
    for made, reference in zip((hidden, weight), exact, strict=True):
        assert made.grad is not None and reference.grad is not None
        error = (made.grad.double() - reference.grad).norm() / reference.grad.norm()
        assert error < tolerance


def test_full_logits_never_exist() -> None:
    hidden, weight, labels = head(torch.bfloat16)
    tiled_cross_entropy(hidden, weight, labels, tile_bytes=8 * MIB).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tiled_cross_entropy(hidden, weight, labels, tile_bytes=8 * MIB).backward()
    logits = 4 * ROWS * VOCAB
    assert torch.cuda.max_memory_allocated() - before < 0.6 * logits


@pytest.mark.parametrize("names", SUBSETS, ids=",".join)
def test_training_goes_on_as_without_it(names: tuple[str, ...]) -> None:
    workload = gpt2("fp32")

    def trained(setup: Setup | None) -> list[torch.Tensor]:
        with untouched(workload):
            if setup is not None:
                setup.install()
            for _ in range(3):
                run_step(workload)
            if setup is not None:
                setup.undo()
            return [p.detach().clone() for p in workload.model.parameters()]

    workload.model.eval()  # no dropout: attention draws no numbers
    expected, again = trained(None), trained(None)
    itself = max(_apart(a, b) for a, b in zip(expected, again, strict=True))
    # Of the state on the host a block's stays: 0.8 million parameters, two numbers each.
    kept = 7 * MIB
    actual = trained(Setup(names, workload.model, workload.optimizer, MODULES, 4 * MIB, kept))
    apart = max(_apart(a, b) for a, b in zip(expected, actual, strict=True))
    assert apart <= (5e-3 if "tiled_loss" in names else 2 * itself)


class _Hotter:
    """Something at work that steps by another learning rate."""

    def __init__(self, workload: Workload, factor: float) -> None:
        self.group, self.factor = workload.optimizer.param_groups[0], factor

    def __enter__(self) -> None:
        self.group["lr"] *= self.factor

    def __exit__(self, *_: object) -> None:
        self.group["lr"] /= self.factor


@pytest.mark.parametrize(("factor", "agree"), [(1.0, True), (0.5, False), (2.0, False)])
def test_another_optimizer_is_told_from_the_noise_of_the_device(factor: float, agree: bool) -> None:
    workload = gpt2()
    planned, plain = _Hotter(workload, factor), _Hotter(workload, 1.0)
    found = check_parameters(workload, planned, plain)  # type: ignore[arg-type]
    print(found.note)
    assert (found.agree or found.bitwise_vs_unplanned) == agree, found.note


@pytest.mark.parametrize("others", [(), ("step_in_backward",)])
def test_the_cpu_steps_as_the_device_does(others: tuple[str, ...]) -> None:
    workload = gpt2("fp32")
    workload.model.eval()
    setup = Setup((*others, "step_on_host"), workload.model, workload.optimizer, MODULES)
    runs = []
    for at_work in (nullcontext(), nullcontext(), setup):
        with untouched(workload), at_work:
            run_step(workload)
            runs.append([p.detach().clone() for p in workload.model.parameters()])
    itself, apart = (max(map(_apart, runs[0], other)) for other in runs[1:])
    assert apart <= max(1e-5, 2 * itself)


def test_a_fit_by_the_cpus_steps_holds_and_agrees() -> None:
    workload = gpt2()
    profile = memfit.profile(workload)
    # Some pages of 20 MiB from what holds without it, and from what it holds at least.
    budget = least_by_recompute(profile) - state_bytes(workload) // 2
    with memfit.fit_workload(
        workload, budget, profiled=profile, allow="recompute,step_on_host", steps=3
    ) as fitted:
        assert fitted.plan.setup == ("step_on_host",)
        result = fitted.result
        assert result.measured.peak_reserved_bytes <= budget and result.measured.retries == 0
        assert result.numerics.agree or not result.numerics.repeatable, result.numerics
        assert torch.isfinite(fitted.step(workload.batch))


def test_state_and_gradients_leave_the_device() -> None:
    workload = gpt2()
    with untouched(workload):
        run_step(workload)
        plain = measure_peak(workload, lambda: run_step(workload)).bytes
    setup = Setup(EXACT, workload.model, workload.optimizer, MODULES, 8 * MIB)
    with untouched(workload), setup:
        run_step(workload)
        run_step(workload)
        peak = measure_peak(workload, lambda: run_step(workload)).bytes
    assert peak < plain - state_bytes(workload) // 2


def test_some_of_the_state_stays_on_the_device() -> None:
    workload = gpt2()
    between_steps = []
    for kept in (0, 10 * MIB, 2**40):
        names = ("step_in_backward", "optimizer_offload")
        setup = Setup(names, workload.model, workload.optimizer, MODULES, None, kept)
        with untouched(workload), setup:
            run_step(workload)
            run_step(workload)
            between_steps.append(torch.cuda.memory_allocated())
    none, some, everything = between_steps
    assert 4 * MIB < some - none <= 11 * MIB and everything > some + 40 * MIB


def test_a_budget_that_recompute_cannot_hold_is_held_by_other_exact_techniques() -> None:
    workload = gpt2()
    profile = memfit.profile(workload)
    budget = least_by_recompute(profile) - state_bytes(workload) // 2
    with memfit.fit_workload(workload, budget, profiled=profile, steps=3) as fitted:
        result = fitted.result
        assert {*result.decisions.techniques} - {"recompute"}
        assert "tiled_loss" not in fitted.plan.setup
        assert result.measured.peak_reserved_bytes <= budget and result.measured.retries == 0
        assert torch.isfinite(fitted.step(workload.batch))


@pytest.mark.parametrize("executor", ["module", "graph", "inductor"])
def test_a_budget_with_everything_holds_under_the_cap(executor: str) -> None:
    workload = gpt2()
    allow = ",".join(f"+{name}" for name in EXACT)
    # Recompute alone needs more; all together some 60 %, give or take a page of 20 MiB.
    with memfit.fit_workload(workload, "70%", allow=allow, executor=executor, steps=3) as fitted:
        result = fitted.result
        assert "tiled_loss" in fitted.plan.setup, result.notes
        assert result.measured.peak_reserved_bytes <= result.budget_bytes
        assert result.measured.retries == 0
        assert abs(result.peak_error) < 0.03
        assert result.numerics.agree or not result.numerics.repeatable, result.numerics
        with memory_cap(workload.device, result.budget_bytes):
            for _ in range(3):
                assert torch.isfinite(fitted.step(workload.batch))


class _Hungry(torch.autograd.Function):
    """Passes a tensor through; its backward takes 2 GiB for a moment."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.empty(2048 * MIB, dtype=torch.uint8, device=gradient.device)
        return gradient


class _HungryLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Hungry.apply(super().forward(x))


def test_a_step_that_runs_out_of_memory_half_way_misses_its_budget_and_is_taken_back() -> None:
    torch.manual_seed(0)
    layers = [_HungryLinear(512, 512), *(nn.Linear(512, 512) for _ in range(3))]
    model = nn.Sequential(*layers).cuda()
    before = [p.detach().clone() for p in model.parameters()]
    workload = Workload(
        model,
        lambda model, batch: model(batch).square().mean(),
        torch.optim.Adam(model.parameters()),
        torch.randn(64, 512, device="cuda"),
    )
    plan = memfit.plan(memfit.profile(workload, executor="module"), strategy="none").unplanned()
    names = ("step_in_backward",)
    setup = Setup(names, model, workload.optimizer, [str(n) for n in range(4)])
    planned = Applied(plan, model, setup)
    short = check_budget(workload, planned, 1024 * MIB)
    assert not short.holds and short.over_bytes > 1024 * MIB
    assert check_budget(workload, planned, 4096 * MIB).holds
    after = [p.detach() for p in model.parameters()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def wide(scaled: bool) -> Workload:
    """More bytes of gradients than of activations, and an optimizer that takes as many again."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(2048, 8)).cuda()
    batch = torch.randn(64, 2048, device="cuda"), torch.randint(8, (64,), device="cuda")

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=scaled):
            return functional.cross_entropy(model(batch[0]).float(), batch[1])

    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**28, growth_interval=3)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return Workload(model, loss_fn, optimizer, batch, scaler=scaler if scaled else None)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize(("accumulate", "scaled"), [(1, True), (2, False), (3, True)])
def test_scaled_and_accumulated_steps_in_backward(
    accumulate: int, scaled: bool, clip_norm: float | None
) -> None:
    one, other = wide(scaled), wide(scaled)
    with memfit.fit_workload(
        one,
        "95%",
        allow="+step_in_backward",
        executor="module",
        steps=3,
        accumulate=accumulate,
    ) as fitted:
        result = fitted.result
        # When the last of several scaled batches begins its backward, all gradients and the casts
        # of all weights are there: 95 % may need the state on the host as well, exact as it is.
        more = {"optimizer_offload"} if accumulate > 1 and scaled else set[str]()
        assert {"step_in_backward"} <= {*fitted.plan.setup} <= {"step_in_backward", *more}
        assert result.measured.peak_reserved_bytes <= result.budget_bytes
        assert result.measured.retries == 0
        assert result.numerics.agree or not result.numerics.repeatable, result.numerics
        with memory_cap(one.device, result.budget_bytes):
            for _ in range(10 * accumulate):
                fitted.step(one.batch, clip_norm=clip_norm)
    for _ in range(10):
        for _ in range(accumulate):
            loss = other.compute_loss()
            loss = loss / accumulate if accumulate > 1 else loss
            (loss if other.scaler is None else other.scaler.scale(loss)).backward()
        if other.scaler is not None:
            other.scaler.unscale_(other.optimizer)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(other.model.parameters(), clip_norm)
        if other.scaler is None:
            other.optimizer.step()
        else:
            other.scaler.step(other.optimizer)
            other.scaler.update()
        other.optimizer.zero_grad()
    for mine, plain in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, plain)
    if one.scaler is not None and other.scaler is not None:
        assert one.scaler.state_dict() == other.scaler.state_dict()
        assert one.scaler.get_scale() < 2.0**28, "some steps were skipped"


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm().clamp_min(1e-12))


def test_frozen_weights_in_int8_make_room() -> None:
    workload = gpt2()
    trained = workload.model.get_submodule("transformer.h.3")
    workload.model.requires_grad_(False)
    trained.requires_grad_(True)
    workload.optimizer = torch.optim.AdamW(trained.parameters(), fused=True)
    frozen = sum(p.nbytes for p in workload.model.parameters() if not p.requires_grad)
    with untouched(workload):
        run_step(workload)
        plain = measure_peak(workload, lambda: run_step(workload)).reserved_bytes
    budget = plain - frozen // 3
    with memfit.fit_workload(
        workload, budget, allow=["int8_weights"], executor="module", steps=3
    ) as fitted:
        assert fitted.plan.setup == ("int8_weights",)
        assert fitted.result.measured.peak_reserved_bytes <= budget
        assert fitted.result.numerics.agree
        assert torch.isfinite(fitted.step(workload.batch))
    assert all(p.is_cuda for p in workload.model.parameters())
