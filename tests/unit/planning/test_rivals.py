"""With both techniques `optimal` is no slower than any way to plan, and changes are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.errors import InfeasibleError
from memfit.ir.profile import CopyRates, Profile
from memfit.planning import optimal
from memfit.planning.acts import Act, calls_of
from memfit.planning.improve import improved
from memfit.planning.make_plan import Goal, make_plan, minimum_feasible
from memfit.planning.placed import seconds
from memfit.planning.request import Choice, Request
from memfit.planning.rivals import fastest_of_rivals, translated
from memfit.planning.simulate import Simulator

Profiles = Callable[..., st.SearchStrategy[Profile]]
Build = Callable[..., Profile]
BOTH = ("recompute", "offload")
OTHERS = [
    ("optimal", ("recompute",)),
    ("optimal", ("offload",)),
    *((strategy, BOTH) for strategy in ("mutwo", "ratio", "interval", "all", "swap")),
]


def _with_copies(profile: Profile, rate: float) -> Profile:
    """The profile with lanes that carry its whole peak `rate` times in a step."""
    peak = Simulator(profile).peak_bytes([])
    per_s = max(rate * peak / profile.step_s, 1.0)
    return replace(profile, copy=CopyRates(per_s, per_s, latency_s=1e-6, drag=0.05))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_optimal_with_both_is_as_fast_as_the_best_of_all(
    data: st.DataObject, random_profiles: Profiles
) -> None:
    profile = _with_copies(data.draw(random_profiles(5)), data.draw(st.sampled_from([0.5, 4.0])))
    low, _ = minimum_feasible(profile, techniques=BOTH)
    high = Simulator(profile).peak_bytes([])
    budget = low + int(data.draw(st.sampled_from([0.0, 0.3, 0.7])) * (high - low))
    plan = make_plan(profile, Goal(budget_bytes=budget, techniques=BOTH))
    assert plan.predicted.peak_bytes <= budget
    for strategy, techniques in OTHERS:
        try:
            goal = Goal(budget_bytes=budget, strategy=strategy, techniques=techniques)
            other = make_plan(profile, goal)
        except InfeasibleError:
            continue
        assert plan.predicted.step_s <= 1.001 * other.predicted.step_s, strategy
        assert plan.predicted.lower_bound_s <= 1.001 * other.predicted.step_s, strategy


def test_everything_that_fits_is_kept_again(chain: Build) -> None:
    profile = _with_copies(chain(8), 4.0)
    simulator = Simulator(profile)
    everything: list[Act] = [*simulator.sends()]
    budget = simulator.peak_bytes([(0, 0), (1, 1)])
    asked: list[Sequence[Act]] = []

    def fits(acts: Sequence[Act]) -> bool:
        asked.append(acts)
        return simulator.peak_bytes(acts) <= budget

    acts = improved(simulator, everything, optimal.candidates(simulator), fits, [budget], 5.0)
    assert acts in asked and simulator.peak_bytes(acts) <= budget
    assert simulator.step_seconds(acts) < simulator.step_seconds(everything)
    calls = [call for act in acts for call in calls_of(act)]
    assert len(calls) == len(set(calls)) < len(everything), "a call is in one act"


def test_nothing_changes_where_no_change_fits(chain: Build) -> None:
    simulator = Simulator(_with_copies(chain(6), 4.0))
    acts: tuple[Act, ...] = ((0, 0), (2, 3))
    candidates = optimal.candidates(simulator)
    peak = simulator.peak_bytes([])
    assert improved(simulator, acts, candidates, lambda found: False, [peak], 5.0) == acts


def test_what_one_technique_chooses_means_the_same_with_both(chain: Build) -> None:
    both = Simulator(_with_copies(chain(6), 4.0), 0, BOTH)
    alone = both.only("recompute")
    assert alone is both.only("recompute")
    assert alone.copy is None and alone.recompute
    found = optimal.smallest(alone)
    assert found is not None
    same = translated(Choice(found.acts), alone, both)
    assert both.peak_bytes(same.acts) == alone.peak_bytes(found.acts)
    assert both.step_seconds(same.acts) == alone.step_seconds(found.acts)


def test_a_strategy_is_asked_for_less_than_what_is_known(chain: Build) -> None:
    simulator = Simulator(_with_copies(chain(8), 4.0), techniques=BOTH)
    budget = simulator.peak_bytes([(0, 0), (1, 1)])
    recomputed = Choice(((0, 0), (1, 1)))
    known_s = seconds(simulator, recomputed)
    asked: list[tuple[str, float]] = []

    def choose(_: Simulator, strategy: str, __: float, enough_s: float) -> Choice | None:
        asked.append((strategy, enough_s))
        return recomputed if strategy == "optimal" else None

    found = fastest_of_rivals(simulator, Request(budget, float("inf")), choose)
    assert found is not None and seconds(simulator, found) <= known_s
    assert asked[0] == ("optimal", float("inf"))
    assert len(asked) > 5 and all(enough_s <= known_s for _, enough_s in asked[1:])


def test_where_nothing_holds_the_slowest_strategy_is_not_asked(chain: Build) -> None:
    profile = _with_copies(chain(5), 1e9)
    simulator = Simulator(profile, techniques=BOTH)
    asked: list[str] = []

    def choose(_: Simulator, strategy: str, *__: float) -> Choice | None:
        asked.append(strategy)
        return None

    least = profile.graph.static_bytes
    assert fastest_of_rivals(simulator, Request(least, float("inf")), choose) is None
    assert {"swap", "all", "optimal"} <= {*asked} and "mutwo" not in asked
    fastest_of_rivals(simulator, Request(simulator.peak_bytes([]), float("inf")), choose)
    assert "mutwo" in asked
