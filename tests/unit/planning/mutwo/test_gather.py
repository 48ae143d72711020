"""The candidates of a step of captured calls, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from memfit.ir.joint_graph import JointGraph
from memfit.ir.profile import CallTime, CopyRates, Measurements, Profile
from memfit.planning.mutwo.gather import Gathered, gather, segments_of
from memfit.planning.mutwo.step import NEVER_S, Candidate
from memfit.planning.simulate import Simulator

MIB = 2**20
X, A, B = 0, 2, 3
Captured = Callable[..., Profile]
RATES = CopyRates(out_bytes_per_s=MIB, in_bytes_per_s=2 * MIB, latency_s=0.25)


def _gather(profile: Profile, min_tensor_bytes: int = 0) -> Gathered:
    simulator = Simulator(profile, min_tensor_bytes)
    return gather(simulator, segments_of(simulator))


def _by_name(gathered: Gathered) -> dict[str, Candidate]:
    return {c.name: c for c in gathered.step.candidates}


def test_every_call_has_candidates_of_its_own(captured: Captured) -> None:
    gathered = _gather(captured(2))
    names = [f"layers.{i}/{n}" for i in (0, 1) for n in ("x", "a", "b")]
    assert [c.name for c in gathered.step.candidates] == names
    assert [c.bytes // MIB for c in gathered.step.candidates] == [1, 4, 8, 1, 4, 8]
    assert gathered.places[1] == ((0, A),) and gathered.places[5] == ((1, B),)


def test_operators_stand_in_the_order_of_the_step(captured: Captured) -> None:
    gathered = _gather(captured(2))
    assert gathered.step.seconds == (1.0, 2.0, 3.0) * 2 + (3.0, 4.0, 5.0) * 2
    assert gathered.step.backward == 6
    assert gathered.order == (1, 0) and gathered.starts == (6, 9, 12)


def test_uses_and_idle_seconds(captured: Captured) -> None:
    gathered = _gather(captured(2))
    first = _by_name(gathered)["layers.0/a"]
    assert (first.last_forward, first.first_backward, first.last_backward) == (1, 10, 10)
    # c of the call, all of the next one, and the operator that reads b first.
    assert gathered.step.inactive_s(first) == 3.0 + 6.0 + 12.0 + 3.0
    last = _by_name(gathered)["layers.1/b"]
    assert gathered.step.inactive_s(last) == 0.0


def test_a_copy_is_due_where_the_backward_of_its_call_begins(captured: Captured) -> None:
    found = _by_name(_gather(captured(2, RATES)))
    assert found["layers.1/a"].needed == 6 and found["layers.0/x"].needed == 9


def test_what_makes_a_tensor_again(captured: Captured) -> None:
    found = _by_name(_gather(captured(2)))
    assert (found["layers.1/b"].recompute_s, found["layers.1/b"].sources) == (2.0, (4,))
    assert (found["layers.1/a"].recompute_s, found["layers.1/a"].sources) == (1.0, (3,))
    assert found["layers.1/x"].recompute_s == NEVER_S, "it is made elsewhere"


def test_what_is_made_of_a_tensor_that_is_not_kept_pays_for_both(
    captured: Captured, graph: JointGraph
) -> None:
    profile = replace(captured(1), graphs=(replace(graph, unplanned=(X, B)),))
    found = _by_name(_gather(profile))
    assert list(found) == ["layers.0/x", "layers.0/b"]
    assert (found["layers.0/b"].recompute_s, found["layers.0/b"].sources) == (3.0, (0,))


def test_measured_seconds_correct_those_of_recomputing(captured: Captured) -> None:
    found = _by_name(_gather(captured(1, known=(Measurements(factor=0.5),))))
    assert found["layers.0/b"].recompute_s == 1.0


def test_measured_seconds_of_calls_are_shared_out(captured: Captured) -> None:
    profile = replace(captured(1), call_times=(CallTime(12.0, 6.0, 6.0, 0.0),), step_s=18.0)
    assert _gather(profile).step.seconds == (2.0, 4.0, 6.0, 1.5, 2.0, 2.5)


def test_seconds_of_copies(captured: Captured) -> None:
    found = _by_name(_gather(captured(1, RATES)))
    assert found["layers.0/b"].swap_s == 8 / 2 + 0.25 and found["layers.0/b"].drag_s == 0.0
    assert _by_name(_gather(captured(1)))["layers.0/b"].swap_s == NEVER_S


def test_copies_that_nothing_runs_beside_cost_all_their_seconds(captured: Captured) -> None:
    found = _by_name(_gather(captured(1, replace(RATES, drag=1.0))))["layers.0/b"]
    assert (found.swap_s, found.drag_s) == (0.0, 8 / 1 + 8 / 2 + 2 * 0.25)


def test_small_tensors_are_left_alone(captured: Captured) -> None:
    assert list(_by_name(_gather(captured(1), 5 * MIB))) == ["layers.0/b"]


def test_a_tensor_that_two_calls_keep_is_one(captured: Captured, graph: JointGraph) -> None:
    """With its output kept as well, that is the input which the next call keeps."""
    reads = list(graph.nodes)
    reads[6] = replace(reads[6], inputs=(*reads[6].inputs, 4))
    both = replace(graph, nodes=tuple(reads), unplanned=(X, A, B, 4))
    gathered = _gather(replace(captured(2, RATES), graphs=(both,)))
    shared = gathered.places.index(((0, 4), (1, X)))
    candidate = gathered.step.candidates[shared]
    assert candidate.bytes == MIB and candidate.recompute_s == NEVER_S
    assert (candidate.last_forward, candidate.first_backward, candidate.last_backward) == (3, 8, 9)
    assert candidate.needed == 6


def test_without_captured_calls_there_is_nothing_to_decide(chain: Captured) -> None:
    gathered = _gather(chain(3))
    assert gathered.step.candidates == () and len(gathered.step.seconds) == 6


@pytest.mark.parametrize("techniques", [("recompute",), ("offload",)])
def test_only_what_is_allowed_is_on_offer(captured: Captured, techniques: tuple[str]) -> None:
    simulator = Simulator(captured(1, RATES), 0, techniques)
    found = gather(simulator, segments_of(simulator)).step.candidates
    assert all(c.swap_s == NEVER_S for c in found) == (techniques == ("recompute",))
    assert all(c.recompute_s == NEVER_S for c in found) == (techniques == ("offload",))
