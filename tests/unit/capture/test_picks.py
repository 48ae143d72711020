"""Any mix of variants, replayed runs and moves: the simulator, its rows and the machine agree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import memfit
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.measure.memory import measure_peak
from memfit.measure.step import run_step, untouched
from memfit.planning.acts import Act, Pick, calls_of, without_points
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.reserved import MODEL_ENDS, allocation_sequence
from memfit.planning.rows import MemoryRows, Row
from memfit.planning.simulate import Simulator
from memfit.planning.write_plan import read_acts, write_segments
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target

GPT2 = {"n_layer": "6", "n_embd": "32", "n_head": "2", "vocab_size": "100"}
RESNET = {"depths": "[2, 2]", "hidden_sizes": "[32, 64]", "embedding_size": "16"}


def _workload(name: str) -> memfit.Workload:
    if name == "gpt2":
        return resolve_target("transformers:gpt2", batch=2, seq=64, overrides=GPT2)
    return resolve_target("transformers:resnet-50", batch=2, overrides=RESNET)


@pytest.fixture(scope="module", params=["gpt2", "resnet"])
def measured(request: pytest.FixtureRequest) -> tuple[memfit.Workload, Profile]:
    workload = _workload(request.param)
    return workload, memfit.profile(workload, executor="graph")


def _acts(simulator: Simulator, seed: int) -> list[Act]:
    """Some calls by another variant, some replayed by themselves, some kept."""
    chooser = random.Random(seed)
    acts: list[Act] = []
    for call in simulator.graph.calls:
        if call.graph < 0:
            continue
        variants = len(simulator.menus[call.graph])
        kind = chooser.choice(["keep", "run", "pick", "pick"])
        if kind == "run":
            acts.append((call.index, call.index))
        elif kind == "pick" and variants > 1:
            calls = simulator.graph.calls
            release = chooser.randint(call.index + 1, len(calls))
            before = [c.index for c in calls if 0 <= c.need <= call.need]
            prefetch = chooser.choice([*before, len(calls)])
            pick = Pick(call.index, chooser.randrange(1, variants), release, prefetch)
            away = simulator.effect(pick).away is not None
            acts.append(pick if away else Pick(pick.call, pick.variant))
    return acts


def _plan(profile: Profile, simulator: Simulator, acts: list[Act]) -> Plan:
    segments, variants = write_segments(simulator, acts)
    return replace(
        make_plan(profile, Goal(strategy="none")),
        segments=segments,
        variants=variants,
        host_bytes=simulator.host_bytes(acts),
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_simulated_peak_is_the_measured_one(
    measured: tuple[memfit.Workload, Profile], seed: int
) -> None:
    workload, profile = measured
    simulator = Simulator(profile)
    acts = _acts(simulator, seed)
    plan = _plan(profile, simulator, acts)
    assert sorted(map(str, read_acts(simulator, plan))) == sorted(map(str, acts))
    with untouched(workload), Applied(plan, workload.model):
        for _ in range(2):
            run_step(workload)
        peak = measure_peak(workload, lambda: run_step(workload))
    assert simulator.peak_bytes(acts) == pytest.approx(peak.bytes, rel=0.015)


@pytest.mark.parametrize("seed", range(4))
def test_rows_and_sequences_show_what_the_simulator_does(
    measured: tuple[memfit.Workload, Profile], seed: int
) -> None:
    simulator = Simulator(measured[1])
    acts = [without_points(act) for act in _acts(simulator, seed)]
    graph = simulator.graph
    candidates: list[Act] = [*graph.runs(1), *simulator.picks()]
    rows = MemoryRows(simulator, candidates)
    chosen = {candidates.index(act) for act in acts}
    kept = set(range(len(graph.calls))) - {c for act in acts for c in calls_of(act)}
    inside = {m[0] for act in candidates for m in simulator.effect(act).inside}
    highest = max(
        _value(row, chosen, kept) for row in (*map(rows.at, range(graph.length)), *rows.insides())
    )
    # A block that two calls move counts for both in rows.
    peak = simulator.peak_bytes(acts)
    assert inside and peak <= highest <= 1.1 * peak
    if not simulator.loads(acts):
        assert highest == peak

    live, most, there = 0, 0, set()
    for key, size in allocation_sequence(simulator, acts):
        if key == MODEL_ENDS:
            continue
        assert (key in there) == (size < 0), key
        (there.add if size > 0 else there.discard)(key)
        live += size
        most = max(most, live)
    # A sequence lets go of the gradients that a backward is given when it has returned.
    assert most + graph.static_bytes == pytest.approx(simulator.peak_bytes(acts), rel=0.05)


def _value(row: Row, chosen: set[int], kept: set[int]) -> int:
    total = row.constant + sum(int(row.coefficients[n]) for n in chosen)
    return total + sum(
        size
        for holders, size in row.shared.items()
        if any((h.kept and h.call in kept) or h.acts & chosen for h in holders)
    )
