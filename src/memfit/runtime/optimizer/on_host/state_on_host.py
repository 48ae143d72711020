"""Optimizer state lives in host memory and visits the device, group by group, to be stepped."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memfit.errors import UsageError
from memfit.runtime.optimizer.accepted import (
    Parameters,
    check_separable,
    checked_groups,
    optimized,
    refuse_sparse,
)
from memfit.runtime.optimizer.footprint import Footprint, StateSizes, tensor_bytes
from memfit.runtime.optimizer.on_host.host_block import HostBlock
from memfit.runtime.optimizer.parts import Parts
from memfit.runtime.optimizer.take_over import TakeOver
from memfit.runtime.reversible import Reversible
from memfit.runtime.swap.arena import Arena
from memfit.runtime.swap.lanes import lanes_for

CHUNK_BYTES = 64 * 2**20  # of parameters in a group, where none are given


class StateOnHost(Reversible):
    """Keeps an optimizer's state in pinned host memory; the device steps it by its own kernels.

    optimizer.step() works through the groups: while one steps, the state of the one before leaves
    and that of the one after comes, so that two groups' state is on the device at a time. The
    numbers are the plain optimizer's, bit for bit. state_dict() gives tensors in host memory.
    Single numbers, such as step counts, stay where they are. So do groups of `kept_bytes` at most:
    the first ones, which in backward step last, when there is nothing left to copy behind.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[Parameters] | None = None,
        *,
        kept_bytes: int = 0,
    ) -> None:
        check_separable(optimizer)
        self.optimizer = optimizer
        self._kept_bytes = kept_bytes
        self.groups = with_the_rest(optimizer, chunks(optimizer) if groups is None else groups)
        self._lanes = lanes_for(one_device(optimizer))
        self._parts = Parts(optimizer)
        self._sizes = StateSizes(self._parts)
        self._take_over = TakeOver(optimizer, self._step, self._lanes.synchronize, self._adopt)
        self._arena: Arena | None = None
        self._blocks: dict[int, HostBlock] = {}  # by the ids of their parameters
        self._order: list[HostBlock] = []  # as the blocks stepped last time, or may step first
        self._stepped: list[HostBlock] = []
        self._leaving: HostBlock | None = None

    @property
    def at_work(self) -> bool:
        """Whether it is at work now."""
        return self._take_over.at_work

    def install(self) -> StateOnHost:
        """Move the state to the host."""
        assert not self._take_over.at_work, "the state is on the host already"
        self._arena = Arena(self._expected_bytes(), self._lanes.pinned)
        for group in self._moved():
            block = HostBlock(group, self._arena, self._lanes)
            self._blocks.update((id(p), block) for p in group)
        try:
            self._adopt()
        except BaseException:
            self._put_back()
            raise
        self._order = self._all()[::-1]  # in backward; optimizer.step() goes the other way
        self._take_over.install()
        return self

    def undo(self) -> None:
        """Move the state back to the device; harmless when done twice."""
        if self._take_over.at_work:
            self._take_over.remove()
            self._put_back()

    def _put_back(self) -> None:
        self.settle()
        for block in self._all():
            block.give_back(self.optimizer.state)
        self._blocks, self._order = {}, []
        assert self._arena is not None
        self._arena.close()

    def footprint(self) -> Footprint:
        """Bytes of state that leave the device, and of the two largest groups'."""
        sizes = sorted(self._sizes.of(group) for group in self._moved())
        return Footprint(sum(sizes), sum(sizes[-2:]), sum(sizes))

    def step_group(self, parameters: Parameters) -> None:
        """Step parameters, best those of one of the groups."""
        assert self._take_over.at_work, "the state is not on the host"
        found: dict[HostBlock | None, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(self._blocks.get(id(parameter)), []).append(parameter)
        for block, members in found.items():
            if block is None:
                self._parts.step(members)
            else:
                self._step_block(block, members)

    def _step_block(self, block: HostBlock, parameters: Parameters) -> None:
        if self._leaving is not None:
            self._leaving.release()
        block.fetch()
        following = self._following(block)
        if following is not None:
            following.fetch()
        block.enter(self.optimizer.state)
        try:
            self._parts.step(parameters)
        finally:
            block.leave(self.optimizer.state)
            self._leaving = block
        self._stepped.append(block)

    def _step(self) -> None:
        ready = ready_groups(self.optimizer, self.groups)
        if not self._stepped:  # not in backward, whose order is the last one's
            firsts = (self._blocks.get(id(group[0])) for group in ready)
            self._order = [block for block in firsts if block is not None]
        for group in ready:
            self.step_group(group)
        self.settle()

    def settle(self) -> None:
        """End a step: let the device's memory go, after the copies that use it."""
        for block in self._all():
            block.release()
        self._leaving = None
        if self._stepped:
            self._order, self._stepped = self._stepped, []

    def _following(self, block: HostBlock) -> HostBlock | None:
        """What steps after a block, by the order that is expected."""
        if block not in self._order:
            return None
        later = self._order[self._order.index(block) + 1 :]
        return next((other for other in later if other not in self._stepped), None)

    def _moved(self) -> list[list[torch.nn.Parameter]]:
        """The groups whose state goes to the host."""
        if not self._kept_bytes:
            return self.groups
        room, moved = self._kept_bytes, []
        for group in self.groups:
            size = self._sizes.of(group)
            if size <= room:
                room -= size
            else:
                moved.append(group)
        return moved

    def _expected_bytes(self) -> int:
        try:
            return sum(self._sizes.of(group) for group in self._moved())
        except UsageError:  # not known before the first step: the arena grows with the state
            return 0

    def _adopt(self) -> None:
        for block in self._all():
            block.adopt(self.optimizer.state)

    def _all(self) -> list[HostBlock]:
        return list(dict.fromkeys(self._blocks.values()))


def chunks(optimizer: torch.optim.Optimizer, size_bytes: int = CHUNK_BYTES) -> list[Parameters]:
    """The optimizer's parameters, in its order, in groups of about a size."""
    groups: list[list[torch.nn.Parameter]] = []
    room = 0
    for parameter in optimized(optimizer):
        room -= tensor_bytes(parameter)
        if room < 0 or not groups:
            groups.append([])
            room = size_bytes - tensor_bytes(parameter)
        groups[-1].append(parameter)
    return list(groups)


def with_the_rest(
    optimizer: torch.optim.Optimizer, groups: Iterable[Parameters]
) -> list[list[torch.nn.Parameter]]:
    """The groups, and one more of the parameters that they leave out."""
    checked = checked_groups(optimizer, groups)
    grouped = {id(p) for group in checked for p in group}
    rest = [p for p in optimized(optimizer) if id(p) not in grouped]
    return [*checked, rest] if rest else checked


def ready_groups(
    optimizer: torch.optim.Optimizer, groups: list[list[torch.nn.Parameter]]
) -> list[list[torch.nn.Parameter]]:
    """The groups that have a gradient; UsageError for one that cannot be used."""
    known = {id(p) for group in groups for p in group}
    for parameter in optimized(optimizer):
        refuse_sparse(parameter)
        if id(parameter) not in known:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} was given to the optimizer after "
                "its state had been moved to the host",
                hint="undo() before add_param_group, and begin anew afterwards",
            )
    return [group for group in groups if any(p.grad is not None for p in group)]


def one_device(optimizer: torch.optim.Optimizer) -> torch.device:
    """The device of all the optimizer's parameters."""
    devices = {p.device for p in optimized(optimizer)}
    if len(devices) != 1:
        raise UsageError(
            f"the optimizer's parameters lie on several devices: {sorted(map(str, devices))}",
            hint="memfit keeps the state of one device's parameters on the host",
        )
    return devices.pop()
