"""The optimizer steps in backward: gradients are used and freed as they appear."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from memfit.errors import ModelError, UsageError
from memfit.runtime.optimizer.accepted import (
    Parameters,
    check_separable,
    checked_groups,
    optimized,
    refuse_sparse,
)
from memfit.runtime.optimizer.footprint import Footprint, tensor_bytes
from memfit.runtime.optimizer.in_backward.scaling import Scaling
from memfit.runtime.optimizer.in_backward.whole_gradient import WholeGradient
from memfit.runtime.optimizer.parts import Parts
from memfit.runtime.optimizer.take_over import foreign_step_hooks
from memfit.runtime.reversible import Reversible

log = logging.getLogger(__name__)
Clip = Literal["keep", "two_pass"]


class HalfStepError(ModelError):
    """A step failed when some parameters had stepped already."""


class GroupStep(Protocol):
    """Steps one group of parameters; the optimizer's own step() ends the work."""

    def step_group(self, parameters: Parameters) -> None:
        """Use the gradients of a group; they may be dropped afterwards."""
        ...

    def settle(self) -> None:
        """End what is under way, after an error."""
        ...


class StepInBackward(Reversible):
    """Steps each group of parameters as soon as all its gradients are there, then drops them.

    `backward` does so; gradients of any other backward are left alone, and optimizer.step() uses
    them as ever. The optimizer stays the owner of hyper-parameters and state. Its own step() ends
    the step: it does what is left, which are parameters in no group and groups of which a parameter
    got no gradient. A parameter whose gradient comes in several parts belongs in no group.

    Gradients of earlier micro-batches wait for the last one, in whose backward each is used and
    dropped. A global norm (clipping) or a GradScaler needs all gradients before the first step.
    `clip` says how `backward` gets them: "keep" keeps all to the end, which is as quick as the
    plain step; "two_pass" runs backward twice, first to look, then to step, which costs one more
    backward. Where gradients wait, which are kept anyway, the last pass always keeps. What was kept
    is stepped group by group, so that what a step takes for itself is that of one group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Iterable[Parameters] | None = None,
        *,
        clip: Clip = "keep",
        clipped: Iterable[torch.nn.Parameter] | None = None,
        stepper: GroupStep | None = None,
    ) -> None:
        check_separable(optimizer)
        if clip not in ("keep", "two_pass"):
            raise UsageError(f"clip is {clip!r}", hint='give clip="keep" or clip="two_pass"')
        self.optimizer = optimizer
        own = optimized(optimizer)
        self.groups = checked_groups(optimizer, [[p] for p in own] if groups is None else groups)
        self.clip = clip
        self.clipped = own if clipped is None else list(clipped)
        self._stepper = stepper
        self._step_group = Parts(optimizer).step if stepper is None else stepper.step_group
        self._use: Callable[[Parameters], None] | None = None  # what is done to complete groups
        self._holds = self._has_warned = False
        self._missing: list[set[int]] = []
        self._used: set[int] = set()
        self._begun = 0
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def at_work(self) -> bool:
        """Whether it is at work now."""
        return bool(self._handles)

    @property
    def waiting(self) -> bool:
        """Whether gradients of earlier micro-batches wait."""
        return any(p.grad is not None for p in self._all())

    def install(self) -> StepInBackward:
        """Start to step in backward."""
        assert not self._handles, "the optimizer steps in backward already"
        if foreign_step_hooks(self.optimizer):
            raise UsageError(
                "the optimizer has step pre-hooks, which would run after the step in backward",
                hint="remove them, or do not step in backward",
            )
        for index, group in enumerate(self.groups):
            for parameter in group:
                if parameter.requires_grad:
                    hook = _Arrival(self, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._handles.append(self.optimizer.register_step_post_hook(self._end))
        self._begin()
        return self

    def undo(self) -> None:
        """Step in backward no more; harmless when done twice."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def footprint(self) -> Footprint:
        """Bytes of gradients that are freed in backward, and of the largest group.

        Not so in steps that keep gradients: micro-batches, and "keep" with a norm or a scaler.
        """
        sizes = [sum(tensor_bytes(p) for p in g if p.requires_grad) for g in self.groups]
        return Footprint(sum(sizes), max(sizes, default=0), 0)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Within it, backward only accumulates gradients: for all micro-batches but the last."""
        before, self._holds = self._holds, True
        try:
            with self._using(None):
                yield
        finally:
            self._holds = before

    def backward(
        self,
        loss: torch.Tensor,
        *,
        last: bool = True,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        again: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Back-propagate and step; return the gradients' norm when they are clipped.

        With `last=False` gradients are only accumulated. Afterwards no gradients are left;
        scaler.update() is the caller's. Two passes keep the graph for the second one, unless
        `again` computes the same loss anew (with the same random numbers and buffers), for graphs
        that can be used only once.
        """
        if not self._handles:
            raise UsageError("stepping in backward is not installed", hint="call install() first")
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        if not last:
            with self.holding():
                _scaled(loss, scaler).backward()
            return None
        if clip_norm is None and scaler is None:
            with self._using(self._step_group), self._explained():
                loss.backward()
                self.optimizer.step()
            self._drop_all()
            return None
        if self.clip == "two_pass" and not self.waiting:
            return self._two_passes(loss, clip_norm, scaler, again)
        with self.holding():
            _scaled(loss, scaler).backward()
        return self.step_waiting(clip_norm=clip_norm, scaler=scaler)

    def step_waiting(
        self, *, clip_norm: float | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> torch.Tensor | None:
        """Step on the gradients that wait, group by group; return their norm when it is clipped."""
        norm = None
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.clipped, clip_norm)
        with self._by_groups(), self._explained():
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
        self._drop_all()
        return norm

    @contextmanager
    def _by_groups(self) -> Iterator[None]:
        """Within it, optimizer.step() works through the groups and drops what each has used.

        A stepper of its own does so anyway.
        """
        if self._stepper is not None:
            yield
            return

        def step_groups(*_: object) -> None:
            for group in self.groups:
                if any(p.grad is not None for p in group):
                    self._begun += 1
                    self._step_group(group)
                    drop_gradients(group)

        handle = self.optimizer.register_step_pre_hook(step_groups)
        try:
            yield
        finally:
            handle.remove()

    def _two_passes(
        self,
        loss: torch.Tensor,
        clip_norm: float | None,
        scaler: torch.amp.GradScaler | None,
        again: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor | None:
        scaled = _scaled(loss, scaler)
        scaling = None
        if scaler is not None:
            fused = getattr(self.optimizer, "_step_supports_amp_scaling", False)
            scaling = Scaling(scaler, self.optimizer, fused and clip_norm is None)
        whole = WholeGradient(self.clipped, clip_norm, scaling)
        with self._using(whole.look):
            scaled.backward(retain_graph=again is None)
        whole.look(self._all())
        self._drop_all()
        if not whole.conclude():
            self._begin()
            return whole.norm
        if again is not None:
            scaled = _scaled(again(), scaler)

        def prepare_and_step(parameters: Parameters) -> None:
            whole.prepare(parameters)
            self._step_group(parameters)

        with whole.at_work(), self._using(prepare_and_step), self._explained():
            scaled.backward()
            whole.prepare(self._all())
            self.optimizer.step()
        self._drop_all()
        return whole.norm

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        refuse_sparse(parameter)
        if self._use is None:
            if not (self._holds or self._has_warned):
                self._has_warned = True
                log.warning(
                    "backward was called beside the planned step, which steps in backward: its "
                    "gradients are kept, and may take more than the budget"
                )
            return
        if index in self._used:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient after its group had "
                "used it in this step",
                hint="compute the loss so that each parameter gets its gradient in one backward",
            )
        self._missing[index].discard(id(parameter))
        if not self._missing[index]:
            self._used.add(index)
            group = self.groups[index]
            self._begun += 1
            self._use(group)
            drop_gradients(group)

    @contextmanager
    def _using(self, use: Callable[[Parameters], None] | None) -> Iterator[None]:
        before, self._use = self._use, use
        if use is not None:
            self._begin()
        try:
            yield
        finally:
            self._use = before
            if use is not None:
                self._begin()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an error into one that says how far the step had come, if it had begun."""
        self._begin()
        try:
            yield
        except BaseException as error:
            begun = self._begun
            self._begin()
            if not begun:
                raise
            if self._stepper is not None:
                self._stepper.settle()
            message = (
                f"the step failed when {begun} of {len(self.groups)} groups of parameters had "
                f"stepped in backward: the weights belong in part to this step, in part to the "
                f"one before ({type(error).__name__}: {error})"
            )
            if not isinstance(error, Exception):  # Ctrl-C stays what it is
                error.add_note(message)
                raise
            raise HalfStepError(
                message, hint="load the last checkpoint of model and optimizer before going on"
            ) from error

    def _begin(self) -> None:
        self._used.clear()
        self._begun = 0
        self._missing = [{id(p) for p in g if p.requires_grad} for g in self.groups]

    def _end(self, *_: object) -> None:
        self._begin()

    def _all(self) -> list[torch.nn.Parameter]:
        """Every parameter whose gradient counts, each once."""
        every = {id(p): p for p in (*optimized(self.optimizer), *self.clipped)}
        return list(every.values())

    def _drop_all(self) -> None:
        drop_gradients(self._all())


class _Arrival:
    """Tells that a gradient of a group is there.

    Python cannot see what a tensor's hooks hold: one that held its owner would keep all of the
    model where nobody takes it back.
    """

    def __init__(self, owner: StepInBackward, index: int) -> None:
        self._owner, self._index = weakref.ref(owner), index

    def __call__(self, parameter: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner._arrived(self._index, parameter)


def drop_gradients(parameters: Parameters) -> None:
    """Free the gradients of some parameters."""
    for parameter in parameters:
        parameter.grad = None


def _scaled(loss: torch.Tensor, scaler: torch.amp.GradScaler | None) -> torch.Tensor:
    if scaler is None:
        return loss
    scaled = scaler.scale(loss)
    assert isinstance(scaled, torch.Tensor)
    return scaled
