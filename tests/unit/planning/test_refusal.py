"""A refused budget names what else could be allowed to meet it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import memfit
from memfit.errors import InfeasibleError
from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal, make_plan
from memfit.targets import resolve_target

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
    assert "--allow +step_in_backward,+optimizer_offload, " in _hint(profile)
    assert "--allow" not in _hint(profile, "step_in_backward", "optimizer_offload")


def test_whole_segments_could_be_planned_inside() -> None:
    profile = _profile(rows=2, vocab=100)
    assert "--executor graph, " in _hint(profile)
    on_cuda = replace(profile, device=replace(profile.device, type="cuda"))
    assert "--executor inductor, " in _hint(on_cuda)
    assert "--executor" not in _hint(replace(profile, executor="graph"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_half_precision_is_named_where_it_is_not_in_use(dtype: str) -> None:
    workload = resolve_target(
        "encoder", device="cpu", batch=2, seq=16, dtype=dtype, overrides=SMALL
    )
    hint = _hint(memfit.profile(workload, executor="graph"))
    assert hint.endswith("a smaller batch" if dtype == "bf16" else "a smaller batch, or bf16")
