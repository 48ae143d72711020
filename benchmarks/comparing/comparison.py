"""One workload: fitted at its budgets, then timed beside the peers, all in one process."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from common import say, tidy
from systems import Rows, System, peak_of, quick_seconds, time_systems
from workloads import build

import memfit
from comparing.kept import Kept, file_beside, read_kept, write_kept
from memfit.bench.systems.catalogue import prepare
from memfit.bench.systems.planned import warm_up
from memfit.bench.systems.prepared import Setting, Unavailable
from memfit.errors import InfeasibleError
from memfit.fitted import Fitted
from memfit.holding import learn_from
from memfit.ir.profile import Profile
from memfit.measure.step import untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.setup import Setup
from memfit.verify.budget import run_once
from memfit.ways import setup_of
from memfit.whole_step import tile_for
from memfit.workload import Workload

LESSONS = 3  # plans that are run to learn about their variants
ALIKE = 0.01  # peaks that one plan answers, at the lowest of them
SLOWER = 0.95  # of a peer's seconds: one that takes less at a lower peak stands for both
UNPLANNED = "memfit unplanned"
MORE_TRIES = 2  # at the smallest budget
SMALLEST = "smallest"
MATCH = "memfit at the peak of: "


class Comparison:
    """Made when it is needed: the workload, its profiles, its plans."""

    def __init__(self, name: str, rows: dict[str, Any], arguments: argparse.Namespace) -> None:
        self.name, self.rows, self.arguments = name, rows, arguments
        self._file = file_beside(arguments.output, name, arguments.executor)
        self.kept = read_kept(self._file)
        self._workload: Workload | None = None
        self._warm: set[str] = set()  # whose unplanned step ran here

    @property
    def workload(self) -> Workload:
        """The workload, built once."""
        if self._workload is None:
            self._workload = build(self.name, tiny=self.arguments.tiny)
        return self._workload

    def close(self) -> None:
        """Let go of the workload and of what is known of it."""
        self._workload, self.kept = None, Kept()
        tidy()

    def profile(self) -> Profile:
        """The profile of the step as it is, an earlier run's if there is one."""
        if self.kept.plain is None:
            begun = time.perf_counter()
            executor = self.arguments.executor
            graphs = self.arguments.cuda_graphs and self.workload.device.type == "cuda"
            made = memfit.profile(
                self.workload, executor=executor, cuda_graphs=graphs, progress=say
            )
            self.rows["profile_s"] = time.perf_counter() - begun
            self._keep(plain=made)
            self._warm.add("plain")
        self._warm_up("plain", self.kept.plain, None)
        assert self.kept.plain is not None
        return self.kept.plain

    def set_up_profile(self) -> tuple[Profile, Setup]:
        """The same with the techniques of --setup at work."""
        base, names = self.profile(), self.arguments.setup
        if self.kept.set_up is not None and self.kept.set_up.setup == tuple(names):
            found = self.kept.set_up
            setup = setup_of(names, self.workload, base, found.tile_bytes)
        else:
            asked = [k for k in self.keys(set_up=True) if not k.startswith(SMALLEST)]
            budgets = [self._budget(key, base, base) for key in asked]
            # No budget is smaller than what there is before a step.
            lowest = min(budgets, default=base.graph.fixed_bytes)
            setup = setup_of(names, self.workload, base, tile_for(lowest))
            say(f"  with {', '.join(names)}")
            found = memfit.profile(
                self.workload,
                executor=base.executor,
                channels_last=base.channels_last,
                setup=setup,
                progress=say,
            )
            self.rows["setup"] = list(names)
            self._keep(set_up=found)
            self._warm.add("set up")
        self._warm_up("set up", found, setup)
        return found, setup

    def fit(self, key: str, *, set_up: bool) -> dict[str, Any]:
        """Fit at the budget of this key: run under the cap, numbers compared, timed.

        The smallest may turn out too small once lean variants ran: then the one named instead, with
        what these showed.
        """
        base = self.profile()
        profile = self.set_up_profile()[0] if set_up else base
        budget = self._budget(key, base, profile)
        begun = time.perf_counter()
        refused: list[int] = []
        fitted = None
        while fitted is None:
            try:
                fitted = memfit.fit_workload(
                    self.workload,
                    budget,
                    profiled=profile,
                    steps=self.arguments.steps,
                    allow="recompute",
                    progress=say,
                )
            except InfeasibleError as refusal:
                least = refusal.minimum_bytes
                again = key.startswith(SMALLEST) and len(refused) < MORE_TRIES
                if not again or least is None or least <= budget:
                    return {
                        "budget_bytes": budget,
                        "minimum_bytes": least,
                        "why": refusal.message,
                        **({"refused_bytes": refused} if refused else {}),
                    }
                refused.append(budget)
                budget, profile = least, refusal.learned or profile
        fitted.undo()
        row = {"fit_s": time.perf_counter() - begun, **_fit_row(fitted)}
        row |= {"refused_bytes": refused} if refused else {}
        # What one fit learned about its variants helps the next.
        learned = {"set_up" if set_up else "plain": fitted.profile}
        self._keep(plans=self.kept.plans | {key: fitted.plan}, **learned)
        return row

    def measure_systems(self) -> Rows:
        """memfit's plans and the peers: peaks by themselves, seconds in turn."""
        profile = self.profile()
        systems: dict[str, System] = {}
        rows: Rows = {}
        with untouched(self.workload):
            self._measure(self._own(profile), systems, rows)
            for name in self.arguments.peers:
                self._measure_peer(name, systems, rows)
        if self.arguments.match:
            with untouched(self.workload):
                seconds = quick_seconds(self.workload, systems, rows, self.arguments.peers)
            matches = self._matches(profile, rows, seconds)
            with untouched(self.workload):
                self._measure(matches, systems, rows)
        with untouched(self.workload):
            time_systems(self.workload, systems, rows, self.arguments.steps)
        return rows

    def keys(self, *, set_up: bool) -> list[str]:
        """The names of all budgets that were asked for."""
        asked = self.arguments
        if set_up:
            text = f" with {', '.join(asked.setup)}"
            words = [_gb(b) for b in asked.setup_budgets] + [_share(s) for s in asked.setup_shares]
            words += [SMALLEST] if asked.smallest else []
            return [word + text for word in words] if asked.setup else []
        words = [_of_peak(s) for s in asked.of_peak] + [_gb(b) for b in asked.budgets]
        words += [_share(s) for s in asked.shares]
        return [*words, SMALLEST] if asked.smallest else words

    def can_go_on(self, key: str) -> bool:
        """Whether a fit's row can stay: the systems need its plan, unless it was refused."""
        row = self.rows["fits"].get(key, {})
        systems = self.rows["systems"]
        done = self.arguments.fits_only or (systems and "error" not in systems)
        return bool(done) or "why" in row or key in self.kept.plans

    def _budget(self, key: str, base: Profile, profile: Profile) -> int:
        """The bytes of a key: of the step as it is, or the least that a plan of `profile` holds."""
        word = key.partition(" with ")[0]
        assert base.baseline is not None
        if word == SMALLEST:
            return smallest_budget(profile)
        if word.endswith(" GB"):
            return int(float(word.removesuffix(" GB")) * 10**9)
        share = float(word.partition("%")[0]) / 100
        static = 0 if word.endswith(" of the peak") else base.graph.fixed_bytes
        return int(static + share * (base.baseline.peak_bytes - static))

    def _warm_up(self, kind: str, profile: Profile | None, setup: Setup | None) -> None:
        """Run once what an earlier run left: else it would first be compiled under a cap."""
        if kind in self._warm:
            return
        self._warm.add(kind)
        assert profile is not None
        warm_up(self.workload, profile, setup)
        for plan in self.kept.plans.values():
            if set(plan.setup) == set(() if setup is None else setup.techniques):
                run_once(self.workload, Applied(plan, self.workload.model, setup))

    def _keep(self, **changed: Any) -> None:
        self.kept = replace(self.kept, **changed)
        write_kept(self.kept, self._file)

    def _own(self, profile: Profile) -> dict[str, System]:
        """The unplanned step, with its set-up too, and all plans."""
        model = self.workload.model
        unplanned = make_plan(profile, Goal(strategy="none")).unplanned()
        found = {UNPLANNED: System.of(Applied(unplanned, model))}
        setup: Setup | None = None
        if self.arguments.setup:
            set_up, setup = self.set_up_profile()
            kept = make_plan(set_up, Goal(strategy="none")).unplanned()
            found[f"{UNPLANNED}, set up"] = System.of(Applied(kept, model, setup))
        wanted = [*self.keys(set_up=False), *self.keys(set_up=True)]
        for key in (key for key in wanted if key in self.kept.plans):
            plan = self.kept.plans[key]
            found[f"memfit {key}"] = System.of(Applied(plan, model, setup if plan.setup else None))
        return found

    def _measure(self, more: dict[str, System], systems: dict[str, System], rows: Rows) -> None:
        for name, system in more.items():
            say(f"  {self.name}: {name}")
            settle = not systems
            systems[name] = system
            rows[name] = peak_of(self.workload, system, settle=settle, any_failure=True)

    def _measure_peer(self, name: str, systems: dict[str, System], rows: Rows) -> None:
        setting = Setting(self.workload, self.arguments.steps, say)
        try:
            prepared = prepare(name, setting)
        except Unavailable as error:
            rows[name] = {"error": str(error)}
            return
        system = System(apart=prepared.apart, step=prepared.step, seen=prepared.seen)
        self._measure({name: system}, systems, rows)

    def _matches(
        self, profile: Profile, rows: Rows, seconds: dict[str, float]
    ) -> dict[str, System]:
        """Plans of recompute at the peers' own peaks, in live bytes as these are counted."""
        live = replace(profile, allocator=None)
        assert profile.baseline is not None
        # What the peers left in this process, such as workspaces, is in their peaks as well.
        more = max(rows[UNPLANNED]["peak_bytes"] - profile.baseline.peak_bytes, 0)
        found: dict[str, System] = {}
        for peer, peak in lowest_peaks(rows, profile.baseline.peak_bytes, seconds).items():
            say(f"  {self.name}: planning at the peak of {peer}")
            goal = Goal(budget_bytes=peak - more)
            try:
                plan = make_plan(live, goal)
                for _ in range(LESSONS):
                    learned = learn_from(self.workload, live, plan, goal)
                    if learned is None:
                        break
                    live, plan = learned, make_plan(learned, goal, known=plan)
            except InfeasibleError as refusal:
                rows[MATCH + peer] = {"error": refusal.message[:200]}
                continue
            found[MATCH + peer] = System.of(Applied(plan, self.workload.model))
        return found


def lowest_peaks(rows: Rows, below: int, seconds: dict[str, float]) -> dict[str, int]:
    """The peers whose peaks are worth a plan of their own: of those alike, the lowest one.

    One that is slower than another at a lower peak needs none: the other's is the harder to match.
    """
    peaks = sorted(
        (row["peak_bytes"], name)
        for name, row in rows.items()
        if name in seconds and row["peak_bytes"] < below
    )
    found: dict[str, int] = {}
    for peak, name in peaks:
        beaten = any(seconds[other] < SLOWER * seconds[name] for other in found)
        if not beaten and peak > (1 + ALIKE) * max(found.values(), default=0):
            found[name] = peak
    return found


def _fit_row(fitted: Fitted) -> dict[str, Any]:
    result, plan = fitted.result, fitted.plan
    return {
        "budget_bytes": result.budget_bytes,
        "rounds": result.rounds,
        "predicted_peak_bytes": result.predicted.peak_bytes,
        "measured_peak_bytes": result.measured.peak_bytes,
        "predicted_reserved_bytes": result.predicted.peak_reserved_bytes,
        "measured_reserved_bytes": result.measured.peak_reserved_bytes,
        "retries": result.measured.retries,
        "predicted_step_s": result.predicted.step_s,
        "predicted_time_ratio": result.predicted.time_ratio,
        "measured_step_s": result.measured.step_s,
        "unplanned_step_s": result.baseline.step_s,
        "unplanned_peak_bytes": result.baseline.peak_bytes,
        "static_bytes": result.baseline.static_bytes,
        "same_code_ratio": result.measured.same_code_ratio,
        "numerics": vars(result.numerics),
        "gap": result.predicted.gap,
        "plan_s": result.plan_s,
        "proof_s": result.proof_s,
        "trim": plan.trim,
        "decisions": "".join(s.decision[0] for s in plan.segments),
        "variants": len(plan.variants),
        "minimum_feasible_bytes": result.minimum_feasible_bytes,
    }


def smallest_budget(profile: Profile) -> int:
    """The smallest budget that any plan of recompute can hold, by what refuses a smaller one."""
    try:
        make_plan(profile, Goal(budget_bytes=1))
    except InfeasibleError as refusal:
        assert refusal.minimum_bytes is not None
        return refusal.minimum_bytes
    raise AssertionError("a step in one byte")


def _share(share: float) -> str:
    return f"{share:.0%}"


def _of_peak(share: float) -> str:
    return f"{share:.0%} of the peak"


def _gb(size: float) -> str:
    return f"{size:g} GB"
