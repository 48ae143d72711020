"""Optimizer state is kept in 8 or 16 bits, and in full only while its parameters step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, get_args

import torch

from memfit.errors import UsageError
from memfit.runtime.lowbit.packed import (
    CODEBOOKS,
    MIN_ELEMENTS,
    Bits,
    Packed,
    pack,
    packable,
    packed_bytes,
    unpack,
    working_bytes,
)
from memfit.runtime.lowbit.pieces import pieces
from memfit.runtime.optimizer.accepted import Parameters, optimized, refuse_sparse
from memfit.runtime.optimizer.footprint import Footprint, StateSizes, rounded, tensor_bytes
from memfit.runtime.optimizer.on_host.state_on_host import chunks, with_the_rest
from memfit.runtime.optimizer.parts import Parts
from memfit.runtime.optimizer.take_over import TakeOver
from memfit.runtime.reversible import Reversible

_ACCEPTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class LowBitState(Reversible):
    """Keeps the state of Adam, AdamW or SGD with momentum in few bits.

    optimizer.step() works through the groups: a group's state is unpacked, stepped by the
    optimizer's own kernels and packed again. Approximate: "8bit" keeps a number within 9.1 % of
    itself, "bf16_sr" within 0.8 %, both right on average. Tensors under 4096 elements stay in full.
    state_dict() gives the full state in host memory, as a plain optimizer loads it. Rounding draws
    from a generator of its own. `compiled` makes few kernels of the arithmetic, so that the host
    launches less; None: on a GPU for "bf16_sr", as what it makes of "8bit" has not run there yet.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[Parameters] | None = None,
        *,
        bits: Bits = "8bit",
        seed: int = 0,
        compiled: bool | None = None,
    ) -> None:
        _check(optimizer, bits)
        self.optimizer = optimizer
        self.bits = bits
        self.groups = with_the_rest(optimizer, chunks(optimizer) if groups is None else groups)
        self._parts = Parts(optimizer)
        sizes = StateSizes(self._parts)
        self._full_bytes = {id(p): sizes.of([p]) for p in optimized(optimizer)}
        self._seed = seed
        on_gpu = any(p.is_cuda for p in optimized(optimizer))
        self._compiled = on_gpu and bits == "bf16_sr" if compiled is None else compiled
        self._random: dict[torch.device, torch.Generator] = {}
        # What the state of a group was packed into, while it steps in full.
        self._unpacked: dict[tuple[int, str], Packed] = {}
        self._take_over = TakeOver(optimizer, self._step, self.settle, self._adopt)
        self._on_save: torch.utils.hooks.RemovableHandle | None = None

    @property
    def at_work(self) -> bool:
        """Whether it is at work now."""
        return self._take_over.at_work

    def install(self) -> LowBitState:
        """Pack the state that is there."""
        assert not self._take_over.at_work, "the state is in few bits already"
        self._adopt()
        self._take_over.install()
        self._on_save = self.optimizer.register_state_dict_post_hook(_in_full, prepend=True)
        return self

    def undo(self) -> None:
        """Give the state back in full; harmless when done twice."""
        if self._take_over.at_work:
            self._take_over.remove()
            assert self._on_save is not None
            self._on_save.remove()
            self._unpack(optimized(self.optimizer))
            self._unpacked.clear()

    def footprint(self) -> Footprint:
        """Bytes that packing removes, and of the largest group's state in full while it steps."""
        removed = sum(self._removed_bytes(p) for group in self.groups for p in group)
        stepping = max(sum(self._unpacked_bytes(p) for p in group) for group in self.groups)
        packing = max(
            working_bytes(p, self.bits, compiled=self._compiled) for p in optimized(self.optimizer)
        )
        return Footprint(removed, stepping + packing, 0)

    def step_group(self, parameters: Parameters) -> None:
        """Step those of the parameters that have a gradient."""
        assert self._take_over.at_work, "the state is not in few bits"
        ready = [p for p in parameters if p.grad is not None]
        self._unpack(ready)
        try:
            self._parts.step(ready)
        finally:
            self._pack(ready)

    def settle(self) -> None:
        """Nothing is ever under way."""

    def _step(self) -> None:
        for parameter in optimized(self.optimizer):
            refuse_sparse(parameter)
        for group in with_the_rest(self.optimizer, self.groups):
            self.step_group(group)

    def _adopt(self) -> None:
        self._pack(optimized(self.optimizer))

    def _pack(self, parameters: Parameters) -> None:
        with pieces(self._compiled) as how:
            for parameter in parameters:
                state = self.optimizer.state.get(parameter, {})
                for key in [k for k in state if k in CODEBOOKS]:
                    value = state[key]
                    if type(value) is torch.Tensor:  # just loaded, it may lie anywhere
                        value = state[key] = value.to(parameter.device)
                    if packable(key, value, self.bits):
                        random = self._generator(parameter.device)
                        # In the same memory from step to step, as plain state is.
                        old = self._unpacked.pop((id(parameter), key), None)
                        state[key] = pack(value, key, self.bits, random, how, into=old)

    def _unpack(self, parameters: Parameters) -> None:
        with pieces(self._compiled) as how:
            for parameter in parameters:
                state = self.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Packed):
                        self._unpacked[id(parameter), key] = value
                        state[key] = unpack(value, how)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._random:
            self._random[device] = torch.Generator(device).manual_seed(self._seed)
        return self._random[device]

    def _unpacked_bytes(self, parameter: torch.nn.Parameter) -> int:
        shrinks = packable("exp_avg", parameter.data, self.bits)
        return self._full_bytes[id(parameter)] if shrinks else 0

    def _removed_bytes(self, parameter: torch.nn.Parameter) -> int:
        full = self._unpacked_bytes(parameter)
        tensors = full // rounded(tensor_bytes(parameter))
        return full - tensors * packed_bytes(parameter.numel(), self.bits)


def _in_full(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state_dict with packed tensors in full, in host memory."""
    with pieces(compiled=False) as how:
        state = {
            number: {k: unpack(v, how).cpu() if isinstance(v, Packed) else v for k, v in of.items()}
            for number, of in state_dict["state"].items()
        }
    return {**state_dict, "state": state}


def _check(optimizer: torch.optim.Optimizer, bits: Bits) -> None:
    if bits not in get_args(Bits):
        raise UsageError(f"bits is {bits!r}", hint='give bits="8bit" or bits="bf16_sr"')
    name = type(optimizer).__name__
    known = {inspect.unwrap(accepted.step) for accepted in _ACCEPTED}
    if inspect.unwrap(type(optimizer).step) not in known:
        raise UsageError(
            f"memfit does not know which state of {name} bears few bits",
            hint="use torch.optim's Adam, AdamW or SGD, or keep the state on the host with "
            f"optimizer_offload (a class of your own with {name}.separable = True)",
        )
    if not any(group.get("momentum", 1) for group in optimizer.param_groups):
        raise UsageError(
            f"{name} without momentum has no state to keep in few bits",
            hint=f"leave optim_{bits} out",
        )
    if not any(packable("exp_avg", p.data, bits) for p in optimized(optimizer)):
        raise UsageError(
            f"none of the optimizer's parameters has at least {MIN_ELEMENTS} elements of more "
            f"than {8 if bits == '8bit' else 16} bits, so that no state would become smaller",
            hint=f"leave optim_{bits} out",
        )
