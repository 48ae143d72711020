"""Profiling: what it predicts, and that it leaves no trace."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from memfit.capture import profile as profiling
from memfit.capture.profile import profile_workload
from memfit.errors import ModelError
from memfit.ir.profile import Profile
from memfit.measure.memory import measure_peak, static_bytes
from memfit.measure.step import run_step, untouched
from memfit.planning.acts import Run
from memfit.planning.simulate import Simulator
from memfit.runtime.calls import Route, routed
from memfit.runtime.inplace import inplace_off
from memfit.runtime.recompute import Recompute
from memfit.workload import Workload


def _measured_peak(workload: Workload, profile: Profile, runs: Sequence[Run]) -> int:
    """The peak of a step that really recomputes `runs`."""
    modules = dict(workload.model.named_modules())
    calls = profile.graph.calls
    engine = Recompute(
        runs,
        {c.index: modules[c.module] for c in calls},
        {c.index: c.mutated_buffers for c in calls},
    )
    route = Route([(c.module, c.number, c.visits) for c in calls], profile.graph.model_calls)
    with (
        untouched(workload),
        inplace_off(workload.model, profile.inplace_off),
        routed(workload.model, route, engine),
    ):
        run_step(workload)
        return measure_peak(workload, lambda: run_step(workload)).bytes


def _random_runs(profile: Profile, seed: int) -> list[Run]:
    chooser = random.Random(seed)
    runs: list[Run] = []
    candidates = profile.graph.runs(4)
    for run in chooser.sample(candidates, len(candidates)):
        if all(run[1] < first or last < run[0] for first, last in runs) and chooser.random() < 0.6:
            runs.append(run)
    return sorted(runs)


def _autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(batch).float().square().mean()


def _about(size: int) -> Any:
    """Within 0.2 %, or one state of the random generator, which a replay sets aside."""
    return pytest.approx(size, rel=0.002, abs=5_100)


CASES: dict[str, dict[str, Any]] = {
    "Stack": {},
    "Reused": {},
    "SkipNet": {},
    "CountingNet": {},
    "ArgumentsNet": {},
    "AttentionNet": {},
    "ConvNet": {"images": True},
    "PreActivationNet": {"images": True},
    "autocast": {"model": "Stack", "loss": _autocast},
}


@pytest.mark.parametrize("case", CASES)
def test_the_simulated_peak_is_the_measured_one(zoo: SimpleNamespace, case: str) -> None:
    options = CASES[case]
    batch = (lambda: zoo.images(32)) if options.get("images") else (lambda: zoo.sequences(256))
    loss = options.get("loss", zoo.squared)
    workload = zoo.workload(getattr(zoo, options.get("model", case)), batch, loss)
    profile = profile_workload(workload, rounds=1)
    assert profile.baseline is not None
    simulator = Simulator(profile)
    assert simulator.peak_bytes([]) == pytest.approx(profile.baseline.peak_bytes, rel=0.002)
    every = [(c.index, c.index) for c in profile.graph.calls if not c.leaf and c.pinned is None]
    whole = max(profile.graph.runs(4), key=lambda run: run[1] - run[0])
    choices = [every, [whole], *(_random_runs(profile, seed) for seed in range(3))]
    for runs in choices:
        measured = _measured_peak(workload, profile, runs)
        assert simulator.peak_bytes(runs) == _about(measured), runs


def test_arguments_from_further_back_are_kept_by_a_run(zoo: SimpleNamespace) -> None:
    """The replay of a run makes only what the call before returns."""
    profile = profile_workload(zoo.workload(zoo.SkipNet), rounds=1)
    calls = {c.name: c for c in profile.graph.calls}
    (skip,) = calls["blocks.1"].args
    assert calls["blocks.1"].linked == (skip,)
    assert skip in calls["blocks.2"].args
    assert skip not in calls["blocks.2"].linked
    assert skip in profile.graph.held_arguments(calls["blocks.0"].index, calls["blocks.3"].index)


def test_a_tensor_handed_through_a_block_is_linked(zoo: SimpleNamespace) -> None:
    class Through(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x) + bias, bias

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=1)
            self.blocks = nn.ModuleList(Through() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            bias = x.sin()
            for block in self.blocks:
                x, bias = block(x, bias)
            return self.head(x)

    workload = zoo.workload(Net, lambda: zoo.sequences(256))
    profile = profile_workload(workload, rounds=1)
    calls = {c.name: c for c in profile.graph.calls}
    assert set(calls["blocks.2"].linked) == set(calls["blocks.2"].args)
    run = (calls["blocks.0"].index, calls["blocks.2"].index)
    measured = _measured_peak(workload, profile, [run])
    assert Simulator(profile).peak_bytes([run]) == _about(measured)


def test_a_leaf_that_saves_only_the_batch_can_stand_in_a_run() -> None:
    """An embedding saves its indices, which are there before the step."""

    class Positions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach().cumsum(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(10, 8)
            self.positions = Positions()
            self.head = nn.Linear(8, 2)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens)
            return self.head(x + self.positions(x))

    torch.manual_seed(0)
    model = Net()
    workload = Workload(
        model,
        lambda m, b: m(b).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.randint(10, (4, 5)),
    )
    profile = profile_workload(workload, rounds=1)
    simulator = Simulator(profile)
    runs = profile.graph.runs(4)
    assert (0, 1) in runs
    for run in runs:
        assert all(extra >= 0 for _, extra, _ in simulator.effect(run).inside)


def test_call_times_cover_the_step(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack, lambda: zoo.sequences(256))
    profile = profile_workload(workload, rounds=2)
    assert len(profile.call_times) == len(profile.graph.calls)
    assert all(t.forward_s > 0 and t.recompute_s > 0 for t in profile.call_times)
    assert sum(t.forward_s + t.backward_s for t in profile.call_times) < 3 * profile.step_s
    # Calls that are alike share their times.
    blocks = [t for t, c in zip(profile.call_times, profile.graph.calls, strict=True) if not c.leaf]
    assert len({t.forward_s for t in blocks[1:]}) == 1


def test_static_bytes_and_gradients(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    profile = profile_workload(workload, rounds=1)
    weights = sum(p.nbytes for p in workload.model.parameters())
    assert profile.graph.static["parameters"] == weights
    assert profile.graph.static["batch"] == workload.batch.nbytes
    # AdamW: two moments and a counter for each parameter, made by the warm-up.
    counters = 4 * len(list(workload.model.parameters()))
    assert profile.graph.static["optimizer_state"] == 2 * weights + counters
    assert profile.graph.gradient_bytes == weights
    assert static_bytes(workload)["optimizer_state"] == 0, "the warm-up left nothing behind"


class _Trace:
    """Everything about a workload that profiling must leave alone."""

    def __init__(self, workload: Workload) -> None:
        model, optimizer = workload.model, workload.optimizer
        self.modes = {n: m.training for n, m in model.named_modules()}
        self.inplace = {n: getattr(m, "inplace", None) for n, m in model.named_modules()}
        self.own = {n: sorted(m.__dict__) for n, m in model.named_modules()}
        self.forwards = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
        self.hooks = {
            n: [list(hooks) for name, hooks in sorted(m.__dict__.items()) if "_hooks" in name]
            for n, m in model.named_modules()
        }
        self.identity = [id(t) for t in [*model.parameters(), *model.buffers()]]
        self.addresses = [t.data_ptr() for t in [*model.parameters(), *model.buffers()]]
        self.rng = torch.get_rng_state()
        tensors = {
            "state": model.state_dict(),
            "gradients": {n: p.grad for n, p in model.named_parameters()},
            "optimizer": [dict(s) for s in optimizer.state.values()],
            "batch": workload.batch,
        }
        self.tensors = copy.deepcopy(tensors)
        self.groups = copy.deepcopy(
            [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        )

    def check(self, workload: Workload) -> None:
        now = _Trace(workload)
        for name in ("modes", "inplace", "own", "forwards", "hooks", "identity", "addresses"):
            assert getattr(now, name) == getattr(self, name), name
        assert now.groups == self.groups
        assert torch.equal(now.rng, self.rng)
        for name, old in self.tensors.items():
            torch.testing.assert_close(now.tensors[name], old, rtol=0, atol=0)


def _prepared(zoo: SimpleNamespace, warm: bool) -> Workload:
    """A workload in a state of its own: modes, hooks, gradients, maybe optimizer state."""
    workload = zoo.workload(zoo.PreActivationNet, zoo.images)
    model = workload.model
    if warm:
        run_step(workload)
        workload.compute_loss().backward()
    model.blocks[1].norm.eval()
    model.blocks[2].register_forward_hook(lambda *_: None)
    model.blocks[0].conv1.register_full_backward_hook(lambda *_: None)
    original = model.blocks[3].forward
    model.blocks[3].forward = lambda x: original(x)
    torch.manual_seed(123)
    return workload


@pytest.mark.parametrize("warm", [False, True])
def test_profiling_leaves_everything_as_it_was(zoo: SimpleNamespace, warm: bool) -> None:
    workload = _prepared(zoo, warm)
    assert bool(workload.optimizer.state) == warm
    trace = _Trace(workload)
    profile = profile_workload(workload, rounds=1)
    assert profile.inplace_off, "the in-place modules were switched, so restoring is tested"
    trace.check(workload)


def test_a_profile_that_fails_leaves_everything_as_it_was(zoo: SimpleNamespace) -> None:
    workload = _prepared(zoo, warm=True)
    calls = [0]

    def breaks_later(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        loss = zoo.squared(model, batch)
        if calls[0] == 4:
            raise ValueError("out of patience")
        return loss

    workload.loss_fn = breaks_later
    trace = _Trace(workload)
    with pytest.raises(ModelError, match="out of patience") as refusal:
        profile_workload(workload, rounds=1)
    assert refusal.value.exit_code == 3
    trace.check(workload)


def test_a_step_that_does_not_repeat_itself_is_named(zoo: SimpleNamespace) -> None:
    sizes = iter(range(8, 100))

    def growing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return zoo.squared(model, batch.repeat(next(sizes), 1, 1))

    with pytest.raises(ModelError, match="does not repeat itself") as refusal:
        profile_workload(zoo.workload(zoo.Stack, loss=growing), rounds=1)
    assert refusal.value.hint


def test_progress_is_told(zoo: SimpleNamespace) -> None:
    told: list[str] = []
    say: Callable[[str], None] = told.append
    profile_workload(zoo.workload(zoo.Stack), rounds=1, progress=say)
    assert told[0] == "measuring copies to the host"
    assert told.index("putting the state aside") < told.index("finding segments")
    assert told[-1] == "putting the state back"
    assert "recording memory" in told


def test_a_model_used_twice_in_one_loss_is_predicted(zoo: SimpleNamespace) -> None:
    def contrast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - model(batch.flip(0))).square().mean()

    workload = zoo.workload(zoo.Siamese, lambda: zoo.sequences(256), contrast)
    profile = profile_workload(workload, rounds=1)
    simulator = Simulator(profile)
    blocks = [c.index for c in profile.graph.calls if not c.leaf]
    for runs in ([], [(b, b) for b in blocks[:3]], [(b, b) for b in blocks[3:]]):
        measured = _measured_peak(workload, profile, runs)
        assert simulator.peak_bytes(runs) == _about(measured), runs


def test_garbage_does_not_count_as_memory_that_is_always_there(
    zoo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of an error that was caught held a model, until the recording collected them."""
    left: list[Any] = [torch.zeros(8)]
    left.append(left)
    garbage, seen = ref(left[0]), []

    def counted(workload: Workload) -> dict[str, int]:
        seen.append(garbage())
        return static_bytes(workload)

    monkeypatch.setattr(profiling, "static_bytes", counted)
    workload = zoo.workload(zoo.Stack)
    gc.disable()  # it would come by chance
    try:
        del left
        profile_workload(workload, rounds=1)
    finally:
        gc.enable()
    assert seen == [None]
