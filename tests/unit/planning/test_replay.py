"""A step replayed tensor by tensor: it sums to the simulator's bytes and lasts its seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir.profile import CopyRates, Profile
from memfit.ir.replay import COMPUTE, COPY_IN, COPY_OUT, TRACKS, Replay
from memfit.ir.step_graph import CATEGORIES, PHASES
from memfit.planning.acts import Act, Pick, Send
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.replay import replay, replay_plan
from memfit.planning.request import Request
from memfit.planning.simulate import Simulator
from memfit.planning.strategies import choose_ratio, choose_swap

Chain = Callable[..., Profile]
GOLDEN = Path(__file__).parents[2] / "golden"


def _check(simulator: Simulator, acts: Sequence[Act]) -> Replay:
    """What holds for every replay."""
    made = replay(simulator, acts)
    assert made.totals == simulator.highest(acts).tolist()
    timeline = simulator.timeline(acts)
    assert made.peak_bytes == timeline.peak_bytes == sum(made.peak_categories.values())
    standing = {p.position: p for p in timeline.points}  # the last point of each position
    for name in CATEGORIES:
        if name != "temporaries":  # moments inside count as these
            curve = [standing[p].bytes.get(name, 0) for p in range(made.length)]
            assert made.curves[name] == curve
    step_s = simulator.step_seconds(acts) / simulator.profile.accumulate
    assert made.seconds == pytest.approx(step_s)
    assert (made.clock[0], made.clock[-1].position) == ((0, 0.0), made.length)
    for one, next_one in pairwise(made.clock):
        assert one.position <= next_one.position
        assert one.seconds <= next_one.seconds + 1e-9 * step_s
    for track in TRACKS:
        work = sorted((w for w in made.work if w.track == track), key=lambda w: w.start_s)
        outside = [w for w in work if not 0 <= w.start_s <= w.end_s <= step_s * (1 + 1e-9)]
        assert not outside, (outside, step_s)
        for one, next_one in pairwise(work):
            assert one.end_s <= next_one.start_s + 1e-9 * step_s
    return made


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_sum_to_the_simulated_bytes_of_random_steps(
    data: st.DataObject, random_profiles: Callable[..., st.SearchStrategy[Profile]]
) -> None:
    profile = data.draw(random_profiles(6, accumulate=2))
    rate = data.draw(st.sampled_from([10.0, 1e4, 1e9]))
    drag = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    parts = st.floats(0, 2)
    between_s = data.draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(PHASES, parts)))
    copy = CopyRates(rate, rate, drag=drag)
    simulator = Simulator(replace(profile, copy=copy, between_s=between_s))
    runs = profile.graph.runs(3)
    acts: list[Act] = data.draw(st.lists(st.sampled_from(runs), max_size=1)) if runs else []
    free = {*range(len(profile.graph.calls))} - {c for f, last in acts for c in range(f, last + 1)}
    sends = [send for send in simulator.sends() if send.call in free]
    acts += data.draw(st.lists(st.sampled_from(sends), unique=True)) if sends else []
    _check(simulator, acts)
    _check(simulator, simulator.scheduled(acts, None))


def test_an_optimizer_that_allocates_nothing_takes_the_time_it_took(chain: Chain) -> None:
    """It took none: seconds outside of segments were spread by the bytes allocated there."""
    profile = chain(4)
    calls_s = sum(c.forward_s + c.backward_s for c in profile.call_times)
    between_s = dict(zip(PHASES, (0.0, 0.25, 0.05, 0.7), strict=True))
    timed = replace(profile, between_s=between_s, step_s=calls_s + 1.0)
    end = timed.graph.backward_end
    assert all(block.birth < end for block in timed.graph.blocks), "nothing in the optimizer"
    for accumulate in (1, 2):
        step_s = accumulate * (calls_s + 0.3) + 0.7
        made = replay(Simulator(replace(timed, accumulate=accumulate, step_s=step_s)), [])
        seconds = {w.name: w.end_s - w.start_s for w in made.work if w.kind == "other"}
        assert seconds["optimizer"] == pytest.approx(0.7 / accumulate)
        assert seconds["head and loss"] == pytest.approx(0.25)
        assert made.seconds - made.seconds_at(end) == pytest.approx(0.7 / accumulate)
    old = replay(Simulator(replace(timed, between_s={})), [])
    assert old.seconds == pytest.approx(calls_s + 1.0)


def test_copies_stand_on_their_tracks(chain: Chain) -> None:
    simulator = Simulator(replace(chain(4), copy=CopyRates(5_000, 5_000)))
    acts = simulator.scheduled([Send(0), Send(1)], 10**9)
    made = _check(simulator, acts)
    times = simulator.traffic(acts)
    busy_s = {t: sum(w.end_s - w.start_s for w in made.work if w.track == t) for t in TRACKS}
    assert busy_s[COPY_OUT] == pytest.approx(times.out_s)
    assert busy_s[COPY_IN] == pytest.approx(times.in_s)
    waited_s = made.seconds - busy_s[COMPUTE]
    assert waited_s == pytest.approx(times.stall_s) and waited_s > 0.1
    copies = {(w.track, w.name, w.bytes) for w in made.work if w.kind == "copy"}
    assert copies == {
        (track, f"layers.{call}", size)
        for track in (COPY_OUT, COPY_IN)
        for call, size in ((0, 1000), (1, 1100))
    }


def test_a_run_is_recomputed_before_its_backward(chain: Chain) -> None:
    simulator = Simulator(chain(4))
    made = _check(simulator, [(1, 2)])
    kinds = [(w.kind, w.name) for w in made.work if w.kind != "other"]
    again = kinds.index(("recompute", "layers.2"))
    assert kinds[again + 1] == ("backward", "layers.2")
    again_s = made.work[[(w.kind, w.name) for w in made.work].index(kinds[again])]
    assert again_s.end_s - again_s.start_s == pytest.approx(simulator.seconds_of((1, 2)))
    assert any(t.name.endswith("(made again)") for t in made.tensors)


@pytest.fixture(scope="module")
def large() -> Profile:
    """GPT-2-large as it was profiled on an H200."""
    return Profile.load(GOLDEN / "gpt2_large_set_up.profile.json.gz")


def test_tensors_of_captured_segments_have_a_module_and_a_line(large: Profile) -> None:
    made = _check(Simulator(large), [])
    known = [t for t in made.tensors if t.module.startswith("transformer.h.") and t.source]
    (tensor,) = [t for t in known if t.name == "addmm_2" and ".h.7." in t.module]
    assert tensor.module == "transformer.h.7.mlp.c_fc"
    assert tensor.source.startswith("pytorch_utils.py:119 x = torch.addmm(")
    assert (tensor.bytes, tensor.shape) == (8192 * 5120 * 2, "bfloat16[8192, 5120]")
    activations = [t for t in made.alive(made.peak_position) if t.category == "activations"]
    named = sum(t.bytes for t in activations if t.source)
    assert named > 0.9 * sum(t.bytes for t in activations)


def test_categories_sum_to_what_cuda_measured_within_two_percent(large: Profile) -> None:
    made = replay(Simulator(large), [])
    assert large.device.type == "cuda" and large.baseline is not None
    total = sum(made.peak_categories.values())
    assert total == pytest.approx(large.baseline.peak_bytes, rel=0.02)
    assert made.peak_categories["optimizer_state"] > 6e9


@pytest.mark.parametrize("choose", [choose_ratio, choose_swap])
def test_large_steps_sum_up_too(large: Profile, choose: Callable[..., Any]) -> None:
    simulator = Simulator(large)
    choice = choose(simulator, Request(14_000_000_000, float("inf")))
    made = _check(simulator, choice.acts)
    assert (COPY_OUT in {w.track for w in made.work}) == (choose is choose_swap)


def test_variants_show_what_they_hold_and_need(large: Profile) -> None:
    simulator = Simulator(large, 0, ("recompute",))
    lean = max(range(1, len(simulator.menus[0])), key=lambda n: simulator.menus[0][n][1])
    moved = simulator.everything_moved(0)
    acts = [Pick(c.index, lean) for c in large.graph.calls if c.graph >= 0]
    made = _check(simulator, acts)
    inside = [t for t in made.tensors if t.name.startswith("inside backward")]
    assert len(inside) == len(acts) and all("largest: " in t.source for t in inside)
    assert moved is None, "nothing may be moved without offload"


def test_a_variant_that_moves_shows_it_twice(large: Profile) -> None:
    simulator = Simulator(large)
    moved = simulator.everything_moved(0)
    assert moved is not None
    first = next(c.index for c in large.graph.calls if c.graph >= 0)
    away = simulator.effect(Pick(first, moved)).away
    assert away is not None and away.tensors > 1 and away.moments == 1, "saved when it ends"
    acts = simulator.scheduled([Pick(first, moved), Pick(first + 1, moved)], None)
    made = _check(simulator, acts)
    back = {t.name for t in made.tensors if t.name.endswith("(back from the host)")}
    assert "addmm_2 (back from the host)" in back


def test_a_plan_is_replayed_as_it_was_made(large: Profile) -> None:
    plan = make_plan(large, Goal(budget_bytes=18_000_000_000, strategy="ratio"))
    made = replay_plan(Simulator(large), plan)
    assert made.peak_bytes == plan.predicted.peak_bytes
    assert made.seconds == pytest.approx(plan.predicted.step_s)
    assert made.place(made.peak_position).split()[0] in ("backward", "head")


def test_sampling_keeps_the_peak(large: Profile) -> None:
    made = replay(Simulator(large), [])
    positions = made.sampled(100)
    assert len(positions) <= 100 and positions == sorted(positions)
    assert made.peak_position in positions
