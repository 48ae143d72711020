"""A refused budget names what else could be allowed to meet it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memfit
from memfit.errors import InfeasibleError
from memfit.ir.profile import AllocatorStart, Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.refusal import blocking_tensors
from memfit.planning.simulate import Simulator
from memfit.targets import resolve_target

MIB = 2**20
SMALL = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_ff": 16}


def _profile(rows: int, vocab: int) -> Profile:
    sizes = SMALL | {"vocab_size": vocab}
    workload = resolve_target("encoder", device="cpu", batch=rows, seq=16, overrides=sizes)
    return memfit.profile(workload, executor="module")


def _hint(profile: Profile, *allowed: str) -> str:
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(profile, Goal(budget_bytes=1000, techniques=("recompute", *allowed)))
    assert refusal.value.hint is not None
    return refusal.value.hint


def test_where_the_loss_stands_in_the_way_it_can_be_made_in_tiles() -> None:
    profile = _profile(rows=16, vocab=2000)
    assert "+tiled_loss" in _hint(profile)
    assert "step_in_backward" not in _hint(profile)
    assert "tiled_loss" not in _hint(profile, "tiled_loss")


def test_where_the_optimizer_stands_in_the_way_its_state_and_gradients_can_go() -> None:
    profile = _profile(rows=1, vocab=2000)
    on_cuda = replace(profile, device=replace(profile.device, type="cuda"))
    assert "--allow +step_in_backward,+optimizer_offload, " in _hint(on_cuda)
    assert "--allow" not in _hint(on_cuda, "step_in_backward", "optimizer_offload")


def test_on_a_cpu_state_has_nowhere_to_go() -> None:
    """It was told to go to the host, where it is."""
    profile = _profile(rows=1, vocab=2000)
    assert "--allow +step_in_backward, " in _hint(profile)
    assert "optimizer_offload" not in _hint(profile)


def test_gradients_that_wait_are_not_freed_in_backward() -> None:
    profile = _profile(rows=1, vocab=2000)
    assert "step_in_backward" not in _hint(replace(profile, accumulate=2))


def test_whole_segments_could_be_planned_inside() -> None:
    profile = _profile(rows=2, vocab=100)
    assert "--executor graph, " in _hint(profile)
    on_cuda = replace(profile, device=replace(profile.device, type="cuda"))
    assert "--executor inductor, " in _hint(on_cuda)
    assert "--executor" not in _hint(replace(profile, executor="graph"))


@pytest.mark.parametrize("budget", [None, "80%", "the smallest"])
def test_mutwo_decided_nothing_about_whole_segments_and_did_not_say_why(
    budget: str | None,
) -> None:
    """Without a budget all was kept; with one, only 'optimal' was named as a way out."""
    profile = _profile(rows=8, vocab=100)
    techniques = ("recompute", "offload")
    plain = make_plan(profile, Goal(strategy="none"))
    if budget is None:
        plan = make_plan(profile, Goal(strategy="mutwo", techniques=techniques))
        assert all(s.decision == "keep" for s in plan.segments)
        (note,) = [note for note in plan.notes if "mutwo" in note]
        assert "inside captured segments, and this profile has none" in note
        return
    share = 0.8 * plain.baseline_peak_bytes
    least = make_plan(profile, Goal(techniques=techniques)).minimum_feasible_bytes
    goal = Goal(int(max(share, least)) if budget == "80%" else least, techniques=techniques)
    with pytest.raises(InfeasibleError, match="inside captured segments") as refusal:
        make_plan(profile, replace(goal, strategy="mutwo"))
    assert "--executor graph" in (refusal.value.hint or "")
    assert "strategy 'optimal'" in (refusal.value.hint or "")
    assert not any("mutwo" in note for note in make_plan(profile, goal).notes)


def test_fused_code_is_not_named_by_its_key() -> None:
    """Allocations inside of it have the key of the code for a name, as the profiler tells them."""
    profile = _profile(rows=4, vocab=100)
    keyed = "## Call CompiledFxGraph fyctuqedktepxjdni34h5kzx7nd66uclto4dr2cnd7x5cabdz5kb ##"
    blocks = [replace(b, origin=keyed) for b in profile.graph.blocks]
    simulator = Simulator(replace(profile, graph=replace(profile.graph, blocks=tuple(blocks))))
    named = "; ".join(blocking_tensors(simulator, [], most=50))
    assert "#" not in named and " activations in layers." in named and " temporaries" in named


def test_what_a_captured_segment_needs_for_a_moment_is_named() -> None:
    """It was the largest at the peak, and none of the tensors that stand in the way."""
    sizes = SMALL | {"vocab_size": 50, "n_ff": 512}
    workload = resolve_target("encoder", device="cpu", batch=16, seq=16, overrides=sizes)
    profile = memfit.profile(workload, executor="graph")
    with pytest.raises(InfeasibleError, match="At its peak") as refusal:
        make_plan(profile, Goal(budget_bytes=1000))
    named = refusal.value.message.partition("At its peak ")[2]
    assert " inside backward layers." in named and "largest: " in named
    sources = [node.source for graph in profile.graphs for node in graph.nodes]
    assert any(sources) and not any("backend.py" in source for source in sources), (
        "the line that calls a segment is no place in the user's code"
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_half_precision_is_named_where_it_is_not_in_use(dtype: str) -> None:
    workload = resolve_target(
        "encoder", device="cpu", batch=2, seq=16, dtype=dtype, overrides=SMALL
    )
    hint = _hint(memfit.profile(workload, executor="graph"))
    assert hint.endswith("a smaller batch" if dtype == "bf16" else "a smaller batch, or bf16")


@pytest.mark.parametrize("held_mib", [2, 300])
def test_what_is_held_before_the_step_is_told(held_mib: int) -> None:
    """What earlier steps left in use was in the smallest budget, and in nothing that was named."""
    profile = _profile(rows=2, vocab=100)
    start = AllocatorStart(held_mib * MIB, holes=((held_mib - 1) * MIB,))
    with pytest.raises(InfeasibleError) as refusal:
        make_plan(replace(profile, allocator=start), Goal(budget_bytes=1000))
    told = "Before the step the process holds 300.00 MiB, 29" in refusal.value.message
    assert told == (held_mib == 300)
    assert told == ("a process that ran nothing before" in (refusal.value.hint or ""))
    assert refusal.value.minimum_bytes is not None
    assert refusal.value.minimum_bytes >= held_mib * MIB
