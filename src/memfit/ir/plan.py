"""Plan: what to do with every segment call, and what that is expected to give."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from memfit.errors import PlanFileError
from memfit.ir.codec import from_data, to_data
from memfit.ir.plan_check import fault_in

SCHEMA_VERSION = 3
KEEP, RECOMPUTE, PARTIAL, OFFLOAD = "keep", "recompute", "partial", "offload"


@dataclass(frozen=True)
class ActivationPlan:
    """The decision for one tensor that the backward needs, and why.

    Ranks number the operators of the segment's forward, and of its backward.
    """

    name: str
    decision: str
    bytes: int
    recompute_s: float
    creation_rank: int
    first_backward_rank: int
    reason: str


@dataclass(frozen=True)
class VariantPlan:
    """One way to run a captured segment, for all calls that use it.

    `graph` is the key of its joint graph, `saved` the nodes handed from forward to backward, of
    which `offloaded` ones wait on the host.
    """

    graph: str
    kind: str
    saved: tuple[str, ...]
    unplanned: bool
    forward_ranks: int
    backward_ranks: int
    activations: tuple[ActivationPlan, ...]
    offloaded: tuple[str, ...] = ()


@dataclass(frozen=True)
class SegmentPlan:
    """The decision for one segment call. `run` numbers the calls recomputed together.

    `variant` is the one it runs by, for a captured segment; `uncaptured` says why it is none.
    `activations` are those of an uncaptured segment. What is offloaded is off the device before
    the forward of segment `release`, and starts to come back before the backward of segment
    `prefetch`; the number of segments stands for the end of the model's forward.
    """

    name: str
    module: str
    number: int
    visits: int
    kind: str
    decision: str
    saved_bytes: int  # from forward to backward when nobody decides
    recomputed_bytes: int  # of these, not kept
    recompute_s: float
    reason: str
    run: int | None = None
    offloaded_bytes: int = 0  # of the saved ones, on the host
    release: int | None = None
    prefetch: int | None = None
    variant: int | None = None
    uncaptured: str | None = None
    mutated_buffers: tuple[str, ...] = ()
    activations: tuple[ActivationPlan, ...] = ()


@dataclass(frozen=True)
class TechniqueChoice:
    """A technique that could have been used, beside those taken before it, measured unplanned."""

    name: str
    taken: bool
    why: str
    saved_bytes: int | None = None  # of the peak; None: it was not tried
    cost_s: float | None = None


@dataclass(frozen=True)
class Prediction:
    """What the simulator expects of the planned step."""

    peak_bytes: int
    reserved_bytes: int
    step_s: float
    lower_bound_s: float
    gap: float
    categories: dict[str, int]
    where: str
    copy_s: float = 0.0  # of copying to the host and back, both lanes together
    stall_s: float = 0.0  # of waiting for copies


@dataclass(frozen=True)
class Plan:
    """Pure data: which calls are recomputed, for which workload, with which expectation."""

    fingerprint: str
    workload: dict[str, str]
    torch: str
    strategy: str
    budget_bytes: int | None
    segments: tuple[SegmentPlan, ...]
    variants: tuple[VariantPlan, ...]
    predicted: Prediction
    baseline_peak_bytes: int
    baseline_step_s: float
    static_bytes: int
    minimum_feasible_bytes: int
    plan_s: float = 0.0
    executor: str = "module"
    counts: str = "reserved"  # what must stay within the budget: "reserved" or "live" bytes
    techniques: tuple[str, ...] = ()
    choices: tuple[TechniqueChoice, ...] = ()  # techniques of the loss and the optimizer
    split: int = 1  # parts that a batch is run in
    tile_bytes: int | None = None  # of logits, where the loss is made in tiles
    state_kept_bytes: int = 0  # of optimizer state, at most, where the rest waits on the host
    host_bytes: int = 0  # memory that waits on the host at once
    host_budget_bytes: int | None = None  # no more host memory than this is taken for it
    smallest_move_bytes: int = 0  # smaller tensors are not moved
    trim: bool = False  # give the allocator's free pages back between forward and backward
    inplace_off: tuple[str, ...] = ()
    channels_last: bool = False  # images are given to the model in that layout
    cuda_graphs: bool = False  # forward and backward are launched as one each
    padded: dict[str, bool] = field(default_factory=dict)  # odd matrix products, by their sizes
    model_calls: int = 1  # how often the step calls the model itself
    notes: tuple[str, ...] = ()
    route_key: str = ""  # of the segments it was made with: one that is missing is noticed
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        if not self.route_key:
            object.__setattr__(self, "route_key", self.own_route_key)

    @property
    def setup(self) -> tuple[str, ...]:
        """The techniques of the loss and the optimizer, in the order they go to work."""
        return tuple(t for t in self.techniques if t not in ("recompute", "offload", "microbatch"))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The runs (first, last) of calls that are recomputed as one."""
        members: dict[int, list[int]] = {}
        for index, segment in enumerate(self.segments):
            if segment.run is not None:
                members.setdefault(segment.run, []).append(index)
        return [(calls[0], calls[-1]) for calls in members.values()]

    @property
    def route(self) -> list[tuple[str, int, int]]:
        """Module, number of the call and number of calls, for every segment."""
        return [(s.module, s.number, s.visits) for s in self.segments]

    @property
    def own_route_key(self) -> str:
        """How many segments there are, and a hash of what they are."""
        digest = hashlib.sha256(repr(self.route).encode()).hexdigest()
        return f"{len(self.segments)}-{digest[:12]}"

    @property
    def calls_at_work(self) -> frozenset[int]:
        """The calls that are recomputed or move memory, and those at which it goes or comes.

        Where anything moves the last call is one of them: a loss that calls parts of the model,
        never the model itself, ends its forward with it.
        """
        last = len(self.segments) - 1
        calls: set[int] = set()
        for index, segment in enumerate(self.segments):
            if segment.run is not None:
                calls.add(index)
            if segment.release is not None and segment.prefetch is not None:
                calls |= {index, min(segment.release, last), min(segment.prefetch, last), last}
        return frozenset(calls)

    @property
    def unplanned_is_plain(self) -> bool:
        """Whether the step with everything kept is the one that the workload has by itself."""
        return self.executor == "module" and not self.channels_last and not self.cuda_graphs

    def unplanned(self) -> Plan:
        """The same step by the same executor with everything kept."""
        default = {v.graph: i for i, v in enumerate(self.variants) if v.unplanned}
        segments = tuple(
            replace(
                s,
                decision=KEEP,
                recomputed_bytes=0,
                offloaded_bytes=0,
                run=None,
                release=None,
                prefetch=None,
                variant=None if s.variant is None else default[self.variants[s.variant].graph],
            )
            for s in self.segments
        )
        return replace(
            self, strategy="none", segments=segments, trim=False, techniques=(), host_bytes=0
        )

    def resident(self) -> Plan:
        """The same plan with nothing on the host: what it would move stays on the device."""
        segments = tuple(
            replace(s, release=None, prefetch=None, offloaded_bytes=0) for s in self.segments
        )
        return replace(self, segments=segments, host_bytes=0)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that wait on the host between forward and backward."""
        return sum(s.offloaded_bytes for s in self.segments)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that are not kept from forward to backward."""
        return sum(s.recomputed_bytes for s in self.segments)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept from forward to backward."""
        return sum(s.saved_bytes - s.recomputed_bytes - s.offloaded_bytes for s in self.segments)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(to_data(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFileError(
                f"cannot read the plan {str(path)!r}: {error}",
                hint="make one with: memfit plan TARGET --budget B -o plan.json",
            ) from error
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            version = data.get("schema_version")
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {version!r}, not {SCHEMA_VERSION}")
            plan = from_data(Plan, data)
            if (fault := fault_in(plan)) is not None:
                raise ValueError(fault)
            return plan
        except (ValueError, TypeError, KeyError) as error:
            raise PlanFileError(
                f"{str(path)!r} is not a whole memfit plan: {error}",
                hint="the file may be cut off, edited or of another version: make the plan again",
            ) from error
