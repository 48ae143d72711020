"""What the ways to run a step need: recompute in runs, and stepping in backward without a host."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import InfeasibleError
from memfit.estimating.estimate import estimate
from memfit.estimating.history import Block, History, Moment
from memfit.estimating.needs import needs_of, runs_by_length
from memfit.ir.cards import MIB
from memfit.planning.make_plan import Goal, make_plan
from memfit.workload import Workload

WIDTH, ROWS = 64, 512


def layers(model: nn.Module) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(ROWS, WIDTH)
    return Workload(model, lambda m, b: m(b).square().mean(), optimizer, batch)


def plain_layers() -> Workload:
    pairs = [m for _ in range(8) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return layers(nn.Sequential(*pairs, nn.Linear(WIDTH, 1)))


def test_recompute_of_plain_layers_saved_nothing() -> None:
    """Each saves only its input, which stayed: runs of them are what a plan recomputes."""
    needs = estimate(plain_layers, as_on_cuda=False).needs
    assert needs.recompute_bytes < 0.65 * needs.plain_bytes
    profile = memfit.profile(plain_layers(), executor="module")
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(profile, Goal(activation_reduction=0.99))
    smallest = refusal.value.minimum_bytes
    assert smallest is not None
    assert 0.75 * smallest < needs.recompute_bytes < 1.25 * smallest


def test_what_a_layer_further_on_takes_stays() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.add = nn.Bilinear(WIDTH, WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.a(x)
            return self.add(self.c(self.b(first)), first)

    needs = estimate(lambda: layers(Skipping()), as_on_cuda=False).needs
    kept = 4 * ROWS * WIDTH
    assert needs.plain_bytes - needs.recompute_bytes <= kept, "what a made is held for the last"


def test_runs_follow_chains_and_double() -> None:
    chained = [False, True, True, False, True, True, True, True]
    alone, pairs, fours, eights = runs_by_length(chained)
    assert alone == [range(call, call + 1) for call in range(8)]
    assert pairs == [range(0, 2), range(2, 3), range(3, 5), range(5, 7), range(7, 8)]
    assert fours == [range(0, 3), range(3, 7), range(7, 8)]
    assert eights == [range(0, 3), range(3, 8)]
    assert runs_by_length([]) == [[]]
    assert runs_by_length([False, False]) == [[range(0, 1), range(1, 2)]]


def a_step(*blocks: Block) -> History:
    """Three segments forward and back, then the optimizer: a moment each."""
    forward = [Moment("forward", segment) for segment in range(3)]
    backward = [Moment("backward", segment) for segment in (2, 1, 0)]
    return History(list(blocks), [*forward, *backward, Moment("optimizer", -1)])


def test_a_run_has_all_it_dropped_at_once() -> None:
    first = Block(10, 0, "activations", "", 5, {1}, {1})  # made by 0 for 1
    second = Block(10, 1, "activations", "", 4, {2}, {2})  # made by 1 for 2
    history = a_step(first, second)
    alone, pairs, fours = runs_by_length([False, True, True])
    assert list(history.recomputed(alone)) == list(history.total), "inputs stay"
    assert list(history.recomputed(pairs)) == [10, 20, 10, 10, 10, 0, 0]
    assert list(history.recomputed(fours)) == list(history.total)


def test_what_was_made_outside_of_segments_stays() -> None:
    outside = Block(10, 6, "activations", "", 7, {0}, {0})
    history = a_step(outside)
    for runs in runs_by_length([False, True, True]):
        assert list(history.recomputed(runs)) == list(history.total)


def test_a_step_of_temporaries_alone_was_sent_to_the_host() -> None:
    """Where what an optimizer takes for its step is the peak, stepping in backward is enough."""
    parameters = Block(30, 0, "parameters", "", 7)
    state = Block(60, 0, "optimizer_state", "", 7)
    gradients = [Block(10, 3 + n, "gradients", "", 7) for n in range(3)]
    copies = Block(30, 6, "temporaries", "", 7)
    lengths = runs_by_length([False] * 3)
    needs = needs_of(a_step(parameters, state, *gradients, copies), None, lengths, 10)
    assert (needs.plain_bytes, needs.recompute_bytes) == (150, 150)
    assert needs.step_in_backward_bytes == 90 + 2 * 10, "one segment's gradients and copies"
    assert needs.step_in_backward_bytes == needs.tiled_loss_step_in_backward_bytes


def test_an_optimizer_that_copies_is_advised_to_step_in_backward() -> None:
    def build() -> Workload:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(16)))
        optimizer = torch.optim.AdamW(model.parameters())
        return Workload(model, lambda m, b: m(b).mean(), optimizer, torch.ones(8, 256))

    made = estimate(build)
    assert made.where == "optimizer"
    budget = int(1.05 * made.needs.step_in_backward_bytes)
    assert budget < made.needs.recompute_bytes - MIB
    assert estimate(build, budget).cards[0].way == "step in backward"


def test_longer_runs_never_raise_a_need() -> None:
    def of(count: int) -> int:
        blocks = [m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        return estimate(lambda: layers(nn.Sequential(*blocks)), as_on_cuda=False).needs.all_bytes

    assert all(fewer <= more for fewer, more in pairwise(map(of, (2, 4, 8))))
