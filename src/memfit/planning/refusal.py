"""Why a budget cannot be met: what stands in the way, and what would be possible."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from memfit.errors import InfeasibleError
from memfit.ir.profile import LARGE_PAGE, Profile
from memfit.ir.replay import LiveTensor
from memfit.ir.step_graph import LOSS, STATIC_CATEGORIES
from memfit.planning.acts import Act
from memfit.planning.mutwo.strategy import why_idle
from memfit.planning.naming import INSIDE, NOT_KNOWN
from memfit.planning.replay import live_at
from memfit.planning.simulate import Simulator
from memfit.units import format_bytes

WORTH_A_WORD = 0.1  # of the peak
_WITH_PLACE = ("activations", "temporaries")
_NUMBER = re.compile(r"(_\d+)?( \([^)]*\))?$")  # of a tensor among others, and whether it is back


def blocking_tensors(simulator: Simulator, acts: Sequence[Act], most: int = 5) -> list[str]:
    """The largest at the peak under `acts`: bytes, the operator that makes them, and where.

    Tensors of one operator and category count together.
    """
    peak, forward_end = simulator.timeline(acts).peak, simulator.graph.forward_end
    sizes: Counter[str] = Counter()
    places: dict[str, Counter[str]] = {}  # with their bytes
    for tensor in live_at(simulator, acts, peak.position):
        what = _what(tensor)
        sizes[what] += tensor.bytes
        if tensor.category in _WITH_PLACE and not tensor.name.startswith(INSIDE):
            between = "code between segments" if tensor.start < forward_end else ""
            places.setdefault(what, Counter())[tensor.module or between] += tensor.bytes
    return [
        f"{format_bytes(size)} {what}{_where(places.get(what, Counter()))}"
        for what, size in sizes.most_common(most)
        if size
    ]


def _what(tensor: LiveTensor) -> str:
    """The operator and the category, without the number that tells it from others like it."""
    if tensor.name.startswith(INSIDE):
        return ", ".join(filter(None, (tensor.name, tensor.source)))
    operator = _NUMBER.sub("", tensor.name)
    known = tensor.category not in STATIC_CATEGORIES and operator not in NOT_KNOWN
    return f"{operator} {tensor.category}" if known else tensor.category


def _where(sizes: Counter[str]) -> str:
    """The place with the most bytes, and how many more there are."""
    places = [place for place, _ in sizes.most_common() if place]
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f" in {places[0]}{more}" if places else ""


def incompressible_bytes(simulator: Simulator, acts: Sequence[Act]) -> dict[str, int]:
    """What the leanest plan still needs: `fixed` all through the step, and on top of that at the
    worst moments of `forward` and of `backward`."""
    fixed = simulator.graph.static_bytes
    highest = {"forward": 0, "backward": 0}
    for point in simulator.timeline(acts).points:
        phase = "forward" if point.position < simulator.graph.forward_end else "backward"
        highest[phase] = max(highest[phase], point.total - fixed)
    return {"fixed": fixed, **highest}


def strategy_fails(
    simulator: Simulator, strategy: str, budget: int, reached: Sequence[Act] | None, minimum: int
) -> InfeasibleError:
    """A simple strategy that misses a budget which `optimal` would meet."""
    what = "nothing" if reached is None else format_bytes(simulator.peak_bytes(reached))
    idle = why_idle(simulator) if strategy == "mutwo" else None
    finer = "" if idle is None else _finer(simulator.profile)
    return InfeasibleError(
        f"strategy {strategy!r} does not meet the budget of {format_bytes(budget)}: "
        f"it reaches {what}" + ("" if idle is None else f". {idle}"),
        budget_bytes=budget,
        minimum_bytes=minimum,
        hint=(f"give {finer}; " if finer else "")
        + f"strategy 'optimal' goes down to {format_bytes(minimum)}",
    )


def too_slow(
    what: str, slowdown: float, allowed: float, budget: int | None, minimum: int
) -> InfeasibleError:
    """What is asked for can be held, and the fastest plan that does takes longer than allowed."""
    return InfeasibleError(
        f"{what} costs {_up(slowdown, 3)}x the plain step's time, more than the allowed "
        f"{allowed:g}x",
        budget_bytes=budget,
        minimum_bytes=minimum,
        slowdown=slowdown,
        hint=f"allow --max-slowdown {_up(slowdown, 2)}, or ask for less memory saved",
    )


def _up(ratio: float, digits: int) -> str:
    """The ratio rounded up, so that what is said is enough."""
    scale = 10**digits
    return f"{math.ceil(ratio * scale) / scale:.{digits}f}"


def _finer(profile: Profile) -> str:
    """The option that lets plans decide inside segments; "" where they do."""
    if profile.executor != "module":
        return ""
    return f"--executor {'inductor' if profile.device.type == 'cuda' else 'graph'}"


def remedies(simulator: Simulator, acts: Sequence[Act], allowed: Sequence[str]) -> list[str]:
    """Techniques that nobody allowed, of what stands large at the peak under `acts`."""
    peak = simulator.timeline(acts).peak
    known = {*allowed, *simulator.profile.setup}
    state = peak.bytes.get("optimizer_state", 0)
    on_host = simulator.profile.device.type == "cpu"  # where it is already
    freed = peak.bytes.get("gradients", 0)
    if simulator.profile.accumulate > 1:  # they wait: only what the step takes beside them is less
        stepping = peak.position >= simulator.graph.backward_end
        freed = peak.bytes.get("temporaries", 0) if stepping else 0
    return [
        name
        for name, size in (
            ("tiled_loss", peak.total if _in_loss(simulator, peak.position) else 0),
            ("step_in_backward", freed),
            ("optimizer_offload", 0 if on_host else state),
        )
        if name not in known and size >= WORTH_A_WORD * peak.total
    ]


def _in_loss(simulator: Simulator, position: int) -> bool:
    """Whether the moment lies after the model's last segment and before its backward is over."""
    modules = [call for call in simulator.graph.calls if call.module != LOSS]
    return not modules or modules[-1].exit <= position <= max(modules[-1].need, modules[-1].done)


def nothing_fits(
    simulator: Simulator,
    budget: int,
    leanest: Sequence[Act],
    minimum: int,
    allowed: Sequence[str],
    host_bytes: int | None = None,
) -> InfeasibleError:
    """A budget below what the leanest plan needs, by the `allowed` techniques.

    With `host_bytes` on the host, which are more than there may be, one would hold it.
    """
    more = ",".join(f"+{name}" for name in remedies(simulator, leanest, allowed))
    profile = simulator.profile
    finer = _finer(profile)  # inside of whole segments there is more to decide
    parts = incompressible_bytes(simulator, leanest)
    idle = _held_before(profile, minimum)
    blocking = "; ".join(blocking_tensors(simulator, leanest))
    smaller = "a smaller batch" if _computes_in_half(profile) else "a smaller batch, or bf16"
    return InfeasibleError(
        f"no plan fits into {format_bytes(budget)}: the smallest possible is "
        f"{format_bytes(minimum)} ({minimum} bytes). Incompressible: "
        f"{format_bytes(parts['fixed'])} fixed (parameters, optimizer state, buffers, batch), "
        f"{format_bytes(parts['forward'])} more in forward, "
        f"{format_bytes(parts['backward'])} more in backward, gradients included. "
        f"At its peak ({simulator.timeline(leanest).peak.where}): {blocking}"
        + idle
        + ("" if host_bytes is None else ". The host budget is too small for a plan that would"),
        budget_bytes=budget,
        minimum_bytes=minimum,
        incompressible_bytes=parts,
        hint=("" if host_bytes is None else f"give --host-budget {host_bytes}, or ")
        + f"try --budget {round(minimum * 1.02)}, "
        + (f"--allow {more}, " if more else "")
        + (f"{finer}, " if finer else "")
        + ("a process that ran nothing before, " if idle else "")
        + smaller,
    )


def _held_before(profile: Profile, minimum: int) -> str:
    """What the allocator holds before the step though it is free, if that is worth a word."""
    if profile.allocator is None:
        return ""
    held = profile.allocator.reserved_bytes
    free = held - profile.graph.static_bytes
    if free < WORTH_A_WORD * minimum or free <= LARGE_PAGE:
        return ""
    return (
        f". Before the step the process holds {format_bytes(held)}, {format_bytes(free)} of it "
        "free, in pieces that cannot be given back because something lies beside them"
    )


def _computes_in_half(profile: Profile) -> bool:
    """Whether some operator makes numbers of 16 bits; whole segments do not tell."""
    made = (node for graph in profile.graphs for node in graph.nodes if node.op != "placeholder")
    return any(node.shape.startswith(("bfloat16", "float16")) for node in made)
