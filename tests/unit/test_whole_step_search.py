"""How ways to run the whole step are searched, on profiles with made-up bytes and seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.api import fit_workload
from memfit.errors import InfeasibleError, UsageError
from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal
from memfit.planning.simulate import simulator_of
from memfit.planning.trials import Trial, is_better, nearest
from memfit.runtime.setup import Setup
from memfit.runtime.split import part_of
from memfit.whole_step import Whole, whole_step
from memfit.workload import Workload

MIB = 2**20


def net(rows: int = 4, width: int = 64) -> Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 4))
    batch = torch.randn(rows, width), torch.randint(4, (rows,))
    return Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), fused=True),
        batch,
        name="net",
    )


class Steps:
    """Profiles of a step whose techniques free and cost what `frees` and `costs` say.

    `frees` is in units of what any plan could save by itself, `costs` in plain steps; both are
    given the techniques at work and the parts.
    """

    def __init__(
        self,
        frees: Callable[[set[str], int], float],
        costs: Callable[[set[str], int], float] = lambda techniques, split: 0.0,
    ) -> None:
        self.workload = net()
        plain = memfit.profile(self.workload, executor="module")
        self.unit = simulator_of(plain).peak_bytes([])
        static = {**plain.graph.static, "buffers": 10 * self.unit}
        graph = replace(plain.graph, static=static)
        self.base = replace(plain, graph=graph, baseline=None)
        self.seen: list[tuple[tuple[str, ...], int]] = []
        self.frees, self.costs = frees, costs

    def measure(self, setup: Setup | None, split: int) -> Profile:
        names = () if setup is None else setup.techniques
        self.seen.append((names, split))
        static = dict(self.base.graph.static)
        static["buffers"] -= int(self.frees({*names}, split) * self.unit)
        return replace(
            self.base,
            graph=replace(self.base.graph, static=static),
            step_s=(1 + self.costs({*names}, split)) * self.base.step_s,
            setup=names,
            split=split,
        )

    def found(self, *techniques: str, free: float, **options: float) -> Whole:
        """The best way by these techniques, for a budget that needs so much freed."""
        goal = Goal(
            budget_bytes=int((11 - free) * self.unit),
            techniques=("recompute", *techniques),
            plain_step_s=self.base.step_s,
            **options,
        )
        return whole_step(self.workload, self.base, goal, None, self.measure)


PAIR = {"step_in_backward", "tiled_loss"}


def test_a_budget_that_two_techniques_hold_only_together_was_refused() -> None:
    """Two peaks tied, so that neither technique alone brought the smallest budget down."""
    steps = Steps(lambda techniques, split: 3.0 * (techniques >= PAIR))
    whole = steps.found(*PAIR, free=2)
    assert {*whole.techniques} == PAIR
    assert all(choice.taken and "together with" in choice.why for choice in whole.choices)
    peaks = [simulator_of(profile).peak_bytes([]) for profile in (steps.base, whole.profile)]
    assert sum(choice.saved_bytes or 0 for choice in whole.choices) == peaks[0] - peaks[1]
    assert len(steps.seen) == 3, "one profile more, and none to see that both are needed"


def test_the_smallest_budget_was_that_of_techniques_one_by_one() -> None:
    steps = Steps(lambda techniques, split: 3.0 * (techniques >= PAIR))
    with pytest.raises(InfeasibleError) as refusal:
        steps.found(*PAIR, free=4)
    assert refusal.value.minimum_bytes is not None
    assert refusal.value.minimum_bytes <= 8 * steps.unit
    assert "step_in_backward: taken: together with tiled_loss" in refusal.value.message


def test_what_does_not_matter_is_not_taken_with_what_does() -> None:
    steps = Steps(lambda techniques, split: 3.0 * (techniques >= PAIR))
    whole = steps.found(*PAIR, "optim_8bit", "optim_bf16_sr", free=2)
    assert {*whole.techniques} == PAIR
    (other,) = (c for c in whole.choices if c.name == "optim_8bit")
    assert not other.taken and "given back" in other.why
    assert all(len({"optim_8bit", "optim_bf16_sr"} & {*names}) <= 1 for names, _ in steps.seen)


def test_parts_and_a_technique_that_hold_only_together() -> None:
    def frees(techniques: set[str], split: int) -> float:
        return 3.0 * (split > 1 and "step_in_backward" in techniques)

    steps = Steps(frees)
    whole = steps.found("step_in_backward", "microbatch", free=2)
    assert whole.techniques == ("step_in_backward",) and whole.split == 2
    assert {c.name: c.taken for c in whole.choices} == dict.fromkeys(
        ("step_in_backward", "microbatch"), True
    )


class Tied(nn.Module):
    """Logits as large as the optimizer's temporaries and gradients."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(256, 4000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_tied_peaks_of_logits_and_gradients_were_refused() -> None:
    torch.manual_seed(0)
    model = Tied()
    workload = Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), foreach=True),
        (torch.randn(255, 256), torch.randint(4000, (255,))),
    )
    allow = ["recompute", "tiled_loss", "step_in_backward"]
    with fit_workload(workload, "28MiB", allow=allow, executor="module", steps=1) as fitted:
        assert {*fitted.plan.setup} == PAIR
        assert fitted.result.measured.peak_bytes <= fitted.result.budget_bytes
        assert fitted.result.numerics.agree


def test_parts_went_on_for_a_slowdown_that_they_made_worse() -> None:
    """Two parts held the memory, and 256 were taken because a refusal for time has bytes, too."""
    workload = net(rows=4096)
    base = replace(memfit.profile(workload, executor="module"), baseline=None, step_s=1.0)
    least = memfit.plan(base, allow="recompute").minimum_feasible_bytes
    seen: list[int] = []

    def measure(setup: Setup | None, split: int) -> Profile:
        seen.append(split)
        profile = memfit.profile(part_of(workload, split), executor="module", accumulate=split)
        return replace(profile, split=split, step_s=1 + 0.06 * split, baseline=None)

    goal = Goal(
        budget_bytes=least - MIB,
        techniques=("recompute", "microbatch"),
        max_slowdown=1.01,
        plain_step_s=1.0,
    )
    with pytest.raises(InfeasibleError) as refusal:
        whole_step(workload, base, goal, None, measure)
    assert seen == [2]
    assert refusal.value.slowdown == pytest.approx(1.12, abs=0.01)
    assert "allow --max-slowdown 1.1" in str(refusal.value.hint)
    assert "a plan holds the memory now, in 1.1" in refusal.value.message
    found = whole_step(workload, base, replace(goal, max_slowdown=1.13), None, measure)
    assert found.split == 2


def test_of_two_that_take_too_long_the_hint_is_about_the_faster() -> None:
    costs = {"step_in_backward": 0.9, "tiled_loss": 0.4}

    def cost(techniques: set[str], split: int) -> float:
        return sum(costs[name] for name in techniques)

    steps = Steps(lambda techniques, split: 3.0 * bool(techniques), cost)
    with pytest.raises(InfeasibleError, match=r"costs 1\.4\d*x the plain") as refusal:
        steps.found(*PAIR, free=2, max_slowdown=1.2)
    assert refusal.value.slowdown == pytest.approx(1.4, abs=0.01)
    assert "what the plan takes from 1.400x to 2.300x" in refusal.value.message
    whole = steps.found(*PAIR, free=2, max_slowdown=1.41)
    assert whole.techniques == ("tiled_loss",)


def test_what_took_too_long_beside_a_needless_technique_was_refused() -> None:
    costs = {"step_in_backward": 0.3, "tiled_loss": 0.1}
    frees = {"step_in_backward": 1.0, "tiled_loss": 3.0}

    def cost(techniques: set[str], split: int) -> float:
        return sum(costs[name] for name in techniques)

    def free(techniques: set[str], split: int) -> float:
        return sum(frees[name] for name in techniques)

    whole = Steps(free, cost).found("step_in_backward", "tiled_loss", free=2, max_slowdown=1.2)
    assert whole.techniques == ("tiled_loss",)


def test_memory_that_does_not_fit_is_no_better_than_too_much_time() -> None:
    """Fewer bytes of a smallest budget were preferred to a plan that only took too long."""
    refusals = [
        InfeasibleError("time", minimum_bytes=9, slowdown=1.5),
        InfeasibleError("memory", minimum_bytes=5),
    ]
    assert refusals[0].saying(", it says").slowdown == 1.5
    profile = Steps(lambda techniques, split: 0.0).base
    slow, large = (Trial(profile, None, refusal) for refusal in refusals)
    assert is_better(slow, large)
    assert not is_better(large, slow)
    assert nearest([large, slow]) is refusals[0]


def test_a_technique_that_a_later_one_made_needless_stayed() -> None:
    """The first brought the smallest budget down; the second alone would have held this one."""
    costs = {"step_in_backward": 0.3, "tiled_loss": 0.1}
    frees = {"step_in_backward": 1.0, "tiled_loss": 3.0}

    def cost(techniques: set[str], split: int) -> float:
        return sum(costs[name] for name in techniques)

    def free(techniques: set[str], split: int) -> float:
        return sum(frees[name] for name in techniques)

    steps = Steps(free, cost)
    whole = steps.found("step_in_backward", "tiled_loss", free=2)
    assert whole.techniques == ("tiled_loss",)
    taken, given_back = whole.choices
    assert taken.taken and taken.cost_s == pytest.approx(0.1 * steps.base.step_s)
    assert taken.saved_bytes == pytest.approx(3 * steps.unit, abs=2)
    assert not given_back.taken and given_back.why.startswith("given back: without it")

    costs["step_in_backward"] = 0.01
    steps = Steps(free, cost)
    whole = steps.found("step_in_backward", "tiled_loss", free=2)
    assert whole.techniques == ("step_in_backward", "tiled_loss")
    assert len(steps.seen) == 2, "what costs next to nothing is not worth a profile"


def test_more_parts_than_a_later_technique_needs_stayed() -> None:
    """Four were needed without it; beside it two are, and it is of use in parts only."""

    def frees(techniques: set[str], split: int) -> float:
        return 0.5 * math.log2(split) + 0.5 * (bool(techniques) and split > 1)

    def costs(techniques: set[str], split: int) -> float:
        return 0.3 * math.log2(split) - 0.1 * bool(techniques)

    steps = Steps(frees, costs)
    whole = steps.found("microbatch", "step_in_backward", free=0.95)
    assert ((), 4) in steps.seen and whole.split == 2
    assert whole.techniques == ("step_in_backward",)
    costs_s = {choice.name: choice.cost_s for choice in whole.choices}
    assert sum(cost or 0 for cost in costs_s.values()) == pytest.approx(0.2 * steps.base.step_s)


ALL = ("step_in_backward", "tiled_loss", "optimizer_offload", "optim_8bit", "microbatch")


@pytest.mark.parametrize("seed", range(20))
def test_the_account_adds_up_whatever_ways_turn_out_to_be(seed: int) -> None:
    """Bytes, seconds, and what is possible are drawn by chance for each way."""

    def drawn(what: str, techniques: set[str], split: int) -> random.Random:
        return random.Random(f"{seed} {what} {sorted(techniques)} {split}")

    def frees(techniques: set[str], split: int) -> float:
        chance = drawn("bytes", techniques, split)
        if techniques and chance.random() < 0.1:
            raise UsageError("not with these", hint="others")
        return sum(chance.choice((0.0, 0.0, 0.4, 1.0)) for _ in range(len(techniques) + split))

    def costs(techniques: set[str], split: int) -> float:
        return drawn("seconds", techniques, split).choice((-0.1, 0.0, 0.03, 0.3, 1.0))

    steps = Steps(frees, costs)
    slowest = random.Random(seed).choice((None, 1.05, 1.5))
    options = {} if slowest is None else {"max_slowdown": slowest}
    for free in (0.5, 1.5, 2.5):
        try:
            whole = steps.found(*ALL, free=free, **options)
        except InfeasibleError as refusal:
            assert "Tried beside recompute" in refusal.message
            continue
        taken = [choice for choice in whole.choices if choice.taken]
        names = {*whole.techniques, *(["microbatch"] if whole.split > 1 else [])}
        assert {choice.name for choice in taken} == names
        peaks = [simulator_of(profile).peak_bytes([]) for profile in (steps.base, whole.profile)]
        assert sum(choice.saved_bytes or 0 for choice in taken) == peaks[0] - peaks[1]
        seconds = sum(choice.cost_s or 0.0 for choice in taken)
        assert seconds == pytest.approx(whole.profile.step_s - steps.base.step_s)
