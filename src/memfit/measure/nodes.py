"""What each operator of a forward and backward graph costs: seconds and workspace.

The two graphs are run operator by operator on real inputs: once to see the allocations, then each
operator a few times in a row to time it. Nothing that is passed in is changed.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from memfit.measure.allocations import Event, mark, record
from memfit.measure.bandwidth import host_copy_bandwidth
from memfit.measure.fused import bytes_fused, bytes_read_more
from memfit.measure.timing import Clock
from memfit.measure.turns import alone

REPEATS = 5
LONG_S = 0.05  # past this many seconds an operator on the CPU is not repeated again
_COPY_BYTES = 256 * 2**20  # well past any cache

Step = Callable[[str, Callable[[], Any]], Any]  # runs an operator, given its name


@dataclass(frozen=True)
class NodeCost:
    """Seconds of one operator; bytes live inside it beside its inputs and results.

    `read_s` is what fused code of the backward reads more, in seconds, when the result is made
    again and not kept.
    """

    seconds: float
    workspace_bytes: int
    read_s: float = 0.0


@alone()
def measure_nodes(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    args: Sequence[Any],
    *,
    num_outputs: int,
    fused: bool,
) -> dict[str, NodeCost]:
    """Cost of each operator by name; `fused`: elementwise ones as if inductor fused them."""
    device = _device(args)
    seconds: dict[str, float] = {}
    read_s: dict[str, float] = {}
    if fused:
        rate = _bytes_per_second(device)
        seconds = {name: size / rate for name, size in bytes_fused(forward, backward).items()}
        read_s = {name: size / rate for name, size in bytes_read_more(forward, backward).items()}
    timer = _Timer(Clock(device), seconds)
    _run_both(forward, backward, args, num_outputs, timer.step)
    events = record(lambda: _run_both(forward, backward, args, num_outputs, _marked), device)
    workspace = _workspace(events)
    return {
        name: NodeCost(taken_s, workspace.get(name, 0), read_s.get(name, 0.0))
        for name, taken_s in seconds.items()
    }


def _run_both(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    args: Sequence[Any],
    num_outputs: int,
    step: Step,
) -> None:
    """Run the forward, then the backward on made-up gradients, handing each operator to `step`."""
    saved = list(_Steps(forward, step).run(*args))[num_outputs:]
    _Steps(backward, step).run(*_backward_inputs(backward, saved))


class _Steps(fx.Interpreter):
    """Hands operators to `step` one by one; those that write get copies of their arguments."""

    def __init__(self, half: fx.GraphModule, step: Step) -> None:
        super().__init__(half)
        self._step = step

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        target: Any = n.target
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if getattr(getattr(target, "_schema", None), "is_mutable", False):
            args = tree_map(_copied, args)
        return self._step(n.name, lambda: target(*args, **kwargs))


class _Timer:
    """Times each operator whose seconds are not known over several runs of it."""

    def __init__(self, clock: Clock, seconds: dict[str, float]) -> None:
        self._clock, self._seconds = clock, seconds

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Run an operator, note its seconds and return its result."""
        result = work()
        if name in self._seconds:
            return result
        self._clock.settle()
        on_host = self._clock.device.type == "cpu"
        self._seconds[name] = self._median(work) if on_host else self._mean(work)
        return result

    def _median(self, work: Callable[[], Any]) -> float:
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < LONG_S:
            start = self._clock.now()
            work()
            times.append(self._clock.seconds(start, self._clock.now()))
        return statistics.median(times)

    def _mean(self, work: Callable[[], Any]) -> float:
        def repeated() -> None:
            for _ in range(REPEATS):
                work()

        return self._clock.seconds_behind(repeated) / REPEATS


def _marked(name: str, work: Callable[[], Any]) -> Any:
    """Run an operator between two marks."""
    mark(f"begin {name}")
    result = work()
    mark("end")
    return result


def _workspace(events: Sequence[Event]) -> dict[str, int]:
    """For each operator, the most bytes it held beyond what it left behind."""
    found: dict[str, int] = {}
    name: str | None = None
    inside: dict[int, int] = {}
    live = peak = 0
    for event in events:
        if event.kind == "mark":
            word, _, rest = event.label.partition(" ")
            if word == "begin":
                name, inside, live, peak = rest, {}, 0, 0
            elif name is not None:
                found[name] = max(found.get(name, 0), peak - live)
                name = None
        elif event.kind == "alloc":
            inside[event.address] = event.bytes
            live += event.bytes
            peak = max(peak, live)
        elif event.address in inside:
            live -= inside.pop(event.address)
    return found


def _backward_inputs(backward: fx.GraphModule, saved: list[Any]) -> list[Any]:
    """Saved tensors as they are, gradients of the outputs made up; `saved` is emptied."""
    inputs = []
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        made_up = "tangents" in str(node.target) and isinstance(value, torch.Tensor)
        inputs.append(_like(value) if made_up else saved.pop(0))
    return inputs


def _like(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return made.normal_() if made.is_floating_point() else made.zero_()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _device(args: Sequence[Any]) -> torch.device:
    """The device of the graph: CUDA when any input is there."""
    devices = [a.device for a in args if isinstance(a, torch.Tensor)]
    return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


@cache
def _bytes_per_second(device: torch.device) -> float:
    """Bytes read or written a second by a large copy."""
    if device.type == "cpu":
        return 2 * host_copy_bandwidth()
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds: dict[str, float] = {}
    _Timer(Clock(device), seconds).step("copy", lambda: target.copy_(source))
    return 2 * _COPY_BYTES / seconds["copy"]
