"""A fit on a GPU: the cap holds, predictions are near, numbers are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memfit
from memfit.errors import InfeasibleError
from memfit.measure.cuda_allocator import settle_optimizer_state
from memfit.measure.memory import memory_cap
from memfit.measure.step import run_step
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import Simulator
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target
from memfit.verify.deterministic import deterministic
from memfit.verify.numerics import check_numerics

ENCODER = {"n_layer": "8", "n_embd": "256", "n_head": "4", "n_ff": "1024", "vocab_size": "2000"}
GPT2 = {"n_layer": "6", "n_embd": "256", "n_head": "4", "vocab_size": "4000"}


def encoder(**options: object) -> memfit.Workload:
    return resolve_target("encoder", device="cuda", batch=32, seq=256, overrides=ENCODER, **options)


@pytest.mark.parametrize(
    ("executor", "share"),
    [("module", 0.75), ("module", 0.5), ("graph", 0.5), ("inductor", 0.6)],
)
def test_the_budget_holds_under_the_cap(executor: str, share: float) -> None:
    workload = encoder()
    profile = memfit.profile(workload, executor=executor)
    assert profile.baseline is not None
    static = profile.graph.fixed_bytes
    budget = int(static + share * (profile.baseline.peak_bytes - static))
    with memfit.fit_workload(workload, budget, profiled=profile, steps=5) as fitted:
        result = fitted.result
        assert result.measured.peak_reserved_bytes <= budget
        assert result.measured.retries == 0
        assert abs(result.peak_error) < 0.03
        numerics = result.numerics
        assert numerics.bitwise_vs_unplanned or (executor == "inductor" and numerics.agree)
        with memory_cap(workload.device, budget):
            for _ in range(3):
                fitted.step(workload.batch)


def test_the_plain_step_goes_out_of_memory_under_the_same_cap() -> None:
    workload = encoder()
    profile = memfit.profile(workload, executor="module")
    assert profile.baseline is not None
    static = profile.graph.fixed_bytes
    budget = int(static + 0.5 * (profile.baseline.peak_bytes - static))
    with memory_cap(workload.device, budget), pytest.raises(torch.OutOfMemoryError):
        run_step(workload)


def test_profiling_works_where_the_plain_step_does_not_fit() -> None:
    workload = encoder()
    free = memfit.profile(workload, executor="module")
    assert free.baseline is not None
    static = free.graph.fixed_bytes
    budget = int(static + 0.6 * (free.baseline.peak_bytes - static))
    with memory_cap(workload.device, budget):
        capped = memfit.profile(workload, executor="module")
        assert capped.baseline is None
        with memfit.fit_workload(workload, budget, profiled=capped, steps=3) as fitted:
            assert not fitted.result.baseline.measured
            assert fitted.result.measured.peak_reserved_bytes <= budget
            error = fitted.result.baseline.peak_bytes / free.baseline.peak_bytes - 1
            assert abs(error) < 0.03


def test_an_impossible_budget_names_the_minimum_and_the_minimum_works() -> None:
    workload = encoder()
    with pytest.raises(InfeasibleError) as refused:
        memfit.fit_workload(workload, "40MiB", executor="graph")
    assert refused.value.minimum_bytes is not None
    enough = int(refused.value.minimum_bytes * 1.02)
    with memfit.fit_workload(workload, enough, executor="graph", steps=3) as fitted:
        assert fitted.result.verdict == "fits"


def test_bf16_autocast_with_tied_weights_is_bitwise() -> None:
    workload = resolve_target(
        "transformers:gpt2", device="cuda", batch=4, seq=256, dtype="bf16", overrides=GPT2
    )
    with memfit.fit_workload(workload, "75%", executor="graph", steps=3) as fitted:
        numerics = fitted.result.numerics
        assert numerics.bitwise_vs_unplanned, numerics.note


def test_fp16_with_a_scaler_trains() -> None:
    workload = encoder(dtype="fp16")
    assert workload.scaler is not None
    with memfit.fit_workload(workload, "75%", executor="graph", steps=3) as fitted:
        assert torch.isfinite(fitted.step(workload.batch, clip_norm=1.0))


def test_attention_dropout_recomputed_in_fused_code_draws_the_same_numbers(
    blocks_by: Callable[..., memfit.Plan],
) -> None:
    """A plan that recomputes attention must not change which numbers the forward draws."""
    workload = resolve_target(
        "transformers:gpt2", device="cuda", batch=4, seq=256, dtype="bf16", overrides=GPT2
    )
    profile = memfit.profile(workload, executor="inductor")

    def leanest(simulator: Simulator, graph: int) -> int:
        menu = simulator.menus[graph]
        return min(range(1, len(menu)), key=lambda n: menu[n][0].held_bytes)

    planned = blocks_by(profile, leanest)
    numerics = check_numerics(
        workload,
        Applied(planned, workload.model),
        Applied(planned.unplanned(), workload.model),
    )
    assert numerics.loss_max_abs_diff < 1e-3
    assert numerics.grad_max_rel_diff < 0.1


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_resnet50_at_batch_32_trains_as_it_does_plainly(executor: str) -> None:
    """torchvision's ReLUs work in place; batch-norm statistics must not be updated twice."""
    pytest.importorskip("torchvision")
    with deterministic():
        workload = resolve_target("torchvision:resnet50", device="cuda", batch=32)
        start = {name: t.clone() for name, t in workload.model.state_dict().items()}
        profile = memfit.profile(workload, executor=executor)
        assert profile.baseline is not None
        static, peak = profile.graph.fixed_bytes, profile.baseline.peak_bytes
        plan = make_plan(profile, Goal(budget_bytes=int(static + 0.6 * (peak - static))))

        def trained(plan: memfit.Plan) -> dict[str, torch.Tensor]:
            workload.model.load_state_dict(start)
            workload.optimizer.state.clear()
            with Applied(plan, workload.model):
                losses = [run_step(workload) for _ in range(3)]
            state = {name: t.clone() for name, t in workload.model.state_dict().items()}
            return {**state, "losses": torch.stack(losses)}

        plain, fitted = trained(plan.unplanned()), trained(plan)
    assert all(torch.equal(plain[name], fitted[name]) for name in plain)


def test_settling_keeps_the_optimizer_state() -> None:
    workload = encoder()
    run_step(workload)
    state = workload.optimizer.state
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in state.items()}
    settle_optimizer_state(workload.optimizer, workload.device)
    for parameter, values in before.items():
        for key, value in values.items():
            assert torch.equal(state[parameter][key], value)
    run_step(workload)
