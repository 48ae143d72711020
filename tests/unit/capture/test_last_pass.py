"""Of a step that runs forward more than once, the last pass counts, with what stands in it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.last_pass import PASS, Standing, last_pass
from memfit.measure.allocations import Event
from memfit.planning.simulate import Simulator
from memfit.runtime.setup import Setup
from memfit.workload import Workload


def alloc(address: int, size: int) -> Event:
    return Event("alloc", address, size, "")


def free(address: int) -> Event:
    return Event("free", address, 0, "")


def mark(label: str) -> Event:
    return Event("mark", 0, 0, label)


def test_what_was_made_before_and_is_there_still_stands() -> None:
    earlier = [mark(PASS), alloc(1, 10), alloc(2, 20), alloc(3, 30), free(2)]
    last = [mark(PASS), mark("gradient 3"), alloc(2, 40), free(3)]
    events, standing = last_pass([*earlier, *last])
    assert list(events) == last
    assert standing == [Standing(10, "temporaries"), Standing(30, "gradients")]


def test_a_step_of_one_pass_is_all_of_it() -> None:
    events = [mark(PASS), alloc(1, 10), free(1)]
    assert last_pass(events) == (events, [])
    assert last_pass(events[1:]) == (events[1:], [])


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_peak_of_a_step_in_backward_is_predicted(accumulate: int, scaled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    workload = Workload(
        model,
        lambda model, batch: model(batch).square().mean(),
        torch.optim.AdamW(model.parameters(), foreach=True),
        torch.randn(4, 64),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0) if scaled else None,
    )
    names = [str(number) for number in range(6)]
    setup = Setup(("step_in_backward",), model, workload.optimizer, names)
    profile = memfit.profile(workload, executor="module", accumulate=accumulate, setup=setup)
    simulator = Simulator(profile)
    assert profile.baseline is not None
    states = 2 * torch.get_rng_state().nbytes  # of random numbers, between two passes
    assert simulator.peak_bytes([]) == pytest.approx(profile.baseline.peak_bytes, abs=states)
    gradients = sum(p.nbytes for p in model.parameters())
    standing = simulator.timeline([]).points[0].bytes["gradients"]
    assert standing == (gradients if accumulate > 1 else 0)
    assert profile.passes == max(accumulate, 2 if scaled else 1)
