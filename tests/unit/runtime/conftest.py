"""Run a workload with chosen or random runs recomputed, and compare it with a plain twin."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memfit.capture.captured import Captured
from memfit.capture.find import find_segments
from memfit.capture.recording import mutated
from memfit.capture.segments import Segment
from memfit.measure.step import untouched
from memfit.runtime.calls import routed
from memfit.runtime.inplace import inplace_off
from memfit.runtime.pressure import host_store
from memfit.runtime.recompute import Recompute
from memfit.runtime.swap.arena import Slot
from memfit.runtime.swap.lanes import Copy, HostLanes
from memfit.workload import Workload

Run = tuple[int, int]


def candidates(segments: Sequence[Segment]) -> list[Run]:
    """Every run of chained segments that does not begin with a pinned one."""
    found = []
    for first, segment in enumerate(segments):
        if segment.pinned:
            continue
        for last in range(first, len(segments)):
            if last > first and not segments[last].linked:
                break
            if last > first or not segment.visit.leaf:
                found.append((first, last))
    return found


def random_runs(segments: Sequence[Segment], seed: int) -> list[Run]:
    """Some runs that do not overlap; seed 0 gives the longest first, 1 all single ones."""
    chooser = random.Random(seed)
    runs: list[Run] = []
    found = candidates(segments)
    order = chooser.sample(found, len(found))
    if seed == 0:
        order = sorted(found, key=lambda run: run[0] - run[1])
    elif seed == 1:
        order = [run for run in found if run[0] == run[1]]
    for run in order:
        if all(run[1] < first or last < run[0] for first, last in runs) and (
            seed < 2 or chooser.random() < 0.7
        ):
            runs.append(run)
    return sorted(runs)


@pytest.fixture(scope="session")
def recomputing() -> Callable[..., AbstractContextManager[Recompute]]:
    """`with recomputing(workload, seed=n)` or `runs=[...]`: the engine at work on the model."""

    @contextmanager
    def install(
        workload: Workload, *, seed: int | None = None, runs: Sequence[Run] | None = None
    ) -> Iterator[Recompute]:
        with untouched(workload):
            segments, off = find_segments(workload)
        chosen = runs if runs is not None else random_runs(segments, seed or 0)
        assert chosen, "no runs, so nothing is tested"
        found = Captured(segments)
        engine = Recompute(chosen, found.modules(workload.model), mutated(found))
        with (
            inplace_off(workload.model, off),
            routed(workload.model, found.route, engine),
        ):
            yield engine

    return install


def numbers(workload: Workload, steps: int) -> list[dict[str, Any]]:
    """Loss, gradients, buffers and weights of some steps, from a fixed seed."""
    torch.manual_seed(7)
    seen = []
    for _ in range(steps):
        loss = workload.compute_loss()
        loss.backward()
        model = workload.model
        seen.append(
            {
                "loss": loss.detach().clone(),
                "gradients": {
                    n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
                },
                "buffers": {n: b.clone() for n, b in model.named_buffers()},
                "random": torch.get_rng_state(),
            }
        )
        workload.optimizer.step()
        workload.optimizer.zero_grad(set_to_none=True)
    seen.append({n: p.detach().clone() for n, p in workload.model.named_parameters()})
    return seen


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Any, Any], None]:
    """Two trees of tensors are equal bit for bit."""

    def check(actual: Any, expected: Any) -> None:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    return check


@pytest.fixture(scope="session")
def assert_trains_alike(
    recomputing: Callable[..., Any], assert_same: Callable[[Any, Any], None]
) -> Callable[..., None]:
    """`assert_trains_alike(build, seed)`: the recomputed twin trains exactly as the plain one."""

    def check(build: Callable[[], Workload], seed: int, steps: int = 2) -> None:
        plain, planned = build(), build()
        expected = numbers(plain, steps)
        with recomputing(planned, seed=seed) as engine:
            actual = numbers(planned, steps)
        assert engine.replays >= steps, "nothing was recomputed"
        assert_same(actual, expected)

    return check


@pytest.fixture(scope="session")
def run_numbers() -> Callable[[Workload, int], list[dict[str, Any]]]:
    return numbers


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this one process, for models that are wrapped to train on several."""
    if not dist.is_available():
        pytest.skip("this torch has no distributed package")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The first values of what valves copied to the host, in this order."""
    values: list[float] = []

    class Lanes(HostLanes):
        def copy_out(self, source: torch.Tensor, slot: Slot) -> Copy:
            values.append(source.view(torch.float32)[0].item())
            return super().copy_out(source, slot)

    monkeypatch.setattr(host_store, "lanes_for", Lanes)
    return values
