"""Choose the segments of a step from its tree of module calls.

Start from repeated same-class modules (transformer blocks, residual blocks); split what still
holds a large share of the saved bytes; single layers outside stay single, so that chains of them
(a stem) can be recomputed together. A user may name the segments instead; EVERY_LAYER names each
single layer, which moves memory tensor by tensor and leaves nothing to recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from memfit.capture.discover import Discovery, Visit
from memfit.errors import UsageError
from memfit.ir.step_graph import LOSS

LARGE_SHARE = 0.2  # of all saved bytes: more than this in one segment leaves the plan no choice
EVERY_LAYER = "**"
SPLIT_COVER = 0.6  # parts must hold this much of what the whole saves, or splitting loses it


@dataclass(frozen=True)
class Segment:
    """One chosen call: the visit, and whether its input is exactly the output of the one before."""

    visit: Visit
    visits: int  # how often its module is called in the step
    linked: frozenset[int]  # serials of inputs that are outputs of the segment before
    pinned: str | None
    model_calls: int = 1  # how often the step calls the model


def choose_segments(
    discovery: Discovery, patterns: Sequence[str] | None = None, *, hidden: bool = False
) -> tuple[Segment, ...]:
    """Return the step's segment calls in calling order; `hidden` ones, too, if asked for."""
    chosen = _by_name(discovery, patterns) if patterns else _by_shape(discovery)
    chosen = [visit for visit in chosen if hidden or not visit.hidden]
    losses = sum(visit.module == LOSS for visit in chosen)
    if losses < discovery.visits_of.get(LOSS, 0):
        # Another one lies inside a segment, whose compiled code does not call it: leave all alone.
        chosen = [visit for visit in chosen if visit.module != LOSS]
    model_calls = max(discovery.visits_of.get("", 1), 1)
    segments = []
    before: Visit | None = None
    for visit in chosen:
        linked: frozenset[int] = frozenset()
        if before is not None and before.packs[1] == visit.packs[0]:
            # Nothing is saved between the two, so a replay may go from one into the other.
            linked = frozenset(visit.inputs) & frozenset(before.outputs) - visit.changed
        if visit.mutated_inputs - linked:
            # It changes a tensor that a replay would not make anew: no run may go on into it.
            linked = frozenset()
        pinned = "changes its input in place" if visit.mutated_inputs else None
        visits = discovery.visits_of[visit.module]
        segments.append(Segment(visit, visits, linked, pinned, model_calls))
        before = visit
    return tuple(segments)


def _by_shape(discovery: Discovery) -> list[Visit]:
    chosen = _descend(discovery.root)
    if not chosen:
        return []
    total = max(discovery.root.saved_bytes, 1)
    while True:
        largest = max(chosen, key=lambda v: v.saved_bytes)
        if largest.saved_bytes <= LARGE_SHARE * total:
            return chosen
        splittable = [v for v in chosen if v.saved_bytes > LARGE_SHARE * total and _splits(v)]
        if not splittable:
            return chosen
        for visit in splittable:
            at = chosen.index(visit)
            chosen[at : at + 1] = _descend(visit)


def _splits(visit: Visit) -> bool:
    parts = sum(child.saved_bytes for child in visit.children if not child.leaf)
    return parts >= SPLIT_COVER * visit.saved_bytes


def _descend(visit: Visit) -> list[Visit]:
    """The segments below a visit: repeated modules whole, containers opened."""
    repeated = _repeated_kinds(visit)
    found: list[Visit] = []
    for child in visit.children:
        if child.leaf or child.kind in repeated:
            found.append(child)
        elif child.container or _holds_repeats(child):
            found.extend(_descend(child))
        else:
            found.append(child)
    modules = [v for v in found if v.module != LOSS]
    if visit.kind == "step" and len(modules) == 1 and modules[0] in visit.children:
        at = found.index(modules[0])
        found[at : at + 1] = _descend(modules[0]) or modules
    return found


def _repeated_kinds(visit: Visit) -> set[str]:
    modules: dict[str, set[str]] = {}
    for child in visit.children:
        if not child.leaf and not child.container:
            modules.setdefault(child.kind, set()).add(child.module)
    return {kind for kind, names in modules.items() if len(names) > 1}


def _holds_repeats(visit: Visit) -> bool:
    return bool(_repeated_kinds(visit)) or any(_holds_repeats(child) for child in visit.children)


def _by_name(discovery: Discovery, patterns: Sequence[str]) -> list[Visit]:
    visits = list(discovery.root.walk())
    chosen: list[Visit] = []
    for pattern in patterns:
        matches = [v for v in visits if _matches(v, pattern)]
        if not matches:
            raise UsageError(
                f"no module called in the step has a name like {pattern!r}",
                hint=f"names that are called: {_examples(visits)}",
            )
        chosen += [v for v in matches if v not in chosen]
    for outer in chosen:
        inside = [v for v in outer.walk() if v is not outer and v in chosen]
        if inside:
            raise UsageError(
                f"segment {inside[0].module!r} lies inside segment {outer.module!r}",
                hint="name modules that do not contain each other",
            )
    order = {id(v): i for i, v in enumerate(visits)}
    return sorted(chosen, key=lambda v: order[id(v)])


def _matches(visit: Visit, pattern: str) -> bool:
    if pattern == EVERY_LAYER:
        return visit.leaf
    # "layers.*" means the layers, not what is inside them.
    return fnmatchcase(visit.module, pattern) and visit.module.count(".") == pattern.count(".")


def _examples(visits: list[Visit]) -> str:
    names = list(dict.fromkeys(v.module for v in visits if v.module and not v.leaf))
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
