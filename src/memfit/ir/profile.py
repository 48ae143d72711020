"""Profile: what was measured of a step before planning it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from memfit.errors import ProfileFileError
from memfit.ir.codec import from_data, unpacked
from memfit.ir.file_check import fault_in_profile, of_version
from memfit.ir.joint_graph import JointGraph, Variant
from memfit.ir.step_graph import StepGraph

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class DeviceFacts:
    """The machine the step was measured on."""

    type: str  # "cuda" or "cpu"
    name: str
    capacity_bytes: int
    free_bytes: int
    torch: str
    driver: str | None = None
    host: str = ""  # Python, system and cores around it; "": of a profile before these were stored


@dataclass(frozen=True)
class CallTime:
    """Seconds of one segment call: forward, backward, and running its forward once more.

    Recomputing costs the device `recompute_s` and the host that feeds it `recompute_host_s`.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    recompute_host_s: float


@dataclass(frozen=True)
class Baseline:
    """The unplanned step as it was measured."""

    peak_bytes: int
    peak_reserved_bytes: int
    step_s: float


@dataclass(frozen=True)
class Placed:
    """A mapped stretch of an allocator's segment: where it lies, and whether it is free."""

    address: int
    bytes: int
    free: bool


@dataclass(frozen=True)
class CopyRates:
    """How copies between device and host go, as measured.

    `drag` is how many seconds a second of copying adds to the work beside it; 1 where nothing runs
    beside a copy.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0  # of one copy
    drag: float = 0.0
    host_s: float = 0.0  # the host's work for one tensor that is moved and brought back

    @property
    def overlap(self) -> bool:
        """Whether the device works on while it copies."""
        return self.drag < 1


SMALL_PAGE, LARGE_PAGE = 2 * 2**20, 20 * 2**20  # by which the CUDA allocator's segments grow


@dataclass(frozen=True)
class AllocatorStart:
    """What the CUDA allocator holds before a step.

    `small` and `large` lay out its two growing segments; `holes` are free blocks elsewhere.
    """

    reserved_bytes: int
    small: tuple[Placed, ...] = ()
    large: tuple[Placed, ...] = ()
    holes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurements:
    """What running variants of one joint graph showed.

    `factor` corrects the seconds of variants that were not run.
    """

    factor: float = 1.0
    variants: tuple[Variant, ...] = ()


@dataclass(frozen=True)
class Profile:
    """One step, measured: its graph, its seconds, its device, and how the plain step did.

    With `accumulate` above 1 the step has that many forwards and backwards: `step_s` counts them
    all, the graph shows one. So where a first pass only looks at gradients (`looks_first`), before
    those of the second are used as they appear.
    """

    fingerprint: str
    workload: dict[str, str]
    device: DeviceFacts
    graph: StepGraph
    call_times: tuple[CallTime, ...]
    step_s: float
    host_slack_s: float = 0.0  # host seconds of recompute that vanish behind the device's work
    # Outside of segments, by PHASES, in one pass; the optimizer's in a step. Empty: not measured.
    between_s: dict[str, float] = field(default_factory=dict)
    trim_s: float = 0.0  # what giving free pages back costs a step
    baseline: Baseline | None = None  # None: it does not fit on the device
    copy: CopyRates | None = None  # None: not measured, nothing can be moved to the host
    allocator: AllocatorStart | None = None  # None: reserved bytes cannot be predicted
    executor: str = "module"
    graphs: tuple[JointGraph, ...] = ()  # the distinct segments that were captured
    known: tuple[Measurements, ...] = ()  # what was seen of each graph's variants
    uncaptured: dict[str, str] = field(default_factory=dict)  # segment call -> why it was not
    inplace_off: tuple[str, ...] = ()  # modules that must not work in place to be recomputed
    channels_last: bool = False  # images were given to the model in that layout
    cuda_graphs: bool = False  # forward and backward were launched as one each
    padded: dict[str, bool] = field(default_factory=dict)  # odd matrix products, by their sizes
    accumulate: int = 1  # micro-batches per optimizer step
    split: int = 1  # of these, parts of one batch
    looks_first: bool = False  # forward and backward run twice: the optimizer steps in the second
    setup: tuple[str, ...] = ()  # techniques of the step itself that were at work
    tile_bytes: int | None = None  # of logits, where the loss is made in tiles
    state_kept_bytes: int = 0  # of optimizer state, at most, where the rest waits on the host
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def passes(self) -> int:
        """Forwards and backwards in a step."""
        return 2 * self.accumulate if self.looks_first else self.accumulate

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile that `memfit profile` wrote; it may be packed by gzip."""
        try:
            content = unpacked(path)
        except OSError as error:
            raise ProfileFileError(
                f"cannot read the profile {str(path)!r}: {error}",
                hint="make one with: memfit profile TARGET -o DIR",
            ) from error
        try:
            data = json.loads(content)
            profile = from_data(Profile, of_version(data, SCHEMA_VERSION))
        except (ValueError, TypeError) as error:
            raise ProfileFileError(
                f"{str(path)!r} is not a whole memfit profile: {error}",
                hint="the file may be cut off or of another kind: it is DIR/profile.json of "
                "memfit profile TARGET -o DIR",
            ) from error
        if not profile.graph.calls or len(profile.call_times) != len(profile.graph.calls):
            raise ProfileFileError(
                f"the profile {str(path)!r} is empty: {len(profile.graph.calls)} segments, "
                f"{len(profile.call_times)} of them timed",
                hint="profile a step that trains something: memfit profile TARGET -o DIR",
            )
        if (fault := fault_in_profile(profile)) is not None:
            raise ProfileFileError(
                f"the profile {str(path)!r} is of no step: it {fault}",
                hint="the file was edited: profile again, memfit profile TARGET -o DIR",
            )
        return profile
