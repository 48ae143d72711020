"""Random steps, and a plain interpreter of them to compare the simulator with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from memfit.ir.profile import CallTime, DeviceFacts, Profile
from memfit.ir.step_graph import Block, Call, Hold, StepGraph

Run = tuple[int, int]
Draw = Callable[[st.SearchStrategy[Any]], Any]


# -- random steps ---------------------------------------------------------------------------------


@dataclass
class _Draft:
    bytes: int
    birth: int
    call: int
    death: int | None = None  # None: not dropped yet
    category: str = "activations"
    holds: dict[int, int] = field(default_factory=dict)
    handed: dict[int, int] = field(default_factory=dict)  # when a replayed copy is dropped


class _Writer:
    """Writes a step event by event, so that every graph it gives could have been recorded."""

    def __init__(self, draw: Draw, calls: int, scale: int) -> None:
        self.draw, self.count, self.scale = draw, calls, scale
        self.position = 0
        self.blocks: list[_Draft] = []
        self.calls: list[dict[str, Any]] = []
        self.saved: list[list[int]] = [[] for _ in range(calls)]

    def tick(self) -> int:
        self.position += 1
        return self.position

    def size(self) -> int:
        # Odd bytes beside the scale, so that no two plans have the same peak by chance.
        return self.draw(st.integers(0, 40)) * self.scale + self.draw(st.integers(0, 7))

    def make(self, call: int, category: str = "activations") -> int:
        self.blocks.append(_Draft(self.size(), self.tick(), call, category=category))
        return len(self.blocks) - 1

    def drop(self, number: int) -> None:
        self.blocks[number].death = self.tick()

    def standing(self) -> list[int]:
        return [n for n, b in enumerate(self.blocks) if b.death is None]

    def some(self, numbers: Sequence[int], most: int) -> list[int]:
        if not numbers:
            return []
        return self.draw(st.lists(st.sampled_from(numbers), max_size=most, unique=True))

    def chance(self, percent: int) -> bool:
        return self.draw(st.integers(0, 99)) < percent

    def forward(self) -> None:
        for index in range(self.count):
            for _ in range(self.draw(st.integers(0, 1))):  # code between the calls
                self.make(-1)
            for number in self.some(self.standing(), 2):
                self.drop(number)
            self.forward_call(index)

    def forward_call(self, index: int) -> None:
        outputs = [n for n in self.standing() if index and self.blocks[n].call == index - 1]
        args = self.some(self.standing(), 3)
        if outputs and self.chance(80):
            args = list(dict.fromkeys([self.draw(st.sampled_from(outputs)), *args]))
        links = [n for n in args if n in outputs]
        linked = self.some(links, len(links)) if self.chance(80) else []
        enter = self.tick()
        own: list[int] = []
        stop = -1
        for _ in range(self.draw(st.integers(1, 4))):
            own.append(self.make(index))
            # Its own blocks, its arguments, and now and then one that it never was given.
            others = args if self.chance(80) else self.standing()
            for number in self.some([n for n in {*own, *others} if n in self.standing()], 2):
                self.saved[index].append(number)
                stop = self.tick()
            for number in self.some([n for n in own if n in self.standing()], 1):
                self.drop(number)
        leaf = self.chance(20)
        self.calls.append(
            {
                "index": index,
                "module": f"layers.{index}",
                "number": 0,
                "visits": 1,
                "kind": "Linear" if leaf else "Block",
                "leaf": leaf,
                "enter": enter,
                "stop": stop,
                "exit": self.tick(),
                "args": tuple(args),
                "linked": tuple(sorted(linked)),
                "chained": bool(linked),
                "pinned": "changes its input in place" if self.chance(10) else None,
                "state_bytes": self.draw(st.sampled_from([0, 0, 5])) * self.scale // 4,
            }
        )

    def backward(self) -> None:
        order = list(range(self.count - 1, -1, -1))
        if self.chance(20):
            order = self.draw(st.permutations(order))
        late: list[tuple[int, int]] = []
        for index in order:
            wanted = bool(self.saved[index]) and not self.chance(10)
            self.calls[index] |= {"need": self.tick() if wanted else -1, "done": -1}
            for _ in range(self.draw(st.integers(0, 2))):
                kind = self.draw(st.sampled_from(["gradients", "temporaries"]))
                number = self.make(-1, kind)
                if kind == "temporaries":
                    self.drop(number)
            if not wanted:
                continue
            for number in dict.fromkeys(self.saved[index]):
                block = self.blocks[number]
                if block.call == index and self.chance(10):
                    late.append((index, number))  # let go after the call's own end
                else:
                    block.handed[index] = self.tick()
                    block.holds[index] = self.tick() if self.chance(50) else self.position
            self.calls[index]["done"] = self.tick()
            for call, number in late if self.chance(70) else []:
                self.blocks[number].holds.setdefault(call, self.tick())
            for number in self.some([n for n in self.standing() if self.unneeded(n)], 1):
                self.drop(number)
        for call, number in late:
            self.blocks[number].holds.setdefault(call, self.tick())

    def unneeded(self, number: int) -> bool:
        """Whether no call still has to save the block that it neither makes nor is given."""
        block = self.blocks[number]
        if block.category == "gradients":
            return False
        return not any(number in saved for saved in self.saved)

    def optimizer(self) -> None:
        for _ in range(self.draw(st.integers(0, 2))):
            self.drop(self.make(-1, "temporaries"))
        for number in self.standing():
            if self.blocks[number].category == "gradients":
                self.drop(number)

    def graph(self) -> StepGraph:
        self.forward()
        forward_end = self.tick()
        # What the running code drops when the forward is over: everything but a few.
        for number in self.standing():
            if any(number in saved for saved in self.saved) or self.chance(70):
                self.drop(number)
        self.backward()
        backward_end = self.tick()
        self.optimizer()
        end = self.tick()
        blocks = tuple(
            Block(
                id=number,
                bytes=b.bytes,
                birth=b.birth,
                death=end if b.death is None else b.death,
                category=b.category,
                call=b.call,
                origin=f"aten::op{number % 3}",
                holds=tuple(Hold(c, r, b.handed.get(c, r)) for c, r in sorted(b.holds.items())),
            )
            for number, b in enumerate(self.blocks)
        )
        static = {"parameters": 3 * self.scale, "optimizer_state": 2 * self.scale, "batch": 1}
        calls = tuple(Call(**call) for call in self.calls)
        return StepGraph(
            length=end + 1,
            model_end=forward_end - 1,
            forward_end=forward_end,
            backward_end=backward_end,
            static=static,
            calls=calls,
            blocks=blocks,
        )


def profile_of(graph: StepGraph, seconds: Sequence[float], **changes: Any) -> Profile:
    """A profile of the graph in which call i takes `seconds[i]` to recompute."""
    profile = Profile(
        fingerprint="random",
        workload={"name": "random", "model": "a random step"},
        device=DeviceFacts("cpu", "test", 10**12, 10**12, "2.13.0"),
        graph=graph,
        call_times=tuple(CallTime(s, 2 * s, s, 0.0) for s in seconds),
        step_s=4 * sum(seconds),
    )
    return replace(profile, **changes)


@st.composite
def _profiles(draw: Draw, most_calls: int, accumulate: int) -> Profile:
    count = draw(st.integers(1, most_calls))
    graph = _Writer(draw, count, draw(st.sampled_from([1, 1000, 10**7]))).graph()
    seconds = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    host = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
    profile = profile_of(graph, [s / 100 for s in seconds])
    return replace(
        profile,
        call_times=tuple(
            replace(t, recompute_host_s=h / 100)
            for t, h in zip(profile.call_times, host, strict=True)
        ),
        host_slack_s=draw(st.integers(0, 40)) / 100,
        accumulate=draw(st.integers(1, accumulate)),
    )


@pytest.fixture(scope="session")
def random_profiles() -> Callable[..., st.SearchStrategy[Profile]]:
    """`random_profiles(most_calls, accumulate=n)`: a strategy of random profiled steps."""

    def strategy(most_calls: int = 6, accumulate: int = 1) -> st.SearchStrategy[Profile]:
        return _profiles(most_calls, accumulate)

    return strategy


@pytest.fixture(scope="session")
def chain() -> Callable[..., Profile]:
    """`chain(n)`: n equal layers, each saving `inner` bytes of its own beside its input."""

    def build(
        layers: int, *, inner: int = 1000, output: int = 100, static: int = 5000, **changes: Any
    ) -> Profile:
        blocks: list[Block] = []
        calls: list[dict[str, Any]] = []
        position = 1
        before: int | None = None
        for index in range(layers):
            enter = position
            args = () if before is None else (before,)
            calls.append({"index": index, "enter": enter, "args": args})
            blocks.append(Block(len(blocks), inner, enter + 1, enter + 4, "activations", index))
            blocks.append(Block(len(blocks), output, enter + 3, enter + 7, "activations", index))
            before = len(blocks) - 1
            position += 5
        forward_end = position
        position += 3
        for index in reversed(range(layers)):
            saved = [2 * index, *calls[index]["args"]]
            for number in saved:
                hold = Hold(index, position + 2, position + 2)
                blocks[number] = replace(blocks[number], holds=(*blocks[number].holds, hold))
            calls[index] |= {"need": position, "done": position + 2}
            position += 3
        built = tuple(
            Call(
                index=c["index"],
                module=f"layers.{c['index']}",
                number=0,
                visits=1,
                kind="Block",
                leaf=False,
                enter=c["enter"],
                stop=c["enter"] + 2,
                exit=c["enter"] + 4,
                need=c["need"],
                done=c["done"],
                args=c["args"],
                linked=c["args"],
                chained=bool(c["args"]),
            )
            for c in calls
        )
        graph = StepGraph(
            length=position + 1,
            model_end=forward_end - 1,
            forward_end=forward_end,
            backward_end=position,
            static={"parameters": static},
            calls=built,
            blocks=tuple(blocks),
        )
        return profile_of(graph, [0.1] * layers, **changes)

    return build


# -- the plain interpreter ------------------------------------------------------------------------


@dataclass
class Reference:
    """What the interpreter saw: bytes by category at each position, and inside each replay."""

    curve: list[dict[str, int]]
    inside: dict[int, int]  # position -> the most bytes during the replay there

    @property
    def totals(self) -> list[int]:
        return [sum(sizes.values()) for sizes in self.curve]

    @property
    def peak_bytes(self) -> int:
        return max([*self.totals, *self.inside.values()])


class _Interpreter:
    """Walks a step position by position; every block has the set of those who hold it.

    Holders of an original block: "code" (the running code), ("call", c) for a kept call that
    saved it, ("run", first) for a run that has it as an argument. A replay really repeats the
    forward of its calls: it makes copies, and copies that the run saved stay until let go.
    """

    def __init__(self, profile: Profile, runs: Sequence[Run]) -> None:
        self.graph = profile.graph
        self.runs = [run for run in runs if self.needs(run)]
        self.recomputed = {c for first, last in runs for c in range(first, last + 1)}
        self.static = dict(self.graph.static)
        self.adding = profile.accumulate > 1
        if self.adding:
            gradients = sum(b.bytes for b in self.graph.blocks if b.category == "gradients")
            self.static["gradients"] = gradients
        self.holders: dict[int, set[Any]] = {}
        self.copies: dict[tuple[Run, int], int] = {}  # (run, block) -> when it is let go
        self.states: dict[Run, int] = {}

    def needs(self, run: Run) -> list[int]:
        return [c.need for c in self.graph.calls[run[0] : run[1] + 1] if c.need >= 0]

    def done(self, run: Run) -> int:
        return max(c.done for c in self.graph.calls[run[0] : run[1] + 1])

    def arguments(self, run: Run) -> set[int]:
        first, *rest = self.graph.calls[run[0] : run[1] + 1]
        held = set(first.args)
        for call in rest:
            held |= {a for a in call.args if a not in call.linked}
        return held

    def run(self) -> Reference:
        reference = Reference([], {})
        for position in range(self.graph.length):
            self.births(position)
            self.releases(position)
            sizes = self.sizes()
            for run in self.runs:
                if min(self.needs(run)) == position:
                    before = sum(sizes.values())
                    reference.inside[position] = before + self.replay(run)
                    sizes = self.sizes()
            reference.curve.append(sizes)
        return reference

    def births(self, position: int) -> None:
        for block in self.graph.blocks:
            if block.birth != position:
                continue
            holders: set[Any] = {"code"}
            holders |= {("call", h.call) for h in block.holds if h.call not in self.recomputed}
            holders |= {("run", run) for run in self.runs if block.id in self.arguments(run)}
            self.holders[block.id] = holders
        for run in self.runs:
            if self.graph.calls[run[0]].enter == position:
                calls = self.graph.calls[run[0] : run[1] + 1]
                self.states[run] = sum(c.state_bytes for c in calls)

    def releases(self, position: int) -> None:
        for block in self.graph.blocks:
            holders = self.holders.get(block.id)
            if holders is None:
                continue
            if position >= self.drop(block):
                holders.discard("code")
            for hold in block.holds:
                if position >= hold.release:
                    holders.discard(("call", hold.call))
            for run in self.runs:
                if position >= self.done(run):
                    holders.discard(("run", run))
            if not holders:
                del self.holders[block.id]
        for run in self.runs:
            if position == self.done(run):
                self.states.pop(run)
        for key, release in list(self.copies.items()):
            if position >= release:
                del self.copies[key]

    def drop(self, block: Block) -> int:
        if self.adding and block.category == "gradients":
            return min(block.death, block.birth + 1)
        return block.death

    def replay(self, run: Run) -> int:
        """Repeat the run's forward; return the most bytes it had, keep copies of what it saved."""
        need, calls = min(self.needs(run)), range(run[0], run[1] + 1)
        saved: dict[int, int] = {}
        for block in self.graph.blocks:
            releases = [h.replay_release for h in block.holds if h.call in calls]
            given = block.id in self.arguments(run) or block.death > need
            if releases and (block.call in calls or not given):
                saved[block.id] = max(releases)
        stop = max(self.graph.calls[c].stop for c in calls)
        live: set[int] = set()
        # Saved, but made before the run and gone since: made again at the start.
        live |= {n for n, r in saved.items() if self.graph.blocks[n].call not in calls and r > need}
        most = 0
        for position in range(self.graph.calls[run[0]].enter, stop + 1):
            for block in self.graph.blocks:
                if block.call in calls and block.birth == position:
                    live.add(block.id)
                if block.death == position and block.call in calls and block.id not in saved:
                    live.discard(block.id)
            most = max(most, sum(self.graph.blocks[n].bytes for n in live))
        self.copies |= {(run, n): r for n, r in saved.items() if n in live and r > need}
        return most

    def sizes(self) -> dict[str, int]:
        sizes = dict(self.static)
        for name in ("gradients", "activations", "temporaries"):
            sizes.setdefault(name, 0)
        for number in self.holders:
            block = self.graph.blocks[number]
            adding = self.adding and block.category == "gradients"
            sizes["temporaries" if adding else block.category] += block.bytes
        copied = sum(self.graph.blocks[number].bytes for _, number in self.copies)
        sizes["activations"] += copied + sum(self.states.values())
        return sizes


@pytest.fixture(scope="session")
def interpret() -> Callable[[Profile, Sequence[Run]], Reference]:
    """The plain interpreter: profile and runs in, bytes at every position out."""

    def run(profile: Profile, runs: Sequence[Run]) -> Reference:
        return _Interpreter(profile, runs).run()

    return run


@pytest.fixture(scope="session")
def disjoint_runs() -> Callable[[StepGraph, int], Iterator[tuple[Run, ...]]]:
    """Every set of runs that do not overlap, the empty one included."""

    def every(graph: StepGraph, longest: int) -> Iterator[tuple[Run, ...]]:
        candidates = graph.runs(longest)

        def extend(chosen: tuple[Run, ...], start: int) -> Iterator[tuple[Run, ...]]:
            yield chosen
            for run in candidates:
                if run[0] >= start:
                    yield from extend((*chosen, run), run[1] + 1)

        yield from extend((), 0)

    return every
