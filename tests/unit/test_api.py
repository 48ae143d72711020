"""The verbs: fit, plan, apply, and the fitted step."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import api, holding
from memfit.errors import InfeasibleError, MemfitError, PlanFileError, UsageError
from memfit.fitted import Fitted
from memfit.ir.profile import Profile
from memfit.measure.memory import Peak
from memfit.runtime.apply import Applied
from memfit.verify.budget import BudgetCheck, run_once
from memfit.workload import Workload

Fit = Callable[..., Fitted]


@pytest.fixture
def fit() -> Iterator[Fit]:
    """Fit a workload quickly; what is fitted is undone at the end."""
    made: list[Fitted] = []

    def run(workload: Workload, budget: Any = "80%", **options: Any) -> Fitted:
        fitted = memfit.fit_workload(workload, budget, steps=1, **options)
        made.append(fitted)
        return fitted

    yield run
    for fitted in made:
        fitted.undo()


def _weights(workload: Workload) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in workload.model.state_dict().items()}


def _same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def _decides(fitted: Fitted) -> bool:
    """Whether anything is recomputed: else nothing is tested."""
    return any(s.decision != "keep" for s in fitted.plan.segments)


def _pair(zoo: SimpleNamespace, rows: int = 16, **options: Any) -> tuple[Workload, Workload]:
    model = options.pop("model", zoo.Stack)
    batch = options.pop("batch", lambda: zoo.sequences(rows))
    return tuple(zoo.workload(model, batch, **options) for _ in range(2))  # type: ignore


def test_importing_touches_no_cuda_and_no_logging() -> None:
    code = (
        "import logging, memfit, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert not logging.getLogger('memfit').handlers and not logging.getLogger().handlers"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": _source()})


def _source() -> str:
    return str(Path(api.__file__).parents[1])


def test_a_fit_holds_its_budget_and_says_so(zoo: SimpleNamespace, fit: Fit) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    before, state = _weights(workload), torch.get_rng_state()
    fitted = fit(workload)
    result = fitted.result
    assert result.verdict == "fits"
    assert result.measured.peak_bytes <= result.budget_bytes
    assert result.budget_bytes == round(0.8 * result.baseline.peak_bytes)
    assert abs(result.peak_error) < 0.02
    assert result.numerics.bitwise_vs_unplanned
    assert result.baseline.measured
    assert result.decisions.techniques == ("recompute",)
    assert result.decisions.num_segments == len(fitted.plan.segments) == 6
    kept, recomputed = result.decisions.kept_bytes, result.decisions.recomputed_bytes
    assert kept + recomputed == sum(s.saved_bytes for s in fitted.plan.segments)
    assert result.rounds == 1
    assert result.minimum_feasible_bytes <= result.measured.peak_bytes * 1.02
    _same(_weights(workload), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not workload.optimizer.state


def test_five_fitted_steps_are_five_plain_steps(zoo: SimpleNamespace, fit: Fit) -> None:
    plain, planned = _pair(zoo)
    fitted = fit(planned)
    assert _decides(fitted)
    torch.manual_seed(5)
    actual = [fitted.step(planned.batch) for _ in range(5)]
    torch.manual_seed(5)
    expected = []
    for _ in range(5):
        loss = plain.compute_loss()
        loss.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        expected.append(loss.detach())
    _same(actual, expected)
    _same(_weights(planned), _weights(plain))
    assert not any(loss.requires_grad for loss in actual)


def test_after_undo_plain_training_goes_on_identically(zoo: SimpleNamespace, fit: Fit) -> None:
    plain, planned = _pair(zoo)

    def train(workload: Workload) -> None:
        workload.compute_loss().backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()

    with fit(planned) as fitted:
        torch.manual_seed(5)
        fitted.step(planned.batch)
    assert not any("forward" in m.__dict__ for m in planned.model.modules())
    train(planned)
    torch.manual_seed(5)
    train(plain)
    train(plain)
    _same(_weights(planned), _weights(plain))


def test_clipping_scheduler_and_scaler(zoo: SimpleNamespace, fit: Fit) -> None:
    plain, planned = _pair(zoo, optimizer=torch.optim.SGD)

    def extras(workload: Workload) -> tuple[Any, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return scaler, torch.optim.lr_scheduler.StepLR(workload.optimizer, 1, gamma=0.5)

    fitted = fit(planned)
    assert _decides(fitted)
    scaler, scheduler = extras(planned)
    torch.manual_seed(5)
    for _ in range(3):
        fitted.step(planned.batch, clip_norm=0.01, scaler=scaler, scheduler=scheduler)
    torch.manual_seed(5)
    scaler, scheduler = extras(plain)
    for _ in range(3):
        scaler.scale(plain.compute_loss()).backward()
        scaler.unscale_(plain.optimizer)
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.01)
        assert norm > 0.01, "there is something to clip"
        scaler.step(plain.optimizer)
        scaler.update()
        plain.optimizer.zero_grad()
        scheduler.step()
    _same(_weights(planned), _weights(plain))
    assert planned.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


def test_accumulating_steps_on_the_mean_and_flush_on_the_rest(
    zoo: SimpleNamespace, fit: Fit
) -> None:
    plain, planned = _pair(zoo)
    fitted = fit(planned, accumulate=2)
    assert _decides(fitted)
    assert abs(fitted.result.peak_error) < 0.02
    batches = [zoo.sequences(16) for _ in range(5)]
    torch.manual_seed(5)
    before = _weights(planned)
    fitted.step(batches[0])
    _same(_weights(planned), before)
    for batch in batches[1:]:
        fitted.step(batch)
    waiting = _weights(planned)
    fitted.flush()
    with pytest.raises(AssertionError):
        _same(_weights(planned), waiting)
    flushed = _weights(planned)
    fitted.flush()
    _same(_weights(planned), flushed)
    torch.manual_seed(5)
    for group in (batches[:2], batches[2:4], batches[4:]):
        for batch in group:
            (plain.compute_loss(batch) / len(group)).backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
    _same(_weights(planned), _weights(plain))


def test_accumulating_more_than_was_fitted_is_refused(zoo: SimpleNamespace, fit: Fit) -> None:
    workload = zoo.workload(zoo.Stack)
    fitted = fit(workload, "95%")
    for wrong in (0, 3):
        with pytest.raises(UsageError, match=f"accumulate is {wrong}") as refusal:
            fitted.step(workload.batch, accumulate=wrong)
        assert refusal.value.hint
    with pytest.raises(UsageError, match="accumulate is 0"):
        memfit.fit_workload(workload, "80%", accumulate=0)


def test_a_larger_batch_plans_again_once_and_is_cached(
    zoo: SimpleNamespace, fit: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = _pair(zoo, rows=8)
    fitted = fit(planned, 10**9, strategy="all")
    replans: list[int] = []
    replan = fitted._replan

    def counted(workload: Workload) -> Fitted:
        replans.append(len(workload.batch))
        return replan(workload)

    fitted._replan = counted
    long = torch.randn(4, 12, 8)
    batches = [zoo.sequences(rows) for rows in (8, 3, 16, 16, 8, 12)] + [long, zoo.sequences(16)]
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING, "memfit"):
        actual = [fitted.step(batch) for batch in batches]
    assert replans == [16, 4]
    assert sum("planning again" in r.message for r in caplog.records) == 2
    torch.manual_seed(5)
    expected = []
    for batch in batches:
        loss = plain.compute_loss(batch)
        loss.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        expected.append(loss.detach())
    _same(actual, expected)
    _same(_weights(planned), _weights(plain))
    fitted.undo()
    assert not any("forward" in m.__dict__ for m in planned.model.modules())


def test_planning_again_keeps_gradients_that_wait(zoo: SimpleNamespace, fit: Fit) -> None:
    plain, planned = _pair(zoo, rows=4)
    fitted = fit(planned, 10**9, strategy="all", accumulate=2)
    small, large = zoo.sequences(4), zoo.sequences(8)
    torch.manual_seed(5)
    fitted.step(small)
    fitted.step(large)
    torch.manual_seed(5)
    for batch in (small, large):
        (plain.compute_loss(batch) / 2).backward()
    plain.optimizer.step()
    _same(_weights(planned), _weights(plain))


def test_a_batch_that_fits_in_no_plan_leaves_the_old_plan_at_work(
    zoo: SimpleNamespace, fit: Fit
) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(16))
    fitted = fit(workload, executor="module")  # whose replays can be counted
    with pytest.raises(InfeasibleError):
        fitted.step(zoo.sequences(512))
    assert "forward" in workload.model.blocks[0].__dict__, "the plan is still at work"
    before = fitted.applied.router.engine.replays
    fitted.step(workload.batch)
    assert fitted.applied.router.engine.replays > before


def test_a_batch_on_another_device_is_refused(zoo: SimpleNamespace, fit: Fit) -> None:
    workload = zoo.workload(zoo.Stack)
    fitted = fit(workload, "95%")
    with pytest.raises(UsageError, match="a tensor on meta, the model is on cpu") as refusal:
        fitted.step(workload.batch.to("meta"))
    assert refusal.value.hint == "move the batch with tensor.to('cpu')"


def test_fit_takes_the_parts_of_a_workload(zoo: SimpleNamespace) -> None:
    parts = zoo.workload(zoo.Stack)
    with memfit.fit(
        parts.model, parts.loss_fn, parts.optimizer, parts.batch, "90%", steps=1, name="mine"
    ) as fitted:
        assert fitted.result.workload["name"] == "mine"


def test_a_given_plan_is_run_as_it_is(zoo: SimpleNamespace, fit: Fit) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    plan = memfit.plan(workload, "80%", strategy="ratio")
    fitted = fit(workload, plan=plan)
    assert fitted.plan == plan
    assert fitted.result.budget_bytes == plan.budget_bytes
    other = replace(workload, batch=zoo.sequences(3))
    with pytest.raises(PlanFileError, match=r"for the batch 'float32\[64"):
        memfit.fit_workload(other, plan=plan)
    sgd = replace(workload, optimizer=torch.optim.SGD(workload.model.parameters(), lr=0.1))
    with pytest.raises(PlanFileError, match="for the optimizer 'AdamW', not 'SGD'"):
        memfit.fit_workload(sgd, plan=plan)


def test_a_model_with_a_plan_at_work_is_not_fitted_again(zoo: SimpleNamespace, fit: Fit) -> None:
    """The second fit measured the first one's plan as if it were the plain step."""
    workload = zoo.workload(zoo.Stack)
    fitted = fit(workload, "100%")
    for again in (
        lambda: fit(workload, "100%"),
        lambda: memfit.profile(workload, executor="module"),
        lambda: memfit.apply(fitted.plan, workload.model).install(),
    ):
        with pytest.raises(UsageError, match="at work") as refusal:
            again()
        assert "undo()" in str(refusal.value.hint)
    fitted.step(workload.batch)
    fitted.undo()
    fit(workload, "100%").undo()


def test_an_impossible_budget_is_refused(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    before = copy.deepcopy(workload.model.state_dict())
    with pytest.raises(InfeasibleError) as refusal:
        memfit.fit_workload(workload, "20kB", steps=1)
    assert refusal.value.minimum_bytes is not None and refusal.value.minimum_bytes > 20_000
    _same(workload.model.state_dict(), before)


@pytest.mark.parametrize("budget", ["0", "-1GiB", "12 parsecs", "0%", -4])
def test_budgets_are_checked_before_anything_runs(zoo: SimpleNamespace, budget: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        raise AssertionError("the step was run")

    workload = zoo.workload(zoo.Stack, loss=loss)
    for verb in (memfit.fit_workload, memfit.plan):
        with pytest.raises(UsageError):
            verb(workload, budget)


@pytest.mark.parametrize("verb", [memfit.profile, memfit.plan, memfit.fit_workload])
def test_a_model_on_an_unknown_device_is_refused(zoo: SimpleNamespace, verb: Any) -> None:
    """KeyError: 'meta'."""
    model, batch = zoo.Stack().to("meta"), zoo.sequences().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match="devices of type 'meta'") as refusal:
        verb(Workload(model, zoo.squared, optimizer, batch))
    assert "memfit estimate" in str(refusal.value.hint) or "cuda and cpu" in str(refusal.value.hint)


def test_no_timed_steps_are_refused(zoo: SimpleNamespace) -> None:
    """Their median was asked for: IndexError."""
    with pytest.raises(UsageError, match="steps is 0"):
        memfit.fit_workload(zoo.workload(zoo.Stack), "100%", steps=0)


def test_options_that_mean_nothing_are_refused(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    for options in (
        {"strategy": "best"},
        {"allow": "magic"},
        {"host_budget": "1GiB"},
        {"max_slowdown": 0.5},
    ):
        with pytest.raises(UsageError) as refusal:
            memfit.plan(workload, "80%", **options)
        assert refusal.value.hint


def test_sizes_are_text_or_numbers_and_never_negative(zoo: SimpleNamespace) -> None:
    """The command line took "100KB", and Python answered with a TypeError; -5 was a budget."""
    profile = memfit.profile(zoo.workload(zoo.Stack))
    same = memfit.plan(profile, "100%", min_tensor_bytes=100)
    assert memfit.plan(profile, "100%", min_tensor_bytes="0.1KB").segments == same.segments
    for wrong in (-5, "small"):
        with pytest.raises(UsageError, match=r"\nhint: "):
            memfit.plan(profile, "100%", min_tensor_bytes=wrong)
    for wrong in (-5, "much"):
        with pytest.raises(UsageError, match=r"(below 0|not a number of bytes)\nhint: "):
            memfit.plan(profile, "100%", strategy="swap", host_budget=wrong)


def test_plans_of_a_profile(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    profile = memfit.profile(workload)
    assert profile.baseline is not None
    plan = memfit.plan(profile, "75%")
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes == round(0.75 * profile.baseline.peak_bytes)
    assert memfit.plan(profile).runs == [], "all of the free memory is enough"
    assert memfit.plan(profile, allow=[], strategy="all").runs == []
    cut = memfit.plan(profile, activation_reduction=0.3)
    assert cut.predicted.peak_bytes <= plan.baseline_peak_bytes
    every = memfit.plan(profile, strategy="all")
    assert every.budget_bytes is None and len(every.runs) == 4


def test_activation_reduction_in_a_fit(zoo: SimpleNamespace, fit: Fit) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    result = fit(workload, "auto", activation_reduction=0.3).result
    static = result.baseline.static_bytes
    saved = 1 - (result.measured.peak_bytes - static) / (result.baseline.peak_bytes - static)
    assert saved >= 0.29


def test_named_segments_are_used(zoo: SimpleNamespace, fit: Fit) -> None:
    fitted = fit(zoo.workload(zoo.Stack), "95%", segments=["blocks.[0-2]"])
    assert [s.name for s in fitted.plan.segments] == ["blocks.0", "blocks.1", "blocks.2"]


def test_over_the_budget_means_planning_again_with_a_margin(
    zoo: SimpleNamespace, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, peaks = holding.check_budget, []

    def stricter(workload: Workload, planned: Any, budget: int, **options: Any) -> BudgetCheck:
        check = real(workload, planned, budget, **options)
        peaks.append(check.peak.bytes)
        # The first plan is said to be over, by more than it left free.
        over = budget - check.peak.bytes + 2000
        return BudgetCheck(check.peak, over) if len(peaks) == 1 else check

    monkeypatch.setattr(holding, "check_budget", stricter)
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    result = fit(workload).result
    assert (len(peaks), result.rounds) == (2, 2)
    assert result.measured.peak_bytes == peaks[1] <= peaks[0] - 2000
    assert any(note.startswith("round 1: ") for note in result.notes)


@pytest.mark.parametrize("lessons", [0, holding.MAX_LESSONS])
def test_what_never_ran_is_compiled_before_the_cap_is_there(
    zoo: SimpleNamespace, fit: Fit, monkeypatch: pytest.MonkeyPatch, lessons: int
) -> None:
    """After the last lesson a plan may have variants that are new."""
    did: list[str] = []
    run, check = holding.run_once, holding.check_budget
    left = iter(range(lessons))

    def learn(workload: Workload, profile: Profile, *args: Any) -> Profile | None:
        return None if next(left, None) is None else profile

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (did.append(name), work(*args, **options))[1]

    monkeypatch.setattr(holding, "learn_from", learn)
    monkeypatch.setattr(holding, "run_once", noted("ran", run))
    monkeypatch.setattr(holding, "check_budget", noted("checked", check))
    fit(zoo.workload(zoo.Stack, lambda: zoo.sequences(64)), "90%")
    assert did == (["ran", "checked"] if lessons else ["checked"])


def test_a_first_run_that_does_not_fit_is_left_to_the_check(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    plan = memfit.plan(memfit.profile(workload), strategy="none")

    def no_room(model: nn.Module, batch: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run_once(replace(workload, loss_fn=no_room), Applied(plan, workload.model))
    assert not any("forward" in m.__dict__ for m in workload.model.modules())
    assert all(p.grad is None for p in workload.model.parameters())


def test_a_budget_that_never_holds_is_refused_after_three_rounds(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = [0]

    def never(*args: Any, **options: Any) -> BudgetCheck:
        rounds[0] += 1
        return BudgetCheck(Peak(10**9, 10**9), 10)

    monkeypatch.setattr(holding, "check_budget", never)
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    with pytest.raises(InfeasibleError, match="does not hold the budget on this machine"):
        memfit.fit_workload(workload, "90%", allow="recompute", steps=1)
    assert rounds[0] == 3
    assert not any("forward" in m.__dict__ for m in workload.model.modules())


def test_a_refusal_after_a_plan_that_ran_says_what_that_took(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the smallest budget that it names contradicts the one that was named before."""

    def far_over(*args: Any, **options: Any) -> BudgetCheck:
        return BudgetCheck(Peak(10**9, 10**9), 10**8)

    monkeypatch.setattr(holding, "check_budget", far_over)
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(64))
    with pytest.raises(InfeasibleError, match=r"(?s)no plan fits.*round 1: .* too much") as refused:
        memfit.fit_workload(workload, "90%", steps=1)
    assert refused.value.minimum_bytes is not None and refused.value.minimum_bytes > 10**8


def test_a_model_of_single_layers_can_be_fitted_when_it_fits() -> None:
    """Nothing can be recomputed, which is no reason to fail."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    workload = Workload(
        model,
        lambda m, b: m(b).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randn(4, 8),
    )
    with memfit.fit_workload(workload, "100%", steps=1) as fitted:
        assert fitted.plan.runs == []
        fitted.step(workload.batch)
    with pytest.raises(InfeasibleError):
        memfit.fit_workload(workload, "50%", steps=1)


def test_a_profile_is_used_again_and_another_workloads_refused(zoo: SimpleNamespace) -> None:
    one, other = _pair(zoo)
    measured = memfit.profile(one)
    with memfit.fit_workload(one, "90%", profiled=measured, steps=1) as fitted:
        assert fitted.profile.graph is measured.graph, "not recorded again"
        assert replace(fitted.profile, known=()) == replace(measured, known=())
    other.batch = zoo.sequences(3)
    with pytest.raises(MemfitError, match="not of this workload"):
        memfit.fit_workload(other, "90%", profiled=measured, steps=1)


def test_a_profile_from_elsewhere_finds_the_allocator_it_was_made_with(
    zoo: SimpleNamespace, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit by a stored profile ran without the growing segments that were predicted."""
    workload = zoo.workload(zoo.Stack)
    measured = memfit.profile(workload)
    monkeypatch.setattr(api, "prefer_expandable_segments", lambda device: "it grows")
    fitted = fit(workload, "90%", profiled=measured)
    assert fitted.plan.notes.count("it grows") == 1
    fitted.undo()
    again = fit(workload, "90%", profiled=fitted.profile)
    assert again.plan.notes.count("it grows") == 1
