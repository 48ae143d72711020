"""A benchmark beside an earlier one: what got worse, as ratios to each run's own reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.errors import UsageError
from memfit.ir.bench import OK, UNAVAILABLE, BenchReport, Cell

TIME_TOLERANCE = 0.05
PEAK_TOLERANCE = 0.02


@dataclass(frozen=True)
class Change:
    """One cell then and now; None: not in that run. `worse` and `better` say what got so.

    `apart` says why its ratios say nothing about each other.
    """

    key: str
    before: Cell | None
    now: Cell | None
    worse: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    apart: str | None = None

    @property
    def verdict(self) -> str:
        """One of: worse, better, same, not comparable, not run, new, in neither."""
        if self.now is None:
            return "in neither" if self.before is None else "not run"
        if self.before is None:
            return "new"
        if self.worse:
            return "worse"
        return "not comparable" if self.apart else "better" if self.better else "same"

    @property
    def passes(self) -> bool:
        """Whether it stands where it stood or better: what was not run, nobody knows."""
        return self.verdict not in ("worse", "not comparable", "not run")


def compare(
    before: BenchReport, now: BenchReport, wanted: Sequence[str], tolerance: float = TIME_TOLERANCE
) -> list[Change]:
    """Every cell that is wanted now, in both reports; those that the earlier one has come first.

    Times differ when their ratio moves by more than `tolerance` and more than both runs' noise.
    """
    found = shared_cells(before, wanted)
    here = {cell.key: cell for cell in now.cells}
    there = {cell.key for cell in found}
    changes = [_change(cell, here.get(cell.key), tolerance) for cell in found]
    return changes + [Change(key, None, here.get(key)) for key in wanted if key not in there]


def shared_cells(before: BenchReport, wanted: Sequence[str]) -> list[Cell]:
    """The earlier run's cells that are wanted now; UsageError where there are none."""
    keys = set(wanted)
    found = [c for c in before.cells if c.key in keys]
    if not found:
        raise UsageError(
            "the earlier benchmark has none of these cells, so there is nothing to compare",
            hint="run the same workloads and systems; the earlier one has, for example, "
            f"{before.cells[0].key!r}"
            if before.cells
            else "choose another file: this one has no cells at all",
        )
    return found


def machine_lines(before: BenchReport, now: BenchReport) -> list[str]:
    """How the two runs' machines and settings differ: ratios can be compared, with care."""
    there, here = before.machine | before.settings, now.machine | now.settings
    return [
        f"the earlier run had {name} {there.get(name)!r}, this one {here.get(name)!r}"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def change_lines(changes: Sequence[Change]) -> list[str]:
    """The comparison in words, what got worse first."""
    alone = {
        "not comparable": "",
        "not run": "in the earlier run only",
        "new": "in this run only",
        "in neither": "in neither run yet",
    }
    lines = [
        f"{name}: {c.key}: {'; '.join(_reasons(c)) or alone[name]}"
        for name in ("worse", "better", *alone)
        for c in changes
        if c.verdict == name
    ]
    same = sum(c.verdict == "same" for c in changes)
    both = sum(c.verdict not in alone for c in changes)
    missing = f", {len(changes) - both} not compared" if both < len(changes) else ""
    return [*lines, f"{both} cells compared, {same} as they were{missing}"]


def _change(before: Cell, now: Cell | None, tolerance: float) -> Change:
    if now is None:
        return Change(before.key, before, None)
    worse: list[str] = []
    better: list[str] = []
    if before.status != now.status:
        text = f"was {before.status}, is {now.status}"
        if now.reason:
            text += f" ({now.reason})"
        if before.status == OK:
            worse.append(text)
        elif now.status == OK or before.status == UNAVAILABLE:
            better.append(text)
        else:
            worse.append(text)
        return Change(before.key, before, now, tuple(worse), tuple(better))
    apart = _apart(before, now)
    if apart is None:
        _note(worse, better, "time", before.ratio, now.ratio, _room(before, now, tolerance))
        _note(worse, better, "peak", before.peak_ratio, now.peak_ratio, PEAK_TOLERANCE)
    if before.planned is not None and now.planned is not None:
        if before.planned.numbers_agree and not now.planned.numbers_agree:
            worse.append("its numbers no longer agree")
    if now.retries > before.retries:
        worse.append(f"allocator retries {before.retries} -> {now.retries}")
    return Change(before.key, before, now, tuple(worse), tuple(better), apart)


def _apart(before: Cell, now: Cell) -> str | None:
    """Why the ratios of two cells are to different things; None where they are to the same."""
    there, here = before.reference, now.reference
    if there is None or here is None:
        return None
    if there.kind != here.kind:
        return f"was timed beside the {there.kind} step, is beside the {here.kind} one"
    if bool(there.retries) != bool(here.retries):
        retries = f"{there.retries} then, {here.retries} now"
        return f"allocator retries of the {here.kind} step beside it: {retries}"
    return None


def _reasons(change: Change) -> list[str]:
    return [*change.worse, *change.better, *([change.apart] if change.apart else [])]


def _note(
    worse: list[str],
    better: list[str],
    name: str,
    before: float | None,
    now: float | None,
    room: float,
) -> None:
    if before is None:
        return
    if now is None:
        worse.append(f"{name} has no ratio any more")
        return
    change = now / before - 1
    text = f"{name} / reference {before:.3f} -> {now:.3f} ({change:+.1%}, room {room:.1%})"
    if change > room:
        worse.append(text)
    elif change < -room:
        better.append(text)


def _room(before: Cell, now: Cell, tolerance: float) -> float:
    return max(tolerance, before.noise, now.noise)
