"""Stepping in backward through `fit`: accumulated batches, GradScalers, clipping, all at once."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.api import fit_workload
from memfit.errors import InfeasibleError
from memfit.fitted import Fitted
from memfit.ir.profile import Profile
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.planning.make_plan import Goal
from memfit.runtime.setup import Setup
from memfit.whole_step import whole_step
from memfit.workload import Workload

STEPS = 20
BUDGET = "95%"


@dataclass(frozen=True)
class Way:
    """What a loop does beside forward, backward and step."""

    accumulate: int = 1
    scaled: bool = False
    clip_norm: float | None = None
    scale: float = 2.0**24  # in the beginning, and every third time higher: some steps overflow

    def scaler(self) -> torch.amp.GradScaler | None:
        if not self.scaled:
            return None
        return torch.amp.GradScaler("cpu", init_scale=self.scale, growth_interval=3)


WAYS = {
    "accumulated": Way(3),
    "scaled": Way(scaled=True),
    "accumulated, clipped": Way(2, clip_norm=1e-2),
    "scaled, clipped": Way(scaled=True, clip_norm=1e-2),
    "accumulated, scaled": Way(2, scaled=True),
    "accumulated, scaled, clipped": Way(2, scaled=True, clip_norm=1e-2),
}


def build(way: Way = Way(), **options: Any) -> Workload:  # noqa: B008
    """More gradients than activations; dropout, statistics, two groups of weight decay."""
    torch.manual_seed(0)
    width = 128
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1))
    ]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        **{"lr": 1e-3, "foreach": True} | options,
    )

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16, enabled=way.scaled):
            logits = model(batch[0])
        return nn.functional.cross_entropy(logits.float(), batch[1])

    return Workload(model, loss_fn, optimizer, batch_of(0), name="layers", scaler=way.scaler())


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(number)
    return torch.randn(8, 128, generator=random), torch.randint(4, (8,), generator=random)


def halving(workload: Workload) -> Any:
    return torch.optim.lr_scheduler.StepLR(workload.optimizer, 5, gamma=0.5)


def everything(workload: Workload, scheduler: Any) -> dict[str, Any]:
    """All that a checkpoint holds."""
    scaler = workload.scaler
    return copy.deepcopy(
        {
            "model": dict(workload.model.state_dict()),
            "optimizer": workload.optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def load(workload: Workload, scheduler: Any, saved: dict[str, Any]) -> None:
    workload.model.load_state_dict(saved["model"])
    workload.optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    if workload.scaler is not None:
        workload.scaler.load_state_dict(saved["scaler"])
    torch.set_rng_state(saved["random"])


def train_plainly(workload: Workload, way: Way, scheduler: Any, steps: range) -> list[Any]:
    """The loop that everybody writes: losses, and scales after each step."""
    model, optimizer, scaler = workload.model, workload.optimizer, workload.scaler
    seen: list[Any] = []
    for step in steps:
        for part in range(way.accumulate):
            loss = workload.compute_loss(batch_of(step * way.accumulate + part))
            seen.append(loss.detach())
            loss = loss / way.accumulate if way.accumulate > 1 else loss
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if way.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), way.clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        optimizer.zero_grad()
        scheduler.step()
    return seen


def train_fitted(fitted: Fitted, way: Way, scheduler: Any, steps: range) -> list[Any]:
    seen: list[Any] = []
    for step in steps:
        for part in range(way.accumulate):
            batch = batch_of(step * way.accumulate + part)
            seen.append(fitted.step(batch, clip_norm=way.clip_norm, scheduler=scheduler))
        assert all(p.grad is None for p in fitted.workload.model.parameters())
        if fitted.workload.scaler is not None:
            seen.append(fitted.workload.scaler.get_scale())
    return seen


def fit(workload: Workload, way: Way, executor: str) -> Fitted:
    fitted = fit_workload(
        workload,
        BUDGET,
        allow="+step_in_backward",
        executor=executor,
        steps=1,
        accumulate=way.accumulate,
    )
    assert fitted.plan.setup == ("step_in_backward",), fitted.plan.choices
    return fitted


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # skipped
@pytest.mark.parametrize("executor", ["module", "graph"])
@pytest.mark.parametrize("name", WAYS)
def test_twenty_steps_are_those_of_the_plain_loop(name: str, executor: str) -> None:
    """With a schedule and groups of weight decay, and begun again from a checkpoint half way."""
    way = WAYS[name]
    plain, first, second = build(way), build(way), build(way)
    scheduler = halving(plain)
    torch.manual_seed(5)
    losses = train_plainly(plain, way, scheduler, range(STEPS))
    end = everything(plain, scheduler)

    scheduler = halving(first)
    with fit(first, way, executor) as fitted:
        torch.manual_seed(5)
        seen = train_fitted(fitted, way, scheduler, range(STEPS // 2))
        middle = everything(first, scheduler)
    scheduler = halving(second)
    with fit(second, way, executor) as fitted:
        load(second, scheduler, middle)
        seen += train_fitted(fitted, way, scheduler, range(STEPS // 2, STEPS))
        same(everything(second, scheduler), end)
    same(seen, losses)
    if way.scaled:
        scales = [value for value in losses if isinstance(value, float)]
        changes = [after / before for before, after in pairwise(scales)]
        assert min(changes) < 1, "some steps were skipped"
        assert changes.count(0.5) < len(changes) / 2, "most were not"


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_optimizer_unscales_by_itself(fused: bool) -> None:
    way = Way(scaled=True)
    kernels = {"fused": fused, "foreach": False}
    plain, other = build(way, **kernels), build(way, **kernels)
    setup = Setup(("step_in_backward",), other.model, other.optimizer, ["0", "4", "8"])
    torch.manual_seed(5)
    losses = [run_step(plain) for _ in range(STEPS)]
    with setup:
        torch.manual_seed(5)
        same([run_step(other) for _ in range(STEPS)], losses)
    assert plain.scaler is not None and other.scaler is not None
    assert other.scaler.state_dict() == plain.scaler.state_dict()
    same(dict(other.model.state_dict()), dict(plain.model.state_dict()))
    assert plain.scaler.get_scale() < 2.0**24, "some steps were skipped"


@pytest.mark.parametrize("executor", ["graph", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WAYS)
def test_the_budget_holds_and_is_predicted(name: str, executor: str) -> None:
    """Also with clipping, of which a plan does not know."""
    way = replace(WAYS[name], scale=2.0**8)  # a step that is skipped looks only
    workload = build(way)
    with fit(workload, way, executor) as fitted:
        result = fitted.result
        assert result.measured.peak_bytes <= result.budget_bytes
        assert abs(result.peak_error) < 0.01
        assert result.numerics.agree
        assert result.numerics.bitwise_vs_unplanned or executor == "inductor"
        assert "parameters are the same" in str(result.numerics.note)

        def step() -> None:
            for _ in range(way.accumulate):
                fitted.step(workload.batch, clip_norm=1e-2)

        with untouched(workload):
            step()
            peak = measure_peak(workload, step).bytes
        assert peak <= result.budget_bytes
        assert peak == pytest.approx(result.measured.peak_bytes, rel=0.01)


def test_a_last_group_that_is_shorter_steps_part_by_part() -> None:
    way = Way(3, scaled=True, scale=2.0**8)
    one, other = build(way), build(way)
    assert one.scaler is not None and other.scaler is not None
    with fit(one, way, "module") as fitted:
        torch.manual_seed(5)
        for number in range(2):
            fitted.step(batch_of(number))
        assert fitted.waiting == 2
        fitted.flush(clip_norm=1e-2)
        assert fitted.waiting == 0
        assert all(p.grad is None for p in one.model.parameters())
    torch.manual_seed(5)
    for number in range(2):
        other.scaler.scale(other.compute_loss(batch_of(number)) / 3).backward()
    for parameter in other.model.parameters():
        parameter.grad.mul_(3 / 2)
    other.scaler.unscale_(other.optimizer)
    nn.utils.clip_grad_norm_(other.model.parameters(), 1e-2)
    other.scaler.step(other.optimizer)
    other.scaler.update()
    same(dict(one.model.state_dict()), dict(other.model.state_dict()))
    same(one.optimizer.state_dict(), other.optimizer.state_dict())
    assert one.scaler.state_dict() == other.scaler.state_dict()


def test_what_it_costs_is_said() -> None:
    words = {
        Way(2): "only what the optimizer's step takes beside them is saved",
        Way(scaled=True): "forward and backward run twice",
        Way(): "with clip_norm forward and backward run twice",
    }
    for way, said in words.items():
        with fit(build(way), way, "module") as fitted:
            (choice,) = fitted.plan.choices
            assert said in choice.why
            assert choice.saved_bytes is not None and choice.saved_bytes > 0
            assert choice.cost_s is not None
            assert fitted.profile.passes == (2 if way.scaled else way.accumulate)


def test_a_second_pass_counts_as_a_slowdown_and_is_tried_last() -> None:
    """Of techniques that hold the budget the one that costs less is taken."""
    workload = build(Way(scaled=True))
    base = replace(memfit.profile(workload, executor="module"), baseline=None)
    sizes = {"optimizer_offload": 1.5, "step_in_backward": 1.9}
    tried: list[str] = []

    def measure(setup: Setup | None, split: int) -> Profile:
        assert setup is not None
        tried.append(setup.techniques[-1])
        slower = sizes[setup.techniques[-1]]
        graph = replace(base.graph, static={**base.graph.static, "optimizer_state": 0})
        return replace(base, graph=graph, step_s=slower * base.step_s, setup=setup.techniques)

    budget = memfit.plan(base).minimum_feasible_bytes - base.graph.static["optimizer_state"]
    asked: Callable[..., Goal] = partial(Goal, budget_bytes=budget + 2**16)
    both = asked(techniques=("recompute", *sizes), plain_step_s=base.step_s)
    found = whole_step(workload, base, both, None, measure)
    assert found.techniques == ("optimizer_offload",) and tried[:2] == list(sizes)
    one = replace(both, techniques=("recompute", "step_in_backward"))
    assert whole_step(workload, base, one, None, measure).techniques == ("step_in_backward",)
    with pytest.raises(InfeasibleError, match=r"costs 1\.9\d*x the plain step's time, more than"):
        whole_step(workload, base, replace(one, max_slowdown=1.33), None, measure)


def test_parts_of_a_batch_wait_for_the_last_one() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(256, 4))
    batch = torch.randn(512, 256), torch.randint(4, (512,))
    workload = Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), foreach=True),
        batch,
    )
    other = copy.deepcopy(workload)
    with fit_workload(
        workload, "87%", allow="microbatch,step_in_backward", executor="module", steps=1
    ) as fitted:
        assert fitted.plan.split > 1 and fitted.plan.setup == ("step_in_backward",)
        assert fitted.result.measured.peak_bytes <= fitted.result.budget_bytes
        assert fitted.result.numerics.agree
        for clip_norm in (None, 1e-2):
            fitted.step(batch, clip_norm=clip_norm)
    for clip_norm in (None, 1e-2):
        other.compute_loss().backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(other.model.parameters(), clip_norm)
        other.optimizer.step()
        other.optimizer.zero_grad()
    for parameter, value in zip(model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, value, rtol=1e-3, atol=1e-5)


def test_a_backward_beside_the_planned_step_trains_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It stepped the optimizer, on scaled gradients where there was a scaler."""
    workload = build()
    with fit(workload, Way(), "module"):
        before = copy.deepcopy(dict(workload.model.named_parameters()))
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                workload.compute_loss().backward()
        same(dict(workload.model.named_parameters()), before)
        assert all(p.grad is not None for p in workload.model.parameters())
        assert caplog.text.count("backward was called beside the planned step") == 1
        workload.optimizer.step()
        assert not torch.equal(workload.model[0].weight, before["0.weight"])


def test_a_set_up_that_is_forgotten_keeps_nothing_alive() -> None:
    workload = build()
    setup = Setup(("step_in_backward",), workload.model, workload.optimizer).install()
    run_step(workload)
    gone = weakref.ref(workload.optimizer)
    del workload, setup
    gc.collect()
    assert gone() is None


class Lion(torch.optim.Optimizer):
    """An optimizer that nobody but its author knows."""

    separable = True

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(group["lr"] * momentum.lerp(p.grad, 0.1).sign())
                momentum.lerp_(p.grad, 0.01)


def test_no_option_vouched_for_an_optimizer_of_ones_own() -> None:
    """What the hint said to give could not be given to a fit."""
    workload, plain = (
        replace(made, optimizer=Lion(made.model.parameters())) for made in (build(), build())
    )
    way = Way(clip_norm=1e-2)
    torch.manual_seed(5)
    losses = train_plainly(plain, way, halving(plain), range(3))
    with fit(workload, way, "module") as fitted:
        torch.manual_seed(5)
        same(train_fitted(fitted, way, halving(workload), range(3)), losses)
        same(dict(workload.model.state_dict()), dict(plain.model.state_dict()))
