"""Traces, flame graphs and plots of a report."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit.errors import UsageError
from memfit.ir.step_graph import PHASES
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.replay import replay, replay_plan
from memfit.planning.simulate import Simulator
from memfit.report.export.flame import speedscope_json
from memfit.report.export.plots import write_plots
from memfit.report.export.trace import trace_json
from memfit.report.run_report import RunReport


@pytest.fixture(scope="module")
def swapping(planned: RunReport) -> RunReport:
    """The same step with everything moved to the host and back."""
    goal = Goal(budget_bytes=16 * 10**9, strategy="swap", techniques=("offload",))
    plan = make_plan(planned.profile, goal)
    simulator = Simulator(planned.profile, plan.smallest_move_bytes, ("recompute", "offload"))
    return replace(planned, plan=plan, after=replay_plan(simulator, plan))


def _events(report: RunReport, **wanted: Any) -> list[dict[str, Any]]:
    events = json.loads(json.dumps(trace_json(report)))["traceEvents"]
    return [e for e in events if all(e.get(key) == value for key, value in wanted.items())]


def test_a_trace_has_a_track_for_compute_and_for_each_direction(swapping: RunReport) -> None:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in _events(swapping, name="thread_name")}
    assert [names[2, tid] for tid in (1, 2, 3)] == ["compute", "copy-out", "copy-in"]
    before = {e["tid"] for e in _events(swapping, ph="X", pid=1)}
    after = {e["tid"] for e in _events(swapping, ph="X", pid=2)}
    assert (before, after) == ({1}, {1, 2, 3})


def test_copies_in_a_trace_move_what_the_plan_says(swapping: RunReport) -> None:
    out = _events(swapping, ph="X", pid=2, tid=2)
    back = _events(swapping, ph="X", pid=2, tid=3)
    for copies in (out, back):
        moved = sum(e["args"]["bytes"] for e in copies)
        assert 0 <= swapping.plan.host_bytes - moved < 512 * 1000, "each is rounded up on the host"
    busy_s = sum(e["dur"] for e in (*out, *back)) / 1e6
    # What copies slow down is limited in a step's seconds, so its clock may run a little faster.
    assert busy_s == pytest.approx(swapping.plan.predicted.copy_s, rel=0.05)
    last = max(e["ts"] + e["dur"] for e in _events(swapping, ph="X", pid=2)) / 1e6
    assert last == pytest.approx(swapping.plan.predicted.step_s, rel=0.01)


@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_the_optimizer_has_its_slice_of_a_trace(planned: RunReport, how: str) -> None:
    """A fused one allocates nothing, and its time was given to other phases."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), **{how: True})
    batch = torch.ones(8, 512)
    workload = memfit.Workload(model, lambda model, x: (model(x) * 2).sum(), optimizer, batch)
    profile = memfit.profile(workload, executor="module")
    assert list(profile.between_s) == list(PHASES)
    before = replay(Simulator(profile), [])
    slices = _events(replace(planned, before=before), ph="X", pid=1, tid=1)
    seconds = {name: 0.0 for name in ("optimizer", "head and loss")}
    for event in slices:
        seconds[event["name"]] = seconds.get(event["name"], 0.0) + event["dur"] / 1e6
    assert sum(seconds.values()) == pytest.approx(profile.step_s)
    timed = profile.between_s["optimizer"] / profile.between_s["head and loss"]
    assert timed > 1
    assert seconds["optimizer"] / seconds["head and loss"] == pytest.approx(timed, rel=1e-3)
    end = before.seconds_at(profile.graph.backward_end)
    assert before.seconds - end == pytest.approx(seconds["optimizer"], rel=0.01)


def test_memory_in_a_trace_reaches_the_peak(planned: RunReport) -> None:
    for pid, step in ((1, planned.before), (2, planned.after)):
        counters = _events(planned, ph="C", pid=pid)
        assert max(sum(e["args"].values()) for e in counters) == step.peak_bytes
        assert [e["ts"] for e in counters] == sorted(e["ts"] for e in counters)


def test_every_event_has_what_viewers_ask_for(planned: RunReport) -> None:
    for event in _events(planned):
        assert {"ph", "name", "pid"} <= event.keys()
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] > 0


def test_a_flame_graph_has_the_keys_of_speedscope_and_sums_to_the_peak(planned: RunReport) -> None:
    data = json.loads(json.dumps(speedscope_json(planned)))
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = data["shared"]["frames"]
    assert len({(f["name"], f.get("file"), f.get("line")) for f in frames}) == len(frames)
    for profile, step in zip(data["profiles"], (planned.before, planned.after), strict=True):
        assert (profile["type"], profile["unit"], profile["startValue"]) == ("sampled", "bytes", 0)
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == profile["endValue"] == step.peak_bytes
        assert all(0 <= f < len(frames) for stack in profile["samples"] for f in stack)


def test_modules_hold_modules_in_a_flame_graph(planned: RunReport) -> None:
    data = speedscope_json(planned)
    names = [frame["name"] for frame in data["shared"]["frames"]]
    stacks = [[names[f] for f in stack] for stack in data["profiles"][0]["samples"]]
    path = [f"transformer{rest}" for rest in ("", ".h", ".h.7", ".h.7.mlp", ".h.7.mlp.c_fc")]
    (stack,) = [s for s in stacks if s[:5] == path and s[5].startswith("addmm_2")]
    assert stack[5] == "addmm_2 bfloat16[8192, 5120]"
    frame = data["shared"]["frames"][names.index(stack[5])]
    assert (frame["file"], frame["line"]) == ("pytorch_utils.py", 119)


def test_plots_are_written_in_both_forms(run: RunReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    written = write_plots(run, tmp_path)
    names = {path.name for path in written}
    assert names == {
        f"{n}.{kind}" for n in ("memory", "peaks", "budgets") for kind in ("png", "svg")
    }
    for path in written:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    assert "optimizer state" in (tmp_path / "memory.svg").read_text()
    assert "measured" in (tmp_path / "budgets.svg").read_text()


def test_without_matplotlib_plots_are_refused_with_a_hint(
    run: RunReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        write_plots(run, tmp_path)
    assert "memfit[plots]" in (caught.value.hint or "")
    assert not list(tmp_path.iterdir())
