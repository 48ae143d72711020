"""Tests that need an NVIDIA GPU: `python3 -m pytest tests/gpu` on a machine that has one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.ir.profile import Profile
from memfit.measure.cuda_allocator import drop_cublas_scratch
from memfit.planning.acts import Pick
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import Simulator
from memfit.planning.write_plan import write_segments

Choose = Callable[[Simulator, int], int]
HERE = Path(__file__).parent
LONGEST = 3000  # characters of a failure


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if torch.cuda.is_available() else "needs an NVIDIA GPU"
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    """Tell of a failure at once: what is cut off never comes to its summary."""
    report = yield
    told = item.config.pluginmanager.get_plugin("terminalreporter")
    if report.failed and told is not None:
        told.write_line(f"\n{report.nodeid}\n{report.longreprtext[-LONGEST:]}")
    return report


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage() -> None:
    """Nothing is frozen, as it is elsewhere: what failed tests leave has memory on the device."""


@pytest.fixture(autouse=True)
def pages_of_its_own() -> None:
    """A test's model must not lie scattered over what earlier ones left: it is there all along.

    A failed one leaves its frames, with the tensors in them; and cuBLAS its scratch, which keeps
    the segment it lies in, where the model of the next test would lie, too.
    """
    for name in ("last_exc", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.synchronize()
        drop_cublas_scratch()
        torch.cuda.empty_cache()


@pytest.fixture
def blocks_by() -> Callable[[Profile, Choose], memfit.Plan]:
    """A plan whose alike segments all run by one variant, which is chosen of their menu."""

    def plan(profile: Profile, choose: Choose) -> memfit.Plan:
        graph = next(c.graph for c in profile.graph.calls if c.graph >= 0)
        simulator = Simulator(profile)
        number = choose(simulator, graph)
        acts = tuple(Pick(c.index, number) for c in profile.graph.calls if c.graph == graph)
        segments, variants = write_segments(simulator, acts)
        kept = make_plan(profile, Goal(strategy="none"))
        return replace(kept, segments=segments, variants=variants)

    return plan
