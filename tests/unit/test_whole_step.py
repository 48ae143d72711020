"""One budget for the whole step: which techniques of the loss and the optimizer are taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import memfit
from memfit import holding, proof
from memfit.api import fit_workload
from memfit.errors import InfeasibleError, UsageError
from memfit.ir.profile import CallTime, Profile
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.techniques import INT8_WEIGHTS, ON_HOST
from memfit.planning.trials import tried
from memfit.report.fit import numbers_in_brief
from memfit.runtime.apply import Applied
from memfit.runtime.lowbit.int8_tensor import Int8Tensor
from memfit.runtime.setup import Setup
from memfit.runtime.tiled_loss.logits import Logits
from memfit.targets import resolve_target
from memfit.verify.budget import BudgetCheck
from memfit.verify.parts import STILL_RANDOM, why_parts_differ
from memfit.whole_step import whole_step
from memfit.workload import Workload

SLOW = pytest.mark.slow
GPT2 = {"n_layer": "2", "n_embd": "64", "n_head": "2", "vocab_size": "4000"}


def wide(count: int = 6, width: int = 256) -> Workload:
    """More bytes of gradients than of activations."""
    torch.manual_seed(0)
    layers = [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    batch = torch.randn(4, width), torch.randint(4, (4,))
    return Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), fused=True),
        batch,
        name="wide",
    )


def deep(*more: nn.Module) -> Workload:
    """More bytes of activations than of anything else."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, *more, nn.Linear(64, 4))
    batch = torch.randn(512, 64), torch.randint(4, (512,))
    return Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch,
        name="deep",
    )


def test_what_moves_is_planned_only_where_recomputing_does_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = memfit.profile(deep(), executor="module")
    asked: list[tuple[str, ...]] = []

    def noted(profile: Profile, goal: Goal) -> Any:
        asked.append(goal.techniques)
        return make_plan(profile, goal)

    monkeypatch.setattr("memfit.planning.trials.make_plan", noted)
    both = Goal(budget_bytes=make_plan(profile, Goal()).baseline_peak_bytes)
    both = replace(both, techniques=("recompute", "offload"))
    assert tried(profile, both).plan is not None
    assert asked == [("recompute",)]  # everything fits
    asked.clear()
    least = make_plan(profile, Goal()).minimum_feasible_bytes
    slow = replace(profile, call_times=tuple(_slower(call) for call in profile.call_times))
    assert tried(slow, replace(both, budget_bytes=least)).plan is not None
    assert asked == [("recompute",), ("recompute", "offload")]
    asked.clear()
    assert tried(profile, replace(both, budget_bytes=least // 2)).refusal is not None
    assert asked == [("recompute",), ("recompute", "offload")]


def _slower(call: CallTime) -> CallTime:
    """A call that takes a second to make again."""
    return replace(call, recompute_s=1.0, recompute_host_s=1.0)


def with_statistics() -> Workload:
    """More gradients than activations, with dropout and statistics."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(8)
        for layer in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Tanh(), nn.Dropout(0.1))
    ]
    model = nn.Sequential(*layers, nn.Linear(256, 4))
    batch = torch.randn(32, 256), torch.randint(4, (32,))
    return Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), fused=True),
        batch,
        name="statistics",
    )


def gpt2() -> Workload:
    return resolve_target("transformers:gpt2", device="cpu", batch=4, seq=64, overrides=GPT2)


def trained(workload: Workload, steps: int) -> list[torch.Tensor]:
    with untouched(workload):
        for _ in range(steps):
            run_step(workload)
        return [p.detach().clone() for p in workload.model.parameters()]


@pytest.mark.parametrize("allow", ["+step_in_backward", None])
def test_gradients_are_freed_in_backward_where_nothing_else_helps(allow: str | None) -> None:
    workload = wide()
    expected = trained(workload, 2)
    with pytest.raises(InfeasibleError):
        fit_workload(workload, "85%", allow="recompute", executor="module", steps=1)
    with fit_workload(workload, "85%", allow=allow, executor="module", steps=1) as fitted:
        result = fitted.result
        assert result.decisions.techniques == ("step_in_backward",)
        assert result.measured.peak_bytes <= result.budget_bytes
        assert result.numerics.agree and result.numerics.bitwise_vs_unplanned
        assert "parameters are the same" in str(result.numerics.note)
        (choice,) = result.decisions.choices
        assert choice.name == "step_in_backward" and choice.taken
        assert choice.saved_bytes is not None and choice.saved_bytes >= 0
        assert choice.cost_s is not None
        for _ in range(2):
            fitted.step(workload.batch)
        assert all(p.grad is None for p in workload.model.parameters())
    for parameter, value in zip(workload.model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, value, rtol=0, atol=0)


def test_a_last_resort_is_for_budgets_that_it_may_hold() -> None:
    workload, tried = wide(), []
    plan = memfit.plan(workload, "85%", executor="module", progress=tried.append)
    assert plan.setup == ("step_in_backward",) and "trying step_in_backward" in tried
    with pytest.raises(UsageError, match="steps the optimizer in backward") as refused:
        memfit.apply(plan, workload.model)
    assert "allow='recompute'" in str(refused.value.hint)
    for budget, options in (
        ("20%", {}),
        ("85%", {"strategy": "all"}),
        ("85%", {"allow": "offload"}),
    ):
        tried.clear()
        with pytest.raises(InfeasibleError) as refusal:
            memfit.plan(workload, budget, executor="module", progress=tried.append, **options)
        assert not any(text.startswith("trying") for text in tried)
        said = "Not tried: step_in_backward, which would leave" in str(refusal.value)
        assert said == (not options)


def test_state_stays_on_the_device_as_far_as_there_is_room() -> None:
    """Profiles as a GPU would give them: what waits on the host costs its copies."""
    workload = wide()
    base = replace(memfit.profile(workload, executor="module"), baseline=None)
    state = base.graph.static["optimizer_state"]
    seen: list[int] = []

    def measure(setup: Setup | None, split: int) -> Profile:
        assert setup is not None and split == 1
        seen.append(setup.state_kept_bytes)
        moved = state - setup.state_kept_bytes
        static = {**base.graph.static, "optimizer_state": state - moved}
        return replace(
            base,
            graph=replace(base.graph, static=static),
            step_s=base.step_s * (1 + moved / state),
            setup=setup.techniques,
            state_kept_bytes=setup.state_kept_bytes,
        )

    least = memfit.plan(base).minimum_feasible_bytes
    goal = Goal(budget_bytes=least - state // 4, techniques=("recompute", "optimizer_offload"))
    found = whole_step(workload, base, goal, None, measure)
    assert found.setup is not None and found.techniques == ("optimizer_offload",)
    assert seen[0] == 0 and found.setup.state_kept_bytes == max(seen)
    assert 0.7 * state < found.setup.state_kept_bytes < 0.8 * state
    assert make_plan(found.profile, goal).state_kept_bytes == found.setup.state_kept_bytes
    (choice,) = found.choices
    assert choice.taken and "of it may stay" in choice.why
    assert choice.saved_bytes == state - found.setup.state_kept_bytes
    assert choice.cost_s == pytest.approx(base.step_s * choice.saved_bytes / state)
    # Where what stays costs as much as what moves, all of it goes.
    slow = whole_step(
        workload,
        base,
        goal,
        None,
        lambda setup, split: replace(measure(setup, split), step_s=2 * base.step_s),
    )
    assert slow.setup is not None and slow.setup.state_kept_bytes == 0


@pytest.mark.parametrize("faster", list(ON_HOST))
def test_of_two_ways_to_have_state_on_the_host_the_faster_is_taken(faster: str) -> None:
    workload = wide()
    base = replace(memfit.profile(workload, executor="module"), baseline=None)
    static = {**base.graph.static, "optimizer_state": 0}

    def measure(setup: Setup | None, split: int) -> Profile:
        assert setup is not None and len({*setup.techniques} & {*ON_HOST}) == 1
        slower = 1.2 if faster in setup.techniques else 1.5
        graph = replace(base.graph, static=static)
        return replace(base, graph=graph, step_s=slower * base.step_s, setup=setup.techniques)

    least = memfit.plan(base).minimum_feasible_bytes
    budget = least - base.graph.static["optimizer_state"] + 2**16  # no room to keep any of it
    goal = Goal(budget_bytes=budget, techniques=("recompute", *ON_HOST))
    found = whole_step(workload, base, goal, None, measure)
    assert found.techniques == (faster,)
    assert {c.name: c.taken for c in found.choices} == {n: n == faster for n in ON_HOST}
    if faster == "step_on_host":
        (other,) = (c for c in found.choices if not c.taken)
        assert other.why == "step_on_host is better"


def test_an_optimizer_that_steps_on_the_host_agrees() -> None:
    workload = wide()
    with memfit.fit_workload(
        workload,
        profiled=memfit.profile(
            workload,
            executor="module",
            setup=Setup(("step_on_host",), workload.model, workload.optimizer),
        ),
        steps=1,
    ) as fitted:
        assert fitted.plan.setup == ("step_on_host",)
        assert fitted.result.numerics.agree, fitted.result.numerics
        assert "after plain optimizer steps" in str(fitted.result.numerics.note)
        assert torch.isfinite(fitted.step(workload.batch))


def test_state_in_eight_bits_by_name_only() -> None:
    workload = wide(20, 512)  # packing takes some megabytes for a moment
    with fit_workload(workload, "85%", allow="+optim_8bit", executor="module", steps=1) as fitted:
        result = fitted.result
        assert result.decisions.techniques == ("optim_8bit",)
        assert result.measured.peak_bytes <= result.budget_bytes
        assert abs(result.peak_error) < 0.05
        assert result.numerics.agree and "of their largest" in str(result.numerics.note)
        assert torch.isfinite(fitted.step(workload.batch))
    assert all(s["exp_avg"].dtype is torch.float32 for s in workload.optimizer.state.values())


def test_state_that_is_rounded_too_much_is_not_called_the_same() -> None:
    workload = wide(20, 512)
    workload.optimizer.param_groups[0]["lr"] = 0.5
    with (
        pytest.warns(UserWarning, match="its numbers are not those"),
        fit_workload(workload, "85%", allow="+optim_8bit", executor="module", steps=1) as fitted,
    ):
        numerics = fitted.result.numerics
        assert not numerics.bitwise_vs_unplanned and not numerics.kept
        assert numbers_in_brief(numerics).startswith("numbers NOT identical")


def test_of_two_ways_to_round_state_one_takes_the_others_place() -> None:
    """State in bf16 was taken first, and that in 8 bits, which holds the budget, not tried."""
    workload = wide()
    base = replace(memfit.profile(workload, executor="module"), baseline=None)
    state = base.graph.static["optimizer_state"]
    share = {"optim_bf16_sr": 0.5, "optim_8bit": 0.25}

    def measure(setup: Setup | None, split: int) -> Profile:
        assert setup is not None and len(setup.techniques) == 1
        static = {**base.graph.static, "optimizer_state": int(share[setup.techniques[0]] * state)}
        return replace(base, graph=replace(base.graph, static=static), setup=setup.techniques)

    budget = memfit.plan(base).minimum_feasible_bytes - int(0.6 * state)
    goal = Goal(budget_bytes=budget, techniques=("recompute", *share))
    assert whole_step(workload, base, goal, None, measure).techniques == ("optim_8bit",)


def frozen() -> Workload:
    """Six wide layers, of which only the last is trained."""
    workload = wide()
    for parameter in workload.model[:-1].parameters():
        parameter.requires_grad_(False)
    workload.optimizer = torch.optim.AdamW(workload.model[-1].parameters())
    return workload


@pytest.mark.parametrize("name", INT8_WEIGHTS)
def test_frozen_weights_in_int8_by_name_only(name: str, tmp_path: Path) -> None:
    workload = frozen()
    before = [p.clone() for p in workload.model.parameters()]
    setup = Setup((name,), workload.model, workload.optimizer)
    profile = memfit.profile(workload, executor="module", setup=setup)
    with fit_workload(workload, "100%", profiled=profile, steps=1) as fitted:
        numerics = fitted.result.numerics
        fitted.plan.save(tmp_path / "plan.json")
        assert memfit.Plan.load(tmp_path / "plan.json").setup == (name,)
        assert numerics.agree and not numerics.bitwise_vs_unplanned
        assert "frozen weights are rounded to 8 bits" in str(numerics.note)
        assert torch.isfinite(fitted.step(workload.batch))
    after = list(workload.model.parameters())
    assert all(map(torch.equal, before[:-2], after[:-2])), "whole again, bit for bit"
    assert not torch.equal(before[-2], after[-2]), "what is trained was"


def test_weights_that_are_rounded_too_much_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = frozen()
    setup = Setup(("int8_weights",), workload.model, workload.optimizer)
    profile = memfit.profile(workload, executor="module", setup=setup)
    rounded = Int8Tensor.dequantize
    monkeypatch.setattr(Int8Tensor, "dequantize", lambda *given: 1.5 * rounded(*given))
    with fit_workload(workload, "16MiB", profiled=profile, steps=1) as fitted:
        assert not fitted.result.numerics.agree


@pytest.mark.parametrize("name", ["int8_weights", "int8_weights_asymmetric_per_tensor"])
@pytest.mark.parametrize(
    ("make", "why"),
    [(wide, "not possible: the model has no frozen"), (frozen, "the unplanned peak goes from")],
)
def test_int8_weights_that_cannot_help_are_not_taken(
    make: Callable[[], Workload], why: str, name: str
) -> None:
    """Where all weights are trained; and on the CPU, where the exact ones stay beside them."""
    with pytest.raises(InfeasibleError) as refused:
        fit_workload(make(), "30%", allow=f"+{name}", executor="module")
    assert f"{name}: {why}" in refused.value.message


@pytest.mark.parametrize("executor", ["module", "graph", pytest.param("inductor", marks=SLOW)])
def test_clipping_takes_two_steps_and_holds_the_budget(executor: str) -> None:
    """Dropout draws the same numbers twice, and statistics are counted once."""
    one, other = (with_statistics() for _ in range(2))
    with fit_workload(one, "92%", allow="step_in_backward", executor=executor, steps=1) as fitted:
        assert fitted.plan.setup == ("step_in_backward",)
        budget = fitted.result.budget_bytes
        peaks = []
        for clip_norm in (None, 1e-3):
            torch.manual_seed(5)
            with untouched(one):
                step = partial(fitted.step, one.batch, clip_norm=clip_norm)
                peaks.append(measure_peak(one, step).bytes)
        assert max(peaks) <= budget, (peaks, budget)
        torch.manual_seed(5)
        for _ in range(2):
            fitted.step(one.batch, clip_norm=1e-3)
    torch.manual_seed(5)
    for _ in range(2):
        other.compute_loss().backward()
        nn.utils.clip_grad_norm_(other.model.parameters(), 1e-3)
        other.optimizer.step()
        other.optimizer.zero_grad()
    if executor != "inductor":  # which draws other random numbers
        expected = other.model.state_dict()
        for name, value in one.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_step_that_fits_as_it_is_gets_nothing() -> None:
    plan = memfit.plan(wide(), "100%", allow="+step_in_backward", executor="module")
    assert plan.techniques == ()
    (choice,) = plan.choices
    assert not choice.taken and choice.why.startswith("not needed")


def test_the_loss_in_tiles_where_logits_are_the_peak(tmp_path: Path) -> None:
    workload = gpt2()
    allow = "+tiled_loss"
    with pytest.raises(InfeasibleError) as refused:
        fit_workload(workload, "50%", executor="graph", steps=1)
    with fit_workload(workload, "50%", allow=allow, executor="graph", steps=1) as fitted:
        result, plan = fitted.result, fitted.plan
        assert "tiled_loss" in plan.setup
        assert plan.tile_bytes is not None and plan.tile_bytes < result.budget_bytes // 32
        assert result.measured.peak_bytes <= result.budget_bytes
        assert abs(result.peak_error) < 0.05
        assert result.numerics.agree and not result.numerics.bitwise_vs_unplanned
        assert refused.value.minimum_bytes is not None
        assert result.minimum_feasible_bytes < refused.value.minimum_bytes
        assert result.baseline.peak_bytes > 1.9 * result.measured.peak_bytes
        plan.save(tmp_path / "plan.json")
    again = memfit.Plan.load(tmp_path / "plan.json")
    with fit_workload(workload, plan=again, steps=1) as fitted:
        assert fitted.plan.setup == plan.setup
        assert fitted.result.measured.peak_bytes == result.measured.peak_bytes
    with memfit.apply(again, workload.model):
        assert isinstance(workload.model(**workload.batch).logits, Logits)
    assert type(workload.model(**workload.batch).logits) is torch.Tensor


@pytest.mark.parametrize("helps", [True, False])
def test_what_was_not_needed_is_tried_where_a_plan_without_it_does_not_hold(
    monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    workload = gpt2()
    real = holding.check_budget
    tried: list[str] = []

    def check(part: Workload, planned: Applied, budget: int, **options: Any) -> BudgetCheck:
        found = real(part, planned, budget, **options)
        if helps and "tiled_loss" in planned.plan.setup:
            return found
        return BudgetCheck(found.peak, budget // 2)  # as if something else took half of it

    monkeypatch.setattr(holding, "check_budget", check)
    how = {"executor": "graph", "steps": 1, "progress": tried.append}
    if not helps:
        with pytest.raises(InfeasibleError, match="did not hold"):
            fit_workload(workload, "99%", allow="recompute,tiled_loss", **how)
        assert tried.count("trying tiled_loss") == 1, "profiled twice"
        return
    with fit_workload(workload, "99%", allow="recompute,tiled_loss", **how) as fitted:
        assert fitted.plan.setup == ("tiled_loss",)
        (choice,) = fitted.plan.choices
        assert choice.taken
        assert fitted.result.measured.peak_bytes <= fitted.result.budget_bytes
    assert "planning for less: tiled_loss" in tried


@pytest.mark.parametrize("executor", ["module", "graph", pytest.param("inductor", marks=SLOW)])
def test_a_loss_outside_of_the_model_in_tiles(executor: str) -> None:
    sizes = {"n_layer": "2", "n_embd": "64", "n_head": "2", "n_ff": "128", "vocab_size": "4000"}
    workload = resolve_target("encoder", device="cpu", batch=4, seq=64, overrides=sizes)
    budget = "12MiB"
    with pytest.raises(InfeasibleError):
        fit_workload(workload, budget, executor=executor, steps=1)
    with fit_workload(workload, budget, allow="+tiled_loss", executor=executor, steps=1) as fitted:
        result = fitted.result
        assert fitted.plan.setup == ("tiled_loss",)
        assert result.measured.peak_bytes <= result.budget_bytes
        assert abs(result.peak_error) < 0.01, "the head's gradient is made before backward"
        assert result.numerics.agree and not result.numerics.bitwise_vs_unplanned
        assert torch.isfinite(fitted.step(workload.batch))
        logits = 4 * 4 * 64 * 4000
        copies = 1 if executor == "inductor" else 2  # a fused loss makes one less
        assert result.baseline.peak_bytes - result.measured.peak_bytes > copies * logits


def test_logits_that_do_not_go_to_cross_entropy() -> None:
    workload = replace(wide(), loss_fn=lambda model, batch: model(batch[0]).logsumexp(-1).sum())
    with pytest.raises(InfeasibleError) as refused:
        fit_workload(workload, "85%", allow="recompute,tiled_loss", executor="module")
    assert "tiled_loss: not possible: the loss of the model" in refused.value.message
    assert "head '12' makes logits, and 'logsumexp' is done to them" in refused.value.message


def test_a_batch_in_parts_where_its_activations_are_the_peak(tmp_path: Path) -> None:
    workload, other = deep(), deep()
    with pytest.raises(InfeasibleError):
        fit_workload(workload, "45%", executor="module", steps=1, strategy="none")
    with fit_workload(workload, "45%", allow="microbatch", executor="module", steps=1) as fitted:
        result, plan = fitted.result, fitted.plan
        assert plan.split >= 4 and plan.techniques == ("microbatch",)
        assert result.measured.peak_bytes <= result.budget_bytes
        assert abs(result.peak_error) < 0.05
        assert result.numerics.agree and "all parts together" in str(result.numerics.note)
        plan.save(tmp_path / "plan.json")
        losses = [float(fitted.step(workload.batch)) for _ in range(3)]
        expected = [float(run_step(other)) for _ in range(3)]
        assert losses == pytest.approx(expected, rel=1e-5)
        for parameter, value in zip(
            workload.model.parameters(), other.model.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, value, rtol=1e-4, atol=1e-6)
        short = (workload.batch[0][:5], workload.batch[1][:5])
        assert torch.isfinite(fitted.step(short, clip_norm=1.0))
    with pytest.raises(UsageError, match="parts"):
        memfit.apply(memfit.Plan.load(tmp_path / "plan.json"), workload.model)
    with fit_workload(workload, plan=memfit.Plan.load(tmp_path / "plan.json"), steps=1) as fitted:
        assert fitted.plan.split == plan.split


def test_a_larger_batch_in_parts_leaves_the_planned_one_as_it_was() -> None:
    workload = deep()
    larger = tuple(torch.cat([tensor, tensor[:100]]) for tensor in workload.batch)
    with fit_workload(workload, "45%", allow="microbatch", executor="module", steps=1) as fitted:
        first = fitted.plan
        for batch in (workload.batch, larger, workload.batch):
            assert torch.isfinite(fitted.step(batch))
        assert first.split > 1


def test_parts_that_draw_random_numbers_are_compared_without_them() -> None:
    workload = deep(nn.Dropout(0.1))
    with fit_workload(workload, "45%", allow="microbatch", executor="module", steps=1) as fitted:
        numerics = fitted.result.numerics
        assert fitted.plan.split > 1 and numerics.kept and not numerics.bitwise_vs_unplanned
        assert "constants in the place of its random numbers" in str(numerics.note)


def _summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    found = nn.functional.normalize(model(batch[0]), dim=-1)
    return nn.functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("what", ["a sum", "samples compared", "few that count"])
def test_parts_were_another_step_and_nobody_noticed_where_it_draws_random_numbers(
    what: str, dropout: float
) -> None:
    workload = deep(*([nn.Dropout(dropout)] if dropout else []))
    if what == "few that count":
        workload.batch[1][:200] = -100
    else:
        workload = replace(workload, loss_fn=_summed if what == "a sum" else _contrastive)
    with pytest.raises(InfeasibleError, match="halves of the batch give another step"):
        fit_workload(workload, "45%", allow="microbatch", executor="module", steps=1)
    with fit_workload(
        workload, "45%", allow="microbatch", force=["microbatch"], executor="module", steps=1
    ) as fitted:
        numerics = fitted.result.numerics
        assert numerics.agree and "as forced" in str(numerics.note)
        assert numerics.grad_max_rel_diff > 0.01 or numerics.loss_max_abs_diff > 0.01


def test_a_batch_that_cannot_be_halved_ended_the_fit_with_the_models_error() -> None:
    workload = deep()
    count = len(workload.batch[0])

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        assert len(batch[0]) == count, "one row for each sensor"
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    workload = replace(workload, loss_fn=loss_fn)
    with pytest.raises(InfeasibleError, match=r"half of the batch: .*one row for each"):
        fit_workload(workload, "45%", allow="recompute,microbatch", executor="module", steps=1)


def test_random_numbers_that_are_drawn_otherwise_are_constant_too() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 2, dropout=0.1, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0.1 * torch.randn_like(x) * torch.rand(x.shape)
            x = x * x.new_empty(len(x), 1).bernoulli_(0.9).div_(0.9)  # drops whole samples
            x = x + torch.nn.functional.dropout(x, 0.1) + torch.randn(64).uniform_(-1, 1)
            return x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]

    assert why_parts_differ(deep(Noisy())) is None
    shuffling = replace(deep(), loss_fn=lambda m, b: m(b[0][torch.randperm(len(b[0]))]).sum())
    assert why_parts_differ(shuffling) == STILL_RANDOM


def test_parts_of_several_batches_wait_for_the_last() -> None:
    workload, other = deep(), deep()
    with fit_workload(
        workload, "60%", allow="microbatch", executor="module", steps=1, accumulate=2
    ) as fitted:
        assert fitted.plan.split > 1
        for _ in range(2):
            fitted.step(workload.batch)
    for _ in range(2):
        (other.compute_loss() / 2).backward()
    other.optimizer.step()
    for parameter, value in zip(workload.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, value, rtol=1e-4, atol=1e-6)


def test_batch_norm_keeps_a_batch_whole() -> None:
    workload = deep(nn.BatchNorm1d(64))
    with pytest.raises(InfeasibleError, match="take its statistics over parts of the batch; force"):
        fit_workload(workload, "45%", allow="microbatch", executor="module", steps=1)
    with fit_workload(
        workload, "45%", allow="microbatch", force=["microbatch"], executor="module", steps=1
    ) as fitted:
        result = fitted.result
        assert fitted.plan.split > 1 and result.measured.peak_bytes <= result.budget_bytes
        assert result.numerics.agree and not result.numerics.bitwise_vs_unplanned
        assert "as forced: batch norm" in str(result.numerics.note)


def test_only_an_allowed_split_can_be_forced() -> None:
    with pytest.raises(UsageError, match="tiled_loss cannot be forced"):
        fit_workload(deep(), "45%", allow="+tiled_loss", force=["tiled_loss"])
    with pytest.raises(UsageError, match="forced, but not allowed"):
        fit_workload(deep(), "45%", force=["microbatch"])


def test_a_profile_with_a_set_up_is_fitted_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = wide()
    setup = Setup(("step_in_backward",), workload.model, workload.optimizer)
    profile = memfit.profile(workload, executor="module", setup=setup)
    compared = Mock(wraps=proof.compare_speed)
    monkeypatch.setattr(proof, "compare_speed", compared)
    with fit_workload(workload, "100%", profiled=profile, steps=1) as fitted:
        assert fitted.plan.setup == ("step_in_backward",)
        assert fitted.applied.setup is not None and fitted.applied.setup.in_backward is not None
        assert compared.call_args.kwargs["unplanned"].setup is fitted.applied.setup
    assert not any(p._post_accumulate_grad_hooks for p in workload.model.parameters())


def test_what_cannot_be_had_is_said() -> None:
    hooked = wide()
    hooked.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(InfeasibleError) as refused:
        fit_workload(hooked, "85%", allow="+step_in_backward", executor="module")
    assert "step_in_backward: not possible: the optimizer has step pre-hooks" in str(refused.value)


def test_plans_that_need_more_than_a_model() -> None:
    workload = wide()
    profile = memfit.profile(workload, executor="module")
    with pytest.raises(UsageError, match="only its profile"):
        memfit.plan(profile, "85%", allow="+step_in_backward")
    plan = memfit.plan(
        workload, "85%", allow="+step_in_backward", executor="module", profiled=profile
    )
    with pytest.raises(UsageError, match="in backward"):
        memfit.apply(plan, workload.model, workload.optimizer)
