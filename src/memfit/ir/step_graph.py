"""StepGraph: one training step as segment calls and the memory blocks they make, hold and free.

Positions number the events of the step with everything kept: forward, backward, optimizer.
A block is alive at position p when `birth <= p < death`, or while something holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

STATIC_CATEGORIES = ("parameters", "optimizer_state", "buffers", "batch", "other")
BLOCK_CATEGORIES = ("gradients", "activations", "temporaries")
PHASES = ("forward", "head and loss", "backward", "optimizer")  # of a step, in their order
FEW_CALLS, LONG_RUNS = 30, (6, 8, 12, 16)
CATEGORIES = STATIC_CATEGORIES + BLOCK_CATEGORIES
_FUSED_CODE = "Compiled"  # in torch's names for code of many operators, beside keys and numbers
LOSS = "loss()"  # where a loss function is a segment: its name among those of modules


@dataclass(frozen=True)
class Hold:
    """Call `call` saves the block for its backward and lets go of it at position `release`.

    A replayed copy is dropped at `replay_release`: as soon as it was handed to the backward.
    """

    call: int
    release: int
    replay_release: int


@dataclass(frozen=True)
class Block:
    """One allocation. `death` is when the running code drops it; `holds` may outlive that."""

    id: int
    bytes: int
    birth: int
    death: int
    category: str
    call: int = -1  # the segment call that allocates it; -1: code between segments
    origin: str = ""  # what asked for it, as the profiler calls it
    holds: tuple[Hold, ...] = ()

    @property
    def operator(self) -> str:
        """The operator that asked for it; empty where that is not known, as inside fused code."""
        name = self.origin.rpartition(": ")[2].removeprefix("aten::")
        return "" if _FUSED_CODE in self.origin else name


@dataclass(frozen=True)
class Call:
    """One call of a segment's module in the step.

    `need` is the backward position where its saved tensors are first wanted, `done` where the
    last is let go. `stop` is the forward position after which a replay has nothing left to make.
    `linked` are the argument blocks that a replay of the call before makes anew; `number` says
    which of the module's `visits` in the step this is.
    """

    index: int
    module: str
    number: int
    visits: int
    kind: str
    leaf: bool
    enter: int
    stop: int
    exit: int
    need: int
    done: int
    args: tuple[int, ...] = ()
    linked: tuple[int, ...] = ()
    chained: bool = False  # a replay may go on from the call before into this one
    alike: int = -1  # the first call with the same class and the same allocations
    pinned: str | None = None  # why no run may begin with it, if so
    mutated_buffers: tuple[str, ...] = ()
    state_bytes: int = 0  # generator states and the like, kept for a replay
    graph: int = -1  # its joint graph among the profile's; -1: it was not captured
    finish: int = -1  # the backward position where a captured call's backward has returned
    held: dict[str, int] = field(default_factory=dict)  # input and output nodes -> their blocks
    source: str = ""  # where its module's forward begins: the text of a Source

    @property
    def name(self) -> str:
        """The module's name, with the number of the call when it is not the first."""
        return self.module if self.number == 0 else f"{self.module}#{self.number}"


@dataclass(frozen=True)
class StepGraph:
    """The whole step: `static` bytes are there from start to end, by category."""

    length: int
    model_end: int  # where the model's forward returns; the loss may come after
    forward_end: int
    backward_end: int
    static: dict[str, int]
    calls: tuple[Call, ...]
    blocks: tuple[Block, ...]
    model_calls: int = 1  # how often the step calls the model itself

    @property
    def static_bytes(self) -> int:
        """Bytes there before the step begins."""
        return sum(self.static.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients when the optimizer starts."""
        return sum(b.bytes for b in self.blocks if b.category == "gradients")

    @property
    def fixed_bytes(self) -> int:
        """Static bytes as budgets count them: with all gradients."""
        return self.static_bytes + self.gradient_bytes

    def accumulating(self) -> StepGraph:
        """The same step while gradients of earlier micro-batches stand: new ones are added.

        Those of a step that was recorded so stand from its beginning.
        """
        made = [b for b in self.blocks if b.category == "gradients" and b.birth > 0]
        added = {
            b.id: replace(b, category="temporaries", death=min(b.death, b.birth + 1)) for b in made
        }
        standing = {**self.static, "gradients": sum(b.bytes for b in made)}
        blocks = tuple(added.get(b.id, b) for b in self.blocks)
        return replace(self, static=standing, blocks=blocks)

    def runs(self, longest: int) -> list[tuple[int, int]]:
        """The runs (first, last) of at most `longest` chained calls that can be recomputed.

        In a step of many calls, long runs come in a few lengths only, to keep the choice small.
        """
        found = []
        few = len(self.calls) <= FEW_CALLS
        for first, call in enumerate(self.calls):
            if call.pinned:
                continue
            last = first
            while True:
                length = last - first + 1
                alone = length == 1 and call.leaf  # recomputing one layer frees nothing
                if not alone and (few or length <= 4 or length in LONG_RUNS):
                    found.append((first, last))
                last += 1
                if last - first >= longest or last >= len(self.calls):
                    break
                follower = self.calls[last]
                # A pinned follower may sit inside a run: only its own input is in danger.
                if not follower.chained:
                    break
        return found

    def held_arguments(self, first: int, last: int) -> frozenset[int]:
        """Blocks that recomputing calls `first` to `last` as one keeps until their backward."""
        held = set(self.calls[first].args)
        for call in self.calls[first + 1 : last + 1]:
            held.update(set(call.args) - set(call.linked))
        return frozenset(held)
