"""Ways to run the whole step: techniques at work, parts of the batch, what a plan makes of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from memfit.ir.profile import Profile
from memfit.planning.make_plan import Goal
from memfit.planning.techniques import INT8_WEIGHTS, ON_HOST, ROUNDED_STATE
from memfit.planning.trials import Trial, tried
from memfit.runtime.setup import Setup
from memfit.workload import Workload

Measure = Callable[[Setup | None, int], Profile]  # with a set-up, of the batch in so many parts
Key = tuple[frozenset[str], int, int]  # techniques, parts, bytes of state that stay
SAME = ((*ON_HOST, *ROUNDED_STATE), INT8_WEIGHTS)  # one of each at most: state, frozen weights


@dataclass(frozen=True)
class Way:
    """A set-up, parts of the batch, and what a plan makes of the step run so."""

    setup: Setup
    split: int
    trial: Trial

    @property
    def techniques(self) -> tuple[str, ...]:
        """Those of the loss and the optimizer, in the order they go to work."""
        return self.setup.techniques

    @property
    def kept(self) -> int:
        """Bytes of optimizer state that may stay on the device."""
        return self.setup.state_kept_bytes

    @property
    def key(self) -> Key:
        """What tells it from other ways."""
        return key_of(self.techniques, self.split, self.kept)

    @property
    def at_work(self) -> Setup | None:
        """The set-up; None where it does nothing."""
        return self.setup if self.techniques else None


class Ways:
    """The ways that were tried, each profiled and planned once."""

    def __init__(
        self,
        workload: Workload,
        base: Profile,
        goal: Goal,
        measure: Measure,
        tile_bytes: int | None,
    ) -> None:
        self._workload, self._base, self._goal, self._measure = workload, base, goal, measure
        self._tile_bytes = tile_bytes
        self.plain = Way(setup_of((), workload, base, tile_bytes), 1, tried(base, goal))
        self._known: dict[Key, Way] = {self.plain.key: self.plain}

    @property
    def trials(self) -> list[Trial]:
        """What plans made of each."""
        return [way.trial for way in self._known.values()]

    def known(self, key: Key) -> Way | None:
        """The way, if it was tried."""
        return self._known.get(key)

    def of(self, techniques: Sequence[str], split: int, kept: int = 0) -> Way:
        """The step run so, profiled and planned."""
        key = key_of(techniques, split, kept)
        if key not in self._known:
            setup = setup_of(techniques, self._workload, self._base, self._tile_bytes, kept)
            profile = self._measure(setup if techniques else None, split)
            self._known[key] = Way(setup, split, tried(profile, self._goal))
        return self._known[key]


def key_of(techniques: Sequence[str] | AbstractSet[str], split: int, kept: int = 0) -> Key:
    """What tells a way from others."""
    return frozenset(techniques), split, kept if "optimizer_offload" in techniques else 0


def joined(taken: Sequence[str], name: str) -> list[str]:
    """The taken techniques and one more, in place of others for the same: the optimizer's state,
    or frozen weights."""
    others = next((ways for ways in SAME if name in ways), ())
    return [*(t for t in taken if t not in others), name]


def setup_of(
    techniques: Sequence[str],
    workload: Workload,
    profile: Profile,
    tile_bytes: int | None,
    state_kept_bytes: int = 0,
) -> Setup:
    """The set-up of these techniques on a workload; parameters of a segment step together."""
    modules = [call.module for call in profile.graph.calls]
    sizes = tile_bytes, state_kept_bytes
    return Setup(techniques, workload.model, workload.optimizer, modules, *sizes)
