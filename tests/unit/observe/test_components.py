"""Seconds of a step by component: hand-made marks, plain and fitted steps on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.errors import UsageError
from memfit.ir.component_times import ComponentTimes, CopyTime
from memfit.ir.swap import SwapStatistics, Traffic
from memfit.observe.components import (
    BY_DIFFERENCE,
    BY_REPLAY,
    IN_A_GRAPH,
    LAUNCHED,
    NOTHING,
    component_times,
)
from memfit.observe.marks import (
    ENTER,
    EXIT,
    GRADIENT,
    OUTSIDE,
    PHASE,
    REPEAT,
    REPEATED,
    Mark,
    add_up,
)
from memfit.observe.timed_steps import TimedSteps
from memfit.report.component_times import component_report
from memfit.runtime.apply import Applied
from memfit.runtime.cuda_graphs import CudaGraphs
from memfit.runtime.signature import describe


def difference(start: float, stop: float) -> float:
    return stop - start


def test_every_interval_belongs_to_one_component() -> None:
    marks = [
        Mark(PHASE, "loader", 0),
        Mark(PHASE, "forward", 1),
        Mark(ENTER, 0, 3),
        Mark(EXIT, 0, 6),
        Mark(ENTER, 1, 10),
        Mark(EXIT, 1, 15),
        Mark(PHASE, "backward", 21),
        Mark(GRADIENT, 1, 28),
        Mark(REPEAT, 0, 36),  # both segments are repeated in the backward of the second
        Mark(REPEAT, 0, 45),
        Mark(REPEATED, 0, 55),
        Mark(REPEAT, 1, 66),
        Mark(REPEATED, 1, 78),
        Mark(REPEATED, 0, 91),
        Mark(GRADIENT, 0, 105),
        Mark(PHASE, "optimizer", 120),
        Mark(PHASE, "other", 136),
        Mark(PHASE, "other", 153),
    ]
    shares = add_up(marks, difference)
    assert shares == {
        ("loader", OUTSIDE): 1,
        ("forward", OUTSIDE): 2 + 4 + 6,
        ("forward", 0): 3,
        ("forward", 1): 5,
        ("backward", OUTSIDE): 7,
        ("backward", 1): 8 + 14,
        ("backward", 0): 15,
        ("recompute", 0): 9 + 10 + 11 + 13,
        ("recompute", 1): 12,
        ("optimizer", OUTSIDE): 16,
        ("other", OUTSIDE): 17,
    }
    assert sum(shares.values()) == 153
    assert add_up([], difference) == {}


def test_one_step_s_share_of_the_copies() -> None:
    def read(times: int) -> SwapStatistics:
        traffic = Traffic(times * 100, times, times * 0.5, times * 0.25, times)
        return SwapStatistics(times, times, times, 0, 0, traffic, traffic, 0, 0)

    assert CopyTime.between(read(3), read(7), 4) == CopyTime(100, 0.5, 100, 0.5, 0.5)


class Slow(nn.Module):
    """A layer whose forward and backward take a known time at least."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(self._wait)
        return y

    def _wait(self, gradient: torch.Tensor) -> None:
        time.sleep(self.backward_s)


class SlowStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        time.sleep(0.012)
        return super().step(closure)


class SlowModel(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.first, self.second = Slow(0.010, 0.004), Slow(0.004, 0.020)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return self.second(checkpoint(self.first, x, use_reentrant=False))
        return self.second(self.first(x))


def slow_workload(checkpointed: bool = False) -> memfit.Workload:
    model = SlowModel(checkpointed)
    return memfit.Workload(
        model,
        lambda model, batch: model(batch).square().mean(),
        SlowStep(model.parameters(), lr=0.1),
        torch.randn(4, 8, requires_grad=True),
    )


class SlowLoader:
    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch
        self.fetched = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(3):
            time.sleep(0.008)
            self.fetched += 1
            yield self.batch


def slept(seconds: float, asked: float) -> bool:
    """Whether it took as long as it slept, and not much longer on a busy machine."""
    return 0.95 * asked <= seconds <= 2 * asked


def check_sum(times: ComponentTimes) -> None:
    assert times.accounted_share == pytest.approx(1, abs=0.05)
    for component in ("forward", "backward", "recompute"):
        parts = sum(getattr(s, f"{component}_s") for s in times.segments)
        assert parts == pytest.approx(times.components[component])


def test_a_plain_step_s_components_are_as_long_as_they_sleep() -> None:
    workload = slow_workload()
    for _ in range(5):  # on a machine that is too busy to wake a sleeper in time
        loader = SlowLoader(workload.batch)
        times = component_times(workload, loader, steps=4, warmup=1, segments=["first", "second"])
        if slept(times.step_s, 0.058):
            break
    check_sum(times)
    assert loader.fetched == 5
    assert slept(times.components["loader"], 0.008)
    assert slept(times.components["forward"], 0.014)
    assert slept(times.components["backward"], 0.024)
    assert slept(times.components["optimizer"], 0.012)
    assert times.components["recompute"] == 0 and times.recompute == NOTHING
    first, second, outside = times.segments
    assert (first.name, second.name, outside.name) == ("first", "second", "")
    assert slept(first.forward_s, 0.010)
    assert slept(second.forward_s, 0.004)
    text = component_report(times)
    assert "outside of segments" in text and "middle half of 4 steps" in text


def test_without_a_loader_its_time_is_said_to_be_unknown() -> None:
    times = component_times(slow_workload(), steps=1, warmup=0)
    assert "loader" not in times.components
    assert "not measured: no loader was given" in component_report(times)
    assert times.to_json()["accounted_share"] == times.accounted_share


def test_a_checkpoint_of_the_model_s_own_counts_as_recompute() -> None:
    names = ["first", "second"]
    times = component_times(slow_workload(checkpointed=True), steps=3, warmup=1, segments=names)
    check_sum(times)
    assert times.recompute == BY_REPLAY
    assert slept(times.segments[0].recompute_s, 0.010)
    assert times.segments[1].recompute_s == 0
    assert slept(times.components["backward"], 0.024)


def test_the_workload_is_left_as_it_was(zoo: Any) -> None:
    workload = zoo.workload(zoo.Stack)
    before = [p.detach().clone() for p in workload.model.parameters()]
    rng = torch.get_rng_state()
    component_times(workload, [workload.batch], steps=2, warmup=1)
    torch.testing.assert_close(list(workload.model.parameters()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), rng)
    assert not workload.optimizer.state
    assert "forward" not in workload.model.blocks[0].__dict__


@pytest.fixture(scope="module")
def large(zoo: Any) -> memfit.Workload:
    return zoo.workload(lambda: zoo.Stack(blocks=6, width=64), lambda: zoo.sequences(256))


@pytest.mark.parametrize(("executor", "way"), [("module", BY_REPLAY), ("graph", BY_DIFFERENCE)])
def test_a_fitted_step_s_recompute_is_told_apart(
    large: memfit.Workload, executor: str, way: str
) -> None:
    with memfit.fit_workload(large, "60%", executor=executor, steps=1) as fitted:
        parameters = [p.detach().clone() for p in large.model.parameters()]
        times = component_times(fitted, [large.batch], steps=5)
        torch.testing.assert_close(list(large.model.parameters()), parameters, rtol=0, atol=0)
        assert fitted.applied.at_work and fitted.on_phase is None
        assert fitted.applied.recompute is not None and fitted.applied.recompute.observer is None
        fitted.step(large.batch)
    assert way in times.recompute
    check_sum(times)
    recomputed = [s for s in fitted.plan.segments if s.recomputed_bytes]
    assert recomputed
    assert times.components["recompute"] > 0
    assert [s.name for s in times.segments] == [*(s.name for s in fitted.plan.segments), ""]


def test_copies_of_a_fitted_step(large: memfit.Workload) -> None:
    with memfit.fit_workload(large, strategy="swap", allow="+offload", steps=1) as fitted:
        moved = fitted.plan.offloaded_bytes
        times = component_times(fitted, steps=3)
        assert fitted.applied.copies_in_flight == 0
    check_sum(times)
    assert times.copies is not None
    assert times.copies.out_bytes == times.copies.back_bytes == pytest.approx(moved, rel=0.05)
    assert times.copies.waited_s > 0
    assert "to the host in" in component_report(times)


def test_a_step_over_several_batches_is_timed_whole(large: memfit.Workload) -> None:
    with memfit.fit_workload(large, "90%", accumulate=2, steps=1) as fitted:
        times = component_times(fitted, [large.batch], steps=3)
        check_sum(times)
        assert times.components["optimizer"] > 0
        fitted.step(large.batch)
        with pytest.raises(UsageError, match="gradients of 1 batches wait"):
            component_times(fitted)


def test_a_batch_in_parts_is_timed_whole(large: memfit.Workload) -> None:
    """Whole batches were refused as larger than planned, and without a loader a part was timed."""
    with memfit.fit_workload(large, "45%", allow="microbatch", steps=1) as fitted:
        split = fitted.plan.split
        assert split > 1, "nothing else is allowed"
        phases: list[str] = []
        fitted.on_phase = phases.append
        fitted.step(large.batch)
        assert phases.count("backward") == split
        for loader in (None, [large.batch]):
            times = component_times(fitted, loader, steps=3)
            check_sum(times)
            assert times.workload["batch"] == describe(large)["batch"]
            assert times.components["optimizer"] > 0
            assert all(s.forward_s > 0 and s.backward_s > 0 for s in times.segments[:-1])
        check_sum(component_times(fitted, [large.batch[: len(large.batch) // 2]], steps=3))
        with pytest.raises(UsageError, match="larger than what was planned for"):
            component_times(fitted, [torch.cat([large.batch, large.batch])], steps=1)


def test_bad_input_is_refused_with_a_hint(large: memfit.Workload) -> None:
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((large,), {"steps": 0}, "steps is 0"),
        ((large,), {"warmup": -1}, "warmup is -1"),
        ((large.model,), {}, "components of a Stack cannot be timed"),
        ((large, []), {"steps": 1}, "the loader has no batch"),
        ((large,), {"segments": ["nobody"]}, "no module called in the step"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(UsageError, match=message) as caught:
            component_times(*arguments, **options)
        assert caught.value.hint
    fitted = memfit.fit_workload(large, "90%", steps=1)
    with pytest.raises(UsageError, match="segments of its plan"):
        component_times(fitted, segments=["blocks.*"])
    bigger = torch.cat([large.batch, large.batch])
    with pytest.raises(UsageError, match="larger than what was planned for"):
        component_times(fitted, [bigger], steps=1)
    assert fitted.applied.at_work, "it is as it was when it was refused"
    fitted.undo()
    with pytest.raises(UsageError, match="taken off the model"):
        component_times(fitted)


def test_a_report_of_many_segments_says_that_it_shows_some() -> None:
    times = component_times(slow_workload(), steps=1, warmup=0)
    many = replace(
        times, segments=tuple(replace(times.segments[0], name=str(i)) for i in range(50))
    )
    assert "40 longest of 50 segments" in component_report(many)


def test_a_fitted_step_tells_its_phases(large: memfit.Workload) -> None:
    with memfit.fit_workload(large, "90%", accumulate=2, steps=1) as fitted:
        said: list[str] = []
        fitted.on_phase = said.append
        for _ in range(2):
            fitted.step(large.batch)
    assert said == ["forward", "backward", "end", "forward", "backward", "optimizer", "end"]


@pytest.fixture(scope="module")
def on_cpu() -> Any:
    """Stands in for CUDA graphs on a CPU."""
    file = Path(__file__).parents[1] / "runtime" / "test_cuda_graphs.py"
    spec = spec_from_file_location("stand_in_for_cuda_graphs", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.OnCpu


@pytest.fixture
def launched(zoo: Any, on_cpu: Any) -> Iterator[memfit.Fitted]:
    """A step that recomputes and is launched as CUDA graphs, of which none was captured yet."""
    workload = zoo.workload(
        lambda: zoo.Stack(blocks=6, width=64, dropout=0.0), lambda: zoo.sequences(256)
    )
    with memfit.fit_workload(workload, "60%", executor="module", steps=1) as fitted:
        fitted.applied.undo()
        applied = Applied(replace(fitted.plan, cuda_graphs=True), workload.model)
        applied.graphs = CudaGraphs(workload.model, on_cpu(workload.model))
        fitted.applied = applied.install()
        yield fitted


def graphs_of(fitted: memfit.Fitted) -> tuple[CudaGraphs, Any]:
    graphs = fitted.applied.graphs
    assert graphs is not None
    return graphs, graphs._cuda


def test_segments_of_a_step_launched_as_graphs_were_measured_as_nothing(
    launched: memfit.Fitted,
) -> None:
    """A launch calls no segment: forward, backward and recompute of each read 0.0 s."""
    assert launched.plan.recomputed_bytes > 0
    before = [p.detach().clone() for p in launched.workload.model.parameters()]
    times = component_times(launched, [launched.workload.batch], steps=3)
    assert times.segments == () and "recompute" not in times.components
    assert times.recompute == IN_A_GRAPH and times.notes == (LAUNCHED,)
    assert times.accounted_share == pytest.approx(1, abs=0.05)
    assert all(times.components[name] > 0 for name in ("forward", "backward", "optimizer"))
    text = " ".join(component_report(times).split())
    assert "calls no segment" in text and "outside of segments" not in text
    after = list(launched.workload.model.parameters())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert launched.applied.at_work and launched.on_phase is None


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_the_capture_was_in_a_counted_step(
    launched: memfit.Fitted, monkeypatch: pytest.MonkeyPatch, warmup: int
) -> None:
    graphs, cuda = graphs_of(launched)
    run, counted = TimedSteps.run, []

    def watched(steps: TimedSteps, *, counts: bool) -> None:
        captures, replays = cuda.captures, graphs.replays
        run(steps, counts=counts)
        if counts:
            counted.append((cuda.captures - captures, graphs.replays - replays))

    monkeypatch.setattr(TimedSteps, "run", watched)
    times = component_times(launched, steps=3, warmup=warmup)
    assert counted == [(0, 1)] * 3 and cuda.captures == 2
    assert times.steps == 3


def test_a_step_that_recomputes_nothing_says_so_when_launched(launched: memfit.Fitted) -> None:
    applied = launched.applied
    applied.undo()
    plain = Applied(applied.plan.unplanned(), applied.model)
    plain.graphs = applied.graphs
    launched.applied = plain.install()
    times = component_times(launched, steps=1, warmup=0)
    assert times.recompute == NOTHING and times.components["recompute"] == 0


def test_steps_that_were_not_launched_are_told(launched: memfit.Fitted) -> None:
    batch = launched.workload.batch
    times = component_times(launched, [batch, batch, batch[:-1]], steps=6)
    assert times.segments == ()
    told, said = times.notes
    assert told == LAUNCHED
    assert "4 of 6 calls of the model were not launched (the first call of its kind)" in said


def test_a_step_with_hooks_is_not_launched_and_timed_by_its_segments(
    launched: memfit.Fitted,
) -> None:
    hook = launched.workload.model.head.register_forward_hook(lambda *_: None)
    times = component_times(launched, steps=2)
    hook.remove()
    check_sum(times)
    assert times.recompute == BY_REPLAY and LAUNCHED not in times.notes
    assert all(s.forward_s > 0 for s in times.segments if s.name)


def test_a_step_that_cannot_be_captured_is_timed_by_its_segments(launched: memfit.Fitted) -> None:
    _, cuda = graphs_of(launched)
    cuda.failure = RuntimeError("operation not permitted when stream is capturing")
    times = component_times(launched, [launched.workload.batch], steps=3)
    check_sum(times)
    assert times.recompute == BY_REPLAY and times.components["recompute"] > 0
    assert len(times.segments) == len(launched.plan.segments) + 1
    again = component_times(launched, steps=1)  # nor is its twin with everything kept captured
    assert again.recompute == BY_REPLAY and cuda.captures == 1
