"""Build the StepGraph from the two recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memfit.capture.captured import Captured
from memfit.capture.last_pass import last_pass
from memfit.capture.segments import Segment
from memfit.errors import ModelError
from memfit.ir.step_graph import Block, Call, Hold, StepGraph
from memfit.measure.allocations import Event

# Counters and scalars: a replay leaves some out (batch-norm's count), and they weigh nothing.
_CRUMB = 1024


@dataclass
class _Draft:
    """A block while the runs are read. `death` is None as long as nobody freed it.

    One that stands before the step begins has its `category`.
    """

    bytes: int
    birth: int
    call: int
    origin: str
    death: int | None = None
    holds: dict[int, Hold] = field(default_factory=dict)
    forward: bool = True
    category: str | None = None


@dataclass
class _ForwardRun:
    """What the run that keeps nothing shows."""

    drafts: list[_Draft] = field(default_factory=list)
    regions: dict[int, list[int]] = field(default_factory=dict)  # region -> blocks made there
    packs: dict[tuple[int, int], int] = field(default_factory=dict)  # (call, block) -> last pack
    last_pack: dict[int, int] = field(default_factory=dict)  # of anything, the batch included
    pack_order: dict[int, list[int]] = field(default_factory=dict)  # call -> blocks, -1: static
    args: dict[int, list[int | None]] = field(default_factory=dict)  # None: not of this step
    enter: dict[int, int] = field(default_factory=dict)
    exit: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, dict[str, int]] = field(default_factory=dict)  # call -> graph node -> block
    model_end: int = 0
    end: int = 0


@dataclass
class _StepRun:
    """What the recomputed step shows, in positions that continue the forward's."""

    original_free: dict[int, int] = field(default_factory=dict)
    replayed_free: dict[int, int] = field(default_factory=dict)
    release: dict[tuple[int, int], int] = field(default_factory=dict)
    need: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)  # captured call -> its backward returned
    state_bytes: dict[int, int] = field(default_factory=dict)
    born: list[_Draft] = field(default_factory=list)
    backward_end: int = 0
    end: int = 0


def build_step_graph(
    forward_events: Sequence[Event],
    step_events: Sequence[Event],
    captured: Captured,
    static: dict[str, int],
) -> StepGraph:
    """Put the two runs together; of a step that has several passes the last one."""
    segments = captured.segments
    forward = _read_forward(forward_events)
    step = _read_step(step_events, forward, segments)
    for call in captured.keys:
        # Compiled code takes its saved tensors over when it starts and frees them as it goes.
        step.finish.setdefault(call, step.backward_end)
        step.done[call] = max(step.done.get(call, 0), step.finish[call])
    blocks = _blocks(forward, step, set(captured.recomputed_alone()))
    calls = _calls(forward, step, captured, blocks)
    return StepGraph(
        length=step.end + 1,
        model_end=forward.model_end,
        forward_end=forward.end,
        backward_end=step.backward_end,
        static=static,
        calls=calls,
        blocks=blocks,
        model_calls=segments[0].model_calls,
    )


def _read_forward(events: Sequence[Event]) -> _ForwardRun:
    run = _ForwardRun()
    live: dict[int, int] = {}
    region, position = _gap(0), 0
    for event in events:
        position += 1
        if event.kind == "alloc":
            live[event.address] = len(run.drafts)
            run.regions.setdefault(region, []).append(len(run.drafts))
            run.drafts.append(_Draft(event.bytes, position, max(region, -1), event.label))
        elif event.kind == "free":
            if event.address in live:
                run.drafts[live.pop(event.address)].death = position
        else:
            word, *rest = event.label.split()
            if word == "node":
                nodes = run.nodes.setdefault(int(rest[0]), {})
                nodes[rest[2]] = live.get(int(rest[1]), -1)
                continue
            numbers = [int(n) for n in rest]
            if word == "enter":
                region = numbers[0]
                run.enter[region] = position
            elif word == "exit":
                region = _gap(len(run.enter))
                run.exit[numbers[0]] = position
            elif word == "pack":
                block = live.get(numbers[1], -1)
                run.last_pack[numbers[0]] = position
                run.pack_order.setdefault(numbers[0], []).append(block)
                if block >= 0:
                    run.packs[numbers[0], block] = position
            elif word == "arg":
                run.args.setdefault(numbers[0], []).append(live.get(numbers[1]))
            elif word == "model_end":
                run.model_end = position
            elif word == "forward_end":
                run.end = position
                break
    run.model_end = run.model_end or run.end
    return run


class _StepReader:
    """Follows the recomputed step, matching its blocks with those of the forward run."""

    def __init__(self, forward: _ForwardRun, segments: Sequence[Segment]) -> None:
        self.forward, self.segments = forward, segments
        self.run = _StepRun()
        self.live: dict[int, tuple[str, int]] = {}  # address -> what kind of block, which
        self.region, self.ordinal = _gap(0), 0
        self.entered = 0
        self.position = 0
        self.in_forward = True
        self.replaying: int | None = None  # the call being replayed, -1 between calls
        self.bookkeeping: int | None = None  # the call whose replay is being prepared
        self.graph_of: int | None = None  # the captured call whose backward runs

    def read(self, event: Event) -> bool:
        """Take in one event; return False when the step is over."""
        if event.kind == "alloc":
            self._alloc(event)
        elif event.kind == "free":
            self._free(event)
        else:
            word, *rest = event.label.split()
            return self._mark(word, [int(n) for n in rest])
        return True

    def _tick(self) -> int:
        if not self.in_forward and self.replaying is None:
            self.position += 1
        return self.position

    def _alloc(self, event: Event) -> None:
        if self.bookkeeping is not None:
            self._keep_state(event, event.bytes)
            return
        if self.replaying == -1:
            return
        if self.replaying is not None or self.in_forward:
            region = self.region if self.replaying is None else self.replaying
            kind = "original" if self.replaying is None else "replayed"
            block = self._match(region, event)
            if block >= 0:
                self.live[event.address] = (kind, block)
        else:
            position = self._tick()
            self.live[event.address] = ("born", len(self.run.born))
            draft = _Draft(event.bytes, position, -1, event.label, forward=False)
            self.run.born.append(draft)

    def _keep_state(self, event: Event, size: int) -> None:
        assert self.bookkeeping is not None
        kept = self.run.state_bytes
        kept[self.bookkeeping] = kept.get(self.bookkeeping, 0) + size
        self.live[event.address] = ("state", self.bookkeeping)

    def _match(self, region: int, event: Event) -> int:
        known = self.forward.regions.get(region, [])
        at = self.ordinal
        while at < len(known):
            block = known[at]
            size = self.forward.drafts[block].bytes
            at += 1
            if size == event.bytes:
                self.ordinal = at
                return block
            if size > _CRUMB:
                break
        if event.bytes <= _CRUMB:
            return -1
        where = self.segments[region].visit.module if region >= 0 else "code between segments"
        raise ModelError(
            f"the step does not repeat itself: {where} asked for {event.bytes} bytes "
            f"({event.label}) where its first run asked for something else",
            hint="make the step deterministic for one batch (no caches that grow, no "
            "data-dependent shapes that change between runs)",
        )

    def _free(self, event: Event) -> None:
        if event.address not in self.live:
            return
        kind, number = self.live.pop(event.address)
        if kind == "state" and self.bookkeeping == number:
            self.run.state_bytes[number] -= event.bytes
        if self.in_forward or kind == "state":
            return
        inside = self.replaying is not None
        position = self._tick()
        if kind == "born":
            self.run.born[number].death = position
        elif kind == "original":
            self.run.original_free[number] = position
        elif not inside:
            self.run.replayed_free[number] = position

    def _mark(self, word: str, numbers: list[int]) -> bool:
        run = self.run
        if word == "enter":
            self.region, self.ordinal = numbers[0], 0
            self.entered += 1
        elif word == "exit" and self.in_forward:
            self.region, self.ordinal = _gap(self.entered), 0
        elif word.startswith("bookkeeping"):
            self.bookkeeping = numbers[0] if word.endswith("begin") else None
        elif word == "forward_end":
            self.in_forward = False
            self.position = self.forward.end
        elif word == "replay_begin":
            for call in range(numbers[0], numbers[1] + 1):
                run.need.setdefault(call, self._tick())
            self.replaying = -1
        elif word == "backward_begin":
            self.graph_of = numbers[0]
            run.need.setdefault(numbers[0], self._tick())
        elif word == "backward_end" and self.graph_of is not None:
            run.finish[self.graph_of] = self._tick()
            self.graph_of = None
        elif word == "replay_enter":
            self.replaying, self.ordinal = numbers[0], 0
        elif word == "replay_exit":
            self.replaying = -1
        elif word == "replay_end":
            self.replaying = None
        elif word == "done" and not self.in_forward:
            for call in range(numbers[0], numbers[1] + 1):
                run.done[call] = self._tick()
        elif word == "let_go" and not self.in_forward:
            block = self.forward.pack_order[numbers[0]][numbers[1]]
            run.release[numbers[0], block] = self._tick()
        elif word == "unpack" and numbers[0] >= 0:
            run.need.setdefault(numbers[0], self._tick())
        elif word == "release" and not self.in_forward:
            kind, block = self.live.get(numbers[1], ("", -1))
            if kind == "original":
                run.release[numbers[0], block] = self._tick()
            if numbers[0] >= 0:
                run.done[numbers[0]] = self._tick()
        elif word == "backward_end":
            run.backward_end = self._tick()
        elif word == "end":
            run.end = self._tick()
            return False
        return True


def _read_step(
    events: Sequence[Event], forward: _ForwardRun, segments: Sequence[Segment]
) -> _StepRun:
    reader = _StepReader(forward, segments)
    events, standing = last_pass(events)
    reader.run.born = [_Draft(s.bytes, 0, -1, "", None, {}, False, s.category) for s in standing]
    for event in events:
        if not reader.read(event):
            break
    return reader.run


def _blocks(forward: _ForwardRun, step: _StepRun, recomputed: set[int]) -> tuple[Block, ...]:
    for (call, number), packed in forward.packs.items():
        draft = forward.drafts[number]
        release = step.release.get((call, number))
        if release is None:
            continue  # nothing in backward ever asks for it
        if call < 0:  # saved by code between segments: nothing can be done about it
            # It may outlive the backward that asks for it: a gradient that was made in forward.
            draft.death = max(draft.death or 0, step.original_free.get(number, step.end))
            continue
        replayed = call in recomputed and draft.call == call
        dropped = step.replayed_free.get(number, release) if replayed else release
        if call in step.finish:
            release = dropped = dropped if replayed else step.finish[call]
        draft.holds[call] = Hold(call, max(release, packed), max(dropped, packed))
    for number, draft in enumerate(forward.drafts):
        if draft.death is None:  # outlived the forward: held by something that is no saved tensor
            draft.death = step.original_free.get(number, step.end)
    end = step.end
    drafts = [*forward.drafts, *step.born]
    return tuple(
        Block(
            id=number,
            bytes=draft.bytes,
            birth=draft.birth,
            death=end if draft.death is None else draft.death,
            category=_category(draft, forward.end, step.backward_end),
            call=draft.call,
            origin=draft.origin,
            holds=tuple(hold for _, hold in sorted(draft.holds.items())),
        )
        for number, draft in enumerate(drafts)
    )


def _category(draft: _Draft, forward_end: int, backward_end: int) -> str:
    if draft.category is not None:
        return draft.category
    if draft.forward:
        saved = draft.holds or (draft.death or 0) > forward_end
        return "activations" if saved else "temporaries"
    lasts = draft.death is None or draft.death > backward_end
    return "gradients" if lasts and draft.birth <= backward_end else "temporaries"


def _calls(
    forward: _ForwardRun,
    step: _StepRun,
    captured: Captured,
    blocks: tuple[Block, ...],
) -> tuple[Call, ...]:
    graphs = {key: number for number, key in enumerate(dict.fromkeys(captured.keys.values()))}
    usual_state = max(step.state_bytes.values(), default=0)
    calls: list[Call] = []
    first_alike: dict[tuple[object, ...], int] = {}
    for index, segment in enumerate(captured.segments):
        visit = segment.visit
        made = [blocks[b] for b in forward.regions.get(index, [])]
        # Alike: the same class asks for the same memory with the same operators.
        look = (visit.kind, *((b.bytes, b.origin) for b in made))
        passed = list(zip(visit.inputs, forward.args.get(index, ()), strict=True))
        args = tuple(dict.fromkeys(block for _, block in passed if block is not None))
        # A tensor from further back, or a view, is kept for the replay and not made by it.
        kept = {block for serial, block in passed if serial not in segment.linked}
        calls.append(
            Call(
                index=index,
                module=visit.module,
                number=visit.number,
                visits=segment.visits,
                kind=visit.kind,
                leaf=visit.leaf,
                enter=forward.enter[index],
                stop=forward.last_pack.get(index, -1),
                exit=forward.exit[index],
                need=step.need.get(index, -1),
                done=step.done.get(index, -1),
                args=args,
                linked=tuple(sorted(set(args) - kept)),
                chained=bool(segment.linked),
                alike=first_alike.setdefault(look, index),
                pinned=segment.pinned,
                state_bytes=step.state_bytes.get(index, usual_state),
                mutated_buffers=visit.mutated_buffers,
                graph=graphs[captured.keys[index]] if index in captured.keys else -1,
                finish=step.finish.get(index, -1),
                held=forward.nodes.get(index, {}),
            )
        )
    return tuple(calls)


def _gap(entered: int) -> int:
    """The region number of the code after `entered` segment calls began."""
    return -1 - entered
