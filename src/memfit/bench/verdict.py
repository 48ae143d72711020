"""Where memfit is faster, where it is not, and by how much. Arithmetic on cells, no torch.

Cells are compared as ratios to the reference that each timed in its own process, so only those
with the same kind of reference stand side by side. A peer competes with a plan when it needs no
more memory; differences within the noise of either cell count as equal. A plan that no peer
competes with is alone: smaller than all of them, and not called faster than any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.ir.bench import REFUSED, Cell

MIB = 2**20


@dataclass(frozen=True)
class Duel:
    """A memfit cell beside its fastest rival that takes no more memory; None: there is none."""

    planned: Cell
    rival: Cell | None

    @property
    def gain(self) -> float:
        """The rival's time over the plan's, less one: positive where memfit is faster."""
        assert self.rival is not None
        return _ratio(self.rival) / _ratio(self.planned) - 1

    @property
    def noise(self) -> float:
        """A gain within this says nothing."""
        assert self.rival is not None
        return max(self.planned.noise, self.rival.noise)

    @property
    def outcome(self) -> str:
        """One of: alone, faster, equal, slower."""
        if self.rival is None:
            return "alone"
        if abs(self.gain) <= self.noise:
            return "equal"
        return "faster" if self.gain > 0 else "slower"


@dataclass(frozen=True)
class Verdict:
    """One workload: every plan beside its rival, and peers that no plan beats."""

    workload: str
    duels: tuple[Duel, ...]
    unbeaten: tuple[Cell, ...]  # peers on the front: no plan is as small and as fast
    lowest_planned: Cell | None
    lowest_peer: Cell | None
    left_out: tuple[str, ...]

    @property
    def judged(self) -> bool:
        """Whether there was a plan and a peer to compare it with."""
        return bool(self.duels) and self.lowest_peer is not None


def is_memfit(cell: Cell) -> bool:
    """Whether a cell is one of memfit's own."""
    return cell.system.partition(":")[0].startswith("memfit")


def comparable(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with a peak and a ratio to the kind of reference that most of them have."""
    measured = [c for c in cells if c.ok and c.ratio is not None and c.peak_bytes is not None]
    kinds = Counter(c.reference.kind for c in measured if c.reference is not None)
    if not kinds:
        return []
    usual = kinds.most_common(1)[0][0]
    return [c for c in measured if c.reference is not None and c.reference.kind == usual]


def pareto_front(cells: Sequence[Cell]) -> list[Cell]:
    """The cells that no other beats in memory and time together, by memory."""
    front: list[Cell] = []
    for cell in sorted(comparable(cells), key=lambda c: (c.peak_bytes or 0, _ratio(c))):
        if not front or _ratio(cell) < _ratio(front[-1]):
            front.append(cell)
    return front


def judge(workload: str, cells: Sequence[Cell]) -> Verdict:
    """Compare the plans of one workload with its peers."""
    shown = comparable(cells)
    plans = [c for c in shown if is_memfit(c) and _agrees(c)]
    peers = [c for c in shown if not is_memfit(c)]
    duels = tuple(Duel(plan, _fastest_within(peers, _peak(plan))) for plan in plans)
    unbeaten = tuple(c for c in pareto_front(shown) if not is_memfit(c) and not _matched(c, plans))
    left_out = [
        f"{c.system}: its numbers do not agree" for c in shown if is_memfit(c) and not _agrees(c)
    ]
    left_out += [f"{c.system}: {c.reason}" for c in cells if is_memfit(c) and c.status == REFUSED]
    left_out += [
        f"{c.system}: {c.status}"
        for c in cells
        if is_memfit(c) and not c.ok and c.status != REFUSED
    ]
    return Verdict(
        workload,
        duels,
        unbeaten,
        min(plans, key=_peak, default=None),
        min(peers, key=_peak, default=None),
        tuple(left_out),
    )


def verdict_lines(verdict: Verdict) -> list[str]:
    """The verdict in words: the first line says how often memfit is faster than its peers."""
    if not verdict.judged:
        why = ["no peer to compare with"] if verdict.duels else []
        said = "; ".join([*why, *verdict.left_out]) or "no plan was run"
        return [f"{verdict.workload}: nothing to judge ({said})"]
    lines = [f"{verdict.workload}: {_tally(verdict.duels)}"]
    lines += [_duel_line(duel) for duel in verdict.duels]
    plans = [duel.planned for duel in verdict.duels]
    lines += [_unbeaten_line(peer, plans) for peer in verdict.unbeaten]
    low, peer = verdict.lowest_planned, verdict.lowest_peer
    if low is not None and peer is not None:
        less = 1 - _peak(low) / _peak(peer)
        side = f"{less:.1%} below" if less >= 0 else f"{-less:.1%} above"
        lines.append(
            f"smallest peak: {low.system} {_mb(_peak(low))}, {side} the peers' {peer.system} "
            f"{_mb(_peak(peer))}"
        )
    return lines + [f"left out: {text}" for text in verdict.left_out]


def summary_line(verdicts: Iterable[Verdict]) -> str | None:
    """All workloads in one line; None where nothing was compared."""
    judged = [v for v in verdicts if v.judged]
    if not judged:
        return None
    duels = [duel for v in judged for duel in v.duels]
    text = f"{len(judged)} workload{'s' if len(judged) > 1 else ''}: {_tally(duels)}"
    behind = [d for d in duels if d.outcome == "slower"]
    if not behind:
        return text
    worst = min(behind, key=lambda d: d.gain)
    assert worst.rival is not None
    return (
        f"{text}; furthest behind: {worst.planned.system} on {worst.planned.workload}, "
        f"{_ratio(worst.planned) / _ratio(worst.rival) - 1:.1%} slower than {worst.rival.system}"
    )


def _tally(duels: Sequence[Duel]) -> str:
    count = Counter(duel.outcome for duel in duels)
    words = [f"memfit is faster at {count['faster']} of {len(duels)} points"]
    words += [f"equal within noise at {count['equal']}"] if count["equal"] else []
    words += [f"behind at {count['slower']}"] if count["slower"] else []
    words += [f"alone at {count['alone']} (no peer needs so little)"] if count["alone"] else []
    return ", ".join(words)


def _duel_line(duel: Duel) -> str:
    plan = duel.planned
    text = f"{plan.system}: {_mb(_peak(plan))}, {_ratio(plan):.3f}x"
    if duel.rival is None:
        return f"{text}; no peer needs so little"
    rival = f"{duel.rival.system} ({_mb(_peak(duel.rival))}, {_ratio(duel.rival):.3f}x)"
    if duel.outcome == "equal":
        return f"{text}; as fast as {rival} within noise ({duel.gain:+.1%}, noise {duel.noise:.1%})"
    gain = abs(1 - _ratio(plan) / _ratio(duel.rival))
    return f"{text}; {gain:.1%} {duel.outcome} than {rival}"


def _unbeaten_line(peer: Cell, plans: Sequence[Cell]) -> str:
    text = f"not beaten: {peer.system} ({_mb(_peak(peer))}, {_ratio(peer):.3f}x)"
    best = _fastest_within(plans, _peak(peer))
    if best is None:
        return f"{text}; no plan that was run needs so little"
    slower = _ratio(best) / _ratio(peer) - 1
    return f"{text}; within its memory {best.system} is {slower:.1%} slower"


def _fastest_within(cells: Sequence[Cell], peak_bytes: int) -> Cell | None:
    small = [c for c in cells if _peak(c) <= peak_bytes]
    return min(small, key=_ratio, default=None)


def _matched(peer: Cell, plans: Sequence[Cell]) -> bool:
    """Whether some plan takes no more memory and is as fast, within noise."""
    return any(
        _peak(p) <= _peak(peer) and _ratio(p) / _ratio(peer) - 1 <= max(p.noise, peer.noise)
        for p in plans
    )


def _agrees(cell: Cell) -> bool:
    return cell.planned is None or cell.planned.numbers_agree


def _ratio(cell: Cell) -> float:
    assert cell.ratio is not None
    return cell.ratio


def _peak(cell: Cell) -> int:
    assert cell.peak_bytes is not None
    return cell.peak_bytes


def _mb(size: int) -> str:
    return f"{size / MIB:.0f} MB" if size >= 10 * MIB else f"{size / MIB:.2f} MB"
