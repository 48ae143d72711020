"""Images with their channels last: who gets them, and what compiled segments copy otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit import api, attempts
from memfit.capture import profile as profiling
from memfit.capture import usual
from memfit.capture.learn import learn_variants
from memfit.errors import InfeasibleError
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.segment.passes import variant_of
from memfit.runtime.apply import Applied
from memfit.runtime.layout import channels_last, prefers_channels_last
from memfit.workload import Workload


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


class Net(nn.Module):
    """With `views` it asks for a view that images with their channels last do not have."""

    def __init__(self, views: bool = False) -> None:
        super().__init__()
        self.views = views
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(3)))
        self.head = nn.Linear(16, 4)

    def forward(self, image: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.blocks(self.stem(image * scale))
        pooled = x.view(x.shape[0], -1)[:, :16] if self.views else x.mean((2, 3))
        return self.head(pooled)


def _workload(model: nn.Module, images: torch.Tensor | None = None) -> Workload:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    torch.manual_seed(0)
    batch = torch.randn(8, 3, 24, 24) if images is None else images
    return Workload(model, loss, torch.optim.SGD(model.parameters(), lr=0.01), batch)


def test_convolutions_prefer_it() -> None:
    assert prefers_channels_last(_workload(Net()))


def test_linear_layers_do_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(288, 8), nn.Linear(8, 4))
    assert not prefers_channels_last(_workload(model))


def test_grouped_convolutions_do_not() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=4))
    assert not prefers_channels_last(_workload(model, torch.randn(2, 4, 9, 9)))


def test_code_that_asks_for_views_is_left_alone() -> None:
    workload = _workload(Net(views=True))
    workload.compute_loss()
    assert not prefers_channels_last(workload)


def test_only_images_are_turned_around_and_only_inside() -> None:
    seen: list[torch.Tensor] = []

    class Seeing(nn.Module):
        def forward(self, image: torch.Tensor, row: torch.Tensor, *, other: torch.Tensor) -> None:
            seen.extend((image, row, other))

    model = Seeing()
    image, row = torch.randn(2, 3, 5, 5), torch.randn(2, 3)
    whole = torch.ones(2, 3, 5, 5, dtype=torch.long)
    with channels_last(model, True):
        model(image, row, other=whole)
    model(image, row, other=whole)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(seen[0], image)
    assert seen[1] is row and seen[2] is whole
    assert seen[3] is image
    with channels_last(model, False):
        model(image, row, other=whole)
    assert seen[6] is image


def test_only_fused_code_asks_for_it() -> None:
    assert not memfit.profile(_workload(Net()), executor="graph").channels_last


def test_a_plan_gives_images_as_the_profile_did() -> None:
    workload = _workload(Net())
    profile = memfit.profile(workload, executor="inductor")
    assert profile.channels_last
    assert any("channels last" in note for note in profile.notes)
    for graph in profile.graphs:  # no activation is copied: they come as they are wanted
        assert all(graph.nodes[n].role == "parameter" for n in graph.copied)
    strides = []
    plan = make_plan(profile, Goal(strategy="none"))
    assert plan.channels_last
    hook = workload.model.blocks.register_forward_pre_hook(
        lambda module, args: strides.append(args[0].stride())
    )
    with Applied(plan, workload.model):
        workload.compute_loss()
    workload.compute_loss()
    hook.remove()
    turned, plain = strides
    assert turned[1] == 1 and plain[3] == 1


def test_copies_of_inputs_are_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it every block keeps a copy of its input: reckoned as it is measured later."""
    monkeypatch.setattr(profiling, "prefers_channels_last", lambda workload: False)
    workload = _workload(Net())
    profile = memfit.profile(workload, executor="inductor")
    copied = [graph.nodes[n].role for graph in profile.graphs for n in graph.copied]
    assert "input" in copied
    assert profile.baseline is not None
    budget = int(0.75 * profile.baseline.peak_bytes)
    learned = learn_variants(workload, profile, make_plan(profile, Goal(budget_bytes=budget)))
    assert learned is not None
    pairs = [
        (variant, variant_of(graph, variant.saved))
        for graph, known in zip(learned.graphs, learned.known, strict=True)
        for variant in known.variants
        if variant.measured
    ]
    assert pairs
    for measured, reckoned in pairs:
        assert measured.held_bytes == pytest.approx(reckoned.held_bytes, rel=0.02)
    blind = [replace(graph, copied=()) for graph in learned.graphs]
    assert any(
        variant_of(graph, v.saved).held_bytes < 0.9 * v.held_bytes
        for graph, known in zip(blind, learned.known, strict=True)
        for v in known.variants
        if v.measured
    )


def test_nobody_asked_and_the_host_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions by their layers then, in the same layout; a fit compares with that step."""
    monkeypatch.setattr(usual, "is_launch_bound", lambda workload: True)
    workload = _workload(Net())
    profile = profiling.profile_workload(workload, executor=None)
    assert (profile.executor, profile.channels_last) == ("module", True)
    assert profiling.BY_LAYERS in profile.notes
    assert profile.baseline is not None
    budget = int(0.8 * profile.baseline.peak_bytes)
    fitted = memfit.fit_workload(workload, budget, profiled=profile, steps=2, allow="recompute")
    result = fitted.result
    fitted.undo()
    assert fitted.plan.channels_last and not fitted.plan.unplanned_is_plain
    assert result.numerics.bitwise_vs_unplanned
    assert result.numerics.eager_max_rel_diff is not None
    assert result.measured.peak_bytes <= budget


def test_nobody_asked_and_the_device_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "is_launch_bound", lambda workload: False)
    assert _usual(convolutions=True) == "inductor"


def test_what_is_launched_as_cuda_graphs_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "is_launch_bound", lambda workload: True)
    assert _usual(convolutions=True) == "module"
    assert _usual(convolutions=True, cuda_graphs=True) == "inductor"
    monkeypatch.setattr(usual, "is_launch_bound", lambda workload: bool(torch.rand(1) < 2))
    assert _usual(convolutions=True, cuda_graphs=True) == "module"  # its step draws numbers


def test_other_models_are_compiled() -> None:
    assert _usual(convolutions=False) == "inductor"


def _usual(*, convolutions: bool, cuda_graphs: bool = False) -> str:
    workload = _workload(Net())
    return usual.usual_executor(workload, convolutions=convolutions, cuda_graphs=cuda_graphs)


def test_a_host_that_is_always_busy_is_launch_bound() -> None:
    assert usual.is_launch_bound(_workload(Net()))  # a CPU does its work itself


def test_a_plain_step_without_room_is_not_launch_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(workload: Workload) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(usual, "run_step", no_room)
    assert not usual.is_launch_bound(_workload(Net()))


def test_a_layout_can_be_asked_for() -> None:
    assert memfit.profile(_workload(Net()), executor="module", channels_last=True).channels_last
    plain = memfit.profile(_workload(Net()), executor="module")
    assert not plain.channels_last and profiling.BY_LAYERS not in plain.notes


def test_what_layers_cannot_hold_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "is_launch_bound", lambda workload: True)
    monkeypatch.setattr(api, "resolve_executor", lambda name, device: name)
    real, tried = attempts.hold_budget, []

    def picky(workload: Any, profile: Any, *rest: Any) -> Any:
        tried.append(profile.executor)
        if profile.executor == "module":
            raise InfeasibleError("not by layers")
        return real(workload, profile, *rest)

    monkeypatch.setattr(attempts, "hold_budget", picky)
    workload = _workload(Net())
    fitted = memfit.fit_workload(workload, "80%", steps=1)
    fitted.undo()
    assert tried == ["module", "inductor"], "before any other technique"
    assert fitted.plan.executor == "inductor" and fitted.plan.channels_last
    tried.clear()
    with pytest.raises(InfeasibleError):
        memfit.fit_workload(workload, "80%", steps=1, allow="recompute", executor="module")
    assert tried == ["module"]
