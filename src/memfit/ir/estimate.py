"""Estimate: what a step would need on a GPU, found out without one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.ir.codec import to_data

SCHEMA_VERSION = 2
# Ways to run the step in the order in which they are advised, and the techniques that each takes
# beside recompute.
WAYS = (
    "plain",
    "recompute",
    "loss in tiles",
    "step in backward",
    "loss in tiles, step in backward",
    "optimizer on host",
    "optimizer on host, step in backward",
    "all of these",
)
TECHNIQUES = {
    "loss in tiles": ("tiled_loss",),
    "step in backward": ("step_in_backward",),
    "loss in tiles, step in backward": ("tiled_loss", "step_in_backward"),
    "optimizer on host": ("optimizer_offload",),
    "optimizer on host, step in backward": ("optimizer_offload", "step_in_backward"),
    "all of these": ("tiled_loss", "optimizer_offload", "step_in_backward"),
}
EAGER = "eager"
# The allocator holds more than the tensors in it: 1 to 2.5 % on the steps that were measured.
UNUSED_SHARE = 0.03


@dataclass(frozen=True)
class SegmentEstimate:
    """One segment call: what it saves for its backward, and its parameters."""

    name: str
    saved_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Needs:
    """Peak bytes of each way to run the step; all but the first are bounds, not plans.

    `recompute` drops what every segment, or run of segments, saved. The others do so as well:
    `tiled_loss` makes the loss tile by tile, without the full logits; `step_in_backward` steps each
    segment as soon as its gradients are there; `optimizer_on_host` keeps the optimizer's state in
    host memory; `all` does everything. No way needs more than one that does less.
    """

    plain_bytes: int
    recompute_bytes: int
    tiled_loss_bytes: int
    step_in_backward_bytes: int
    tiled_loss_step_in_backward_bytes: int
    optimizer_on_host_bytes: int
    optimizer_on_host_step_in_backward_bytes: int
    all_bytes: int

    def in_order(self) -> tuple[int, ...]:
        """The bytes of each of WAYS."""
        return (
            self.plain_bytes,
            self.recompute_bytes,
            self.tiled_loss_bytes,
            self.step_in_backward_bytes,
            self.tiled_loss_step_in_backward_bytes,
            self.optimizer_on_host_bytes,
            self.optimizer_on_host_step_in_backward_bytes,
            self.all_bytes,
        )


@dataclass(frozen=True)
class CardEstimate:
    """The step on one card, or in so many bytes.

    `way` is the first of WAYS that fits, None when none does. `guessed_step_s` is the plain step by
    a roofline, whether it fits or not.
    """

    name: str
    usable_bytes: int
    needs: Needs
    way: str | None
    guessed_step_s: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the plain step fits."""
        return self.way == "plain"

    @property
    def headroom_bytes(self) -> int:
        """What the plain step leaves free; negative: what it lacks."""
        return self.usable_bytes - with_unused(self.needs.plain_bytes)


@dataclass(frozen=True)
class Estimate:
    """One step, traced without memory; `cards` are those that were asked about.

    `categories` split the peak. `static_bytes` are parameters, gradients, optimizer state, buffers
    and batch, `trained_bytes` the parameters that are trained. `step` is "eager": every operator
    runs by itself.
    """

    workload: dict[str, str]
    peak_bytes: int
    categories: dict[str, int]
    where: str
    static_bytes: int
    state_bytes_per_parameter: float  # weights, gradients and optimizer state
    needs: Needs
    segments: tuple[SegmentEstimate, ...]
    flops: int
    moved_bytes: int
    cards: tuple[CardEstimate, ...]
    notes: tuple[str, ...] = ()
    trained_bytes: int = 0
    step: str = EAGER
    schema_version: int = SCHEMA_VERSION

    @property
    def fits(self) -> bool:
        """Whether the plain step fits on any of the cards."""
        return any(card.fits for card in self.cards)

    @property
    def hopeless(self) -> bool:
        """Whether the trained parameters alone are larger than every card: no technique helps."""
        return all(self.trained_bytes > card.usable_bytes for card in self.cards)

    def to_json(self) -> dict[str, Any]:
        """The object that `memfit estimate --json` prints."""
        data: dict[str, Any] = to_data(self)
        for card, row in zip(self.cards, data["cards"], strict=True):
            row.update(fits=card.fits, headroom_bytes=card.headroom_bytes)
        return {"schema_version": data.pop("schema_version"), "fits": self.fits, **data}


def with_unused(size: int) -> int:
    """What the allocator takes from the card to hold `size` bytes of tensors."""
    return int(size * (1 + UNUSED_SHARE))


def first_way(needs: Needs, usable_bytes: int) -> str | None:
    """The first of WAYS whose bytes fit."""
    for way, size in zip(WAYS, needs.in_order(), strict=True):
        if with_unused(size) <= usable_bytes:
            return way
    return None
