"""The optimizer steps on the CPU: its state never comes to the device."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.runtime.optimizer.accepted import Parameters, check_separable, optimized
from memfit.runtime.optimizer.footprint import Footprint, StateSizes, rounded, tensor_bytes
from memfit.runtime.optimizer.on_host.host_twin import HostTwin
from memfit.runtime.optimizer.on_host.memory import dense_strides
from memfit.runtime.optimizer.on_host.state_on_host import (
    chunks,
    one_device,
    ready_groups,
    with_the_rest,
)
from memfit.runtime.optimizer.parts import Parts
from memfit.runtime.optimizer.take_over import TakeOver
from memfit.runtime.reversible import Reversible
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.lanes import Copy, lanes_for

_Job = tuple[list[HostTwin], Future[None]]


class StepOnHost(Reversible):
    """Keeps an optimizer's state and a master copy of its parameters in host memory.

    A group's gradients are copied to the host, the CPU steps the master copy in a thread of its
    own, with torch's fused kernels where the optimizer has them, and the new values are copied
    back. optimizer.step() returns when all is done. The numbers are the plain optimizer's within
    float rounding: CPU kernels round otherwise than the device's (bitwise where the plain step
    runs the same fused kernels on the CPU).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[Parameters] | None = None,
    ) -> None:
        check_separable(optimizer)
        self.optimizer = optimizer
        self.groups = with_the_rest(optimizer, chunks(optimizer) if groups is None else groups)
        for parameter in optimized(optimizer):
            if dense_strides(parameter) != parameter.stride():
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} has gaps in its memory",
                    hint="make it contiguous before giving it to the optimizer",
                )
        self._lanes = lanes_for(one_device(optimizer))
        self._parts = Parts(optimizer)
        self._sizes = StateSizes(self._parts)
        self._take_over = TakeOver(optimizer, self._step, self.settle, self._adopt)
        self._arena: Arena | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._twins: dict[int, HostTwin] = {}
        self._jobs: deque[_Job] = deque()
        self._leaving: list[tuple[torch.Tensor, Copy]] = []
        self._last_back: Copy | None = None

    @property
    def at_work(self) -> bool:
        """Whether it is at work now."""
        return self._take_over.at_work

    def install(self) -> StepOnHost:
        """Move the state to the host, and make room for gradients and new values."""
        assert not self._take_over.at_work, "the optimizer steps on the host already"
        self._arena = Arena(self._staging_bytes(), self._lanes.pinned)
        self._twins = {
            id(p): HostTwin(p, self._arena, self._lanes) for p in optimized(self.optimizer)
        }
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="memfit-optimizer")
        self._adopt()
        self._take_over.install()
        return self

    def undo(self) -> None:
        """Move the state back to the device; harmless when done twice."""
        if not self._take_over.at_work:
            return
        self.settle()
        self._take_over.remove()
        self._move_state(on_host=False)
        assert self._worker is not None and self._arena is not None
        self._worker.shutdown()
        self._lanes.synchronize()
        self._twins = {}
        self._arena.close()

    def footprint(self) -> Footprint:
        """Bytes of state that leave the device, and of all that is held on the host."""
        state = self._sizes.of(optimized(self.optimizer))
        return Footprint(state, 0, state + self._staging_bytes())

    def step_group(self, parameters: Parameters) -> None:
        """Send a group's gradients to the host, to be used there."""
        assert self._take_over.at_work, "the optimizer does not step on the host"
        self._release()
        self._collect(wait=False)
        ready = [p for p in parameters if p.grad is not None]
        twins = [self._twins[id(p)] for p in ready]
        self._leaving = [twin.gather() for twin in twins]
        copies = [copy for _, copy in self._leaving]
        part = self._host_part(ready)
        assert self._worker is not None
        self._jobs.append((twins, self._worker.submit(self._run, part, copies)))

    def _step(self) -> None:
        for group in ready_groups(self.optimizer, self.groups):
            self.step_group(group)
        self.settle()

    def _host_part(self, parameters: Parameters) -> torch.optim.Optimizer:
        twins = {id(p): self._twins[id(p)].host for p in parameters}
        fused = all(p.is_floating_point() for p in parameters)
        part: Any = self._parts.part(
            parameters, twins, fused=fused, foreach=False, capturable=False
        )
        part.param_groups = [{k: _on_host(v) for k, v in g.items()} for g in part.param_groups]
        for name in ("grad_scale", "found_inf"):
            if hasattr(part, name):
                setattr(part, name, _on_host(getattr(part, name)))
        part.state = defaultdict(dict)
        for (
            parameter
        ) in parameters:  # the same dictionaries: what is new in them is the optimizer's
            part.state[twins[id(parameter)]] = self.optimizer.state[parameter]
        return part

    def _run(self, part: torch.optim.Optimizer, copies: Sequence[Copy]) -> None:
        """In the worker: step when the gradients are there."""
        for copy in copies:
            end = copy.end
            if end is not None:
                end.synchronize()
        self._parts.run(part)

    def _collect(self, wait: bool) -> None:
        """Send new values back to the device."""
        while self._jobs and (wait or self._jobs[0][1].done()):
            twins, done = self._jobs.popleft()
            done.result()
            for twin in twins:
                self._last_back = twin.scatter() or self._last_back

    def _release(self) -> None:
        """Let gradients go, after the copies that read them."""
        for _, copy in self._leaving[-1:]:  # copies of a direction end in order
            self._lanes.wait(copy)
        self._leaving = []

    def settle(self) -> None:
        """Return when every step is done and the computation will see the new values."""
        self._release()
        self._collect(wait=True)
        if self._last_back is not None:
            self._lanes.wait(self._last_back)
            self._last_back = None

    def _adopt(self) -> None:
        self._move_state(on_host=True)

    def _move_state(self, on_host: bool) -> None:
        for parameter in optimized(self.optimizer):
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    device = torch.device("cpu") if on_host else self._home(parameter, key)
                    state[key] = value.to(device)

    def _home(self, parameter: torch.nn.Parameter, key: str) -> torch.device:
        group = self._parts.group(parameter)
        counts_on_device = group.get("fused") or group.get("capturable")
        stays = key == "step" and not counts_on_device  # torch keeps step counts on the CPU
        return torch.device("cpu") if stays else parameter.device

    def _staging_bytes(self) -> int:
        return sum(2 * rounded(tensor_bytes(p)) for p in optimized(self.optimizer))


def _on_host(value: Any) -> Any:
    return value.cpu() if type(value) is torch.Tensor else value
