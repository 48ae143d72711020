"""Fitted: a training step under its budget."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
from memfit.ir.result import Result
from memfit.measure.cuda_allocator import settle_optimizer_state
from memfit.measure.step import Phase, drop_gradients
from memfit.runtime.apply import Applied
from memfit.runtime.compile.compiled import compiled_segments
from memfit.runtime.optimizer.in_backward.step_in_backward import StepInBackward
from memfit.runtime.optimizer.in_backward.train import train
from memfit.runtime.signature import batch_signature, is_no_larger
from memfit.runtime.split import parts_of, samples_in
from memfit.runtime.step_options import check_step_options
from memfit.workload import Workload

log = logging.getLogger(__name__)
Replan = Callable[[Workload], "Fitted"]


class Fitted:
    """A planned step that was run and verified. `step(batch)` trains; `undo()` takes it off."""

    def __init__(
        self,
        workload: Workload,
        applied: Applied,
        profile: Profile,
        result: Result,
        replan: Replan,
        accumulate: int = 1,
        plain: Profile | None = None,
        whole: Any = None,
    ) -> None:
        self.workload = workload
        self.profile = profile
        self.plain = plain or profile  # of the step before anything was done to it
        self.result = result
        self.applied = applied
        self._replan = replan
        self._accumulate = accumulate
        self._split = applied.plan.split  # also where a larger part has a plan of its own
        self._whole = whole  # a batch; in parts, the first is the workload's
        self._planned = [(workload.batch, applied, profile, result)]
        self._waiting = 0  # batches since the optimizer last stepped
        self._group = accumulate
        self.on_phase: Phase | None = None  # told of "forward", "backward", "optimizer" and "end"

    @property
    def plan(self) -> Plan:
        """The plan at work."""
        return self.applied.plan

    @property
    def example(self) -> Any:
        """A batch that `step` takes by the plan at work, or by one like it: whole, not a part."""
        return self.workload.batch if self._split == 1 else self._whole

    @property
    def waiting(self) -> int:
        """Batches whose gradients wait for the optimizer to step."""
        return self._waiting

    @property
    def notes(self) -> tuple[str, ...]:
        """What had to be done otherwise than planned since, for batches of other shapes."""
        if self.plan.executor == "module":
            return ()
        graphs = {variant.graph for variant in self.plan.variants}
        return tuple(compiled_segments(self.plan.executor).notes(graphs))

    def step(
        self,
        batch: Any,
        *,
        clip_norm: float | None = None,
        accumulate: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
    ) -> torch.Tensor:
        """Train on one batch and return its loss, detached.

        `clip_norm` clips the gradients' global norm. With `accumulate=n` the optimizer steps at
        every n-th call, on the mean over the n batches; `flush()` steps for a last, shorter group,
        on the mean over its own.
        `scheduler.step()` is called after each optimizer step.

        After an exception nothing of the step is left, neither saved tensors in host memory nor,
        where no earlier batch waits for the optimizer, gradients.
        """
        check_step_options(clip_norm, scaler, scheduler)
        parts = parts_of(batch, self._split)
        if len(parts) == 1:
            return self._train(batch, None, True, clip_norm, accumulate, scaler, scheduler)
        # Means over all samples: a part counts by its share of them.
        shares = [samples_in(part) / samples_in(batch) for part in parts]
        losses = []
        for part, share in zip(parts, shares, strict=True):
            last = part is parts[-1]
            loss = self._train(part, share, last, clip_norm, accumulate, scaler, scheduler)
            losses.append(share * loss)
        return torch.stack(losses).sum()

    def _train(
        self,
        batch: Any,
        share: float | None,
        last: bool,
        clip_norm: float | None,
        accumulate: int | None,
        scaler: torch.amp.GradScaler | None,
        scheduler: Any,
    ) -> torch.Tensor:
        """Train on a batch, or on a part with this share of one; the last part ends the batch."""
        accumulate = self._accumulate if accumulate is None else accumulate
        if accumulate < 1 or (accumulate > 1 and self._accumulate == 1):
            raise UsageError(
                f"accumulate is {accumulate}, but the step was fitted for {self._accumulate}",
                hint="gradients that wait need room in the plan: fit(..., accumulate=n)",
            )
        if not self.applied.at_work:
            raise UsageError(
                "the plan was taken off the model, so the step would not keep its budget",
                hint="fit again, or train the model with your own loop",
            )
        self._prepare(batch)
        with self._leaving_nothing():
            return self._run(batch, share, last, clip_norm, accumulate, scaler, scheduler)

    def _run(
        self,
        batch: Any,
        share: float | None,
        last: bool,
        clip_norm: float | None,
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        scheduler: Any,
    ) -> torch.Tensor:
        """Run forward and backward, and the optimizer where it is its turn."""
        scaler = scaler or self.workload.scaler
        self._group = accumulate
        steps = last and self._waiting + 1 >= accumulate

        def weigh(loss: torch.Tensor) -> torch.Tensor:
            loss = loss / accumulate if accumulate > 1 else loss
            return loss if share is None else loss * share

        in_backward = self._in_backward
        if in_backward is not None:
            fresh = not self.workload.optimizer.state
            loss = train(
                in_backward,
                self.workload,
                batch,
                last=steps,
                weigh=weigh,
                clip_norm=clip_norm,
                scaler=scaler,
                phase=self._say,
            )
        else:
            self._say("forward")
            loss = self.workload.compute_loss(batch)
            self._say("backward")
            weighed = weigh(loss)
            (scaler.scale(weighed) if scaler is not None else weighed).backward()
        self._waiting += last
        if not steps:
            self._say("end")
        elif in_backward is not None:
            self._end_step(fresh, scheduler)
        else:
            self._optimize(clip_norm, scaler, scheduler)
        return loss.detach()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Free what a step has made so far when an exception ends it.

        But gradients stay where those of earlier batches are in them.
        """
        swap, keeps = self.applied.swap, bool(self._waiting)
        try:
            with nullcontext() if swap is None else swap.owned():
                yield
        except BaseException:
            if not keeps:
                drop_gradients(self.workload)
            raise

    @property
    def _in_backward(self) -> StepInBackward | None:
        """What steps in backward, if the plan does."""
        setup = self.applied.setup
        return None if setup is None else setup.in_backward

    def flush(
        self,
        *,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
    ) -> None:
        """Step the optimizer for batches that are still waiting for one, if any."""
        check_step_options(clip_norm, scaler, scheduler)
        if self._waiting:
            # Each loss was divided by the whole group's length.
            gradients = [p.grad for p in self.workload.model.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, self._group / self._waiting)
            self._optimize(clip_norm, scaler or self.workload.scaler, scheduler)

    def undo(self) -> None:
        """Restore the model as it was before the fit; training it plainly goes on from here."""
        self._take_off()

    def __enter__(self) -> Fitted:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def _optimize(
        self, clip_norm: float | None, scaler: torch.amp.GradScaler | None, scheduler: Any
    ) -> None:
        """Step on the gradients that are there."""
        self._say("optimizer")
        optimizer, in_backward = self.workload.optimizer, self._in_backward
        fresh = not optimizer.state
        if in_backward is not None:
            in_backward.step_waiting(clip_norm=clip_norm, scaler=scaler)
        else:
            if clip_norm is not None:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.workload.model.parameters(), clip_norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        self._end_step(fresh, scheduler)

    def _end_step(self, fresh: bool, scheduler: Any) -> None:
        """What follows each step of the optimizer; a `fresh` one has made its state."""
        drop_gradients(self.workload)
        if fresh:
            settle_optimizer_state(self.workload.optimizer, self.workload.device)
        if scheduler is not None:
            scheduler.step()
        self._waiting = 0
        self._say("end")

    def _say(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    def _prepare(self, batch: Any) -> None:
        """Make sure a plan for this batch's shape is at work."""
        for tensor in self.workload.batch_tensors(batch):
            if tensor.device != self.workload.device:
                raise UsageError(
                    f"the batch has a tensor on {tensor.device}, "
                    f"the model is on {self.workload.device}",
                    hint=f"move the batch with tensor.to({str(self.workload.device)!r})",
                )
        if is_no_larger(batch, self.workload.batch):
            return
        for planned in self._planned:
            if is_no_larger(batch, planned[0]):
                self._switch(*planned)
                return
        log.warning(
            "the batch %s is larger than what was planned for, or unlike it: planning again",
            batch_signature(batch),
        )
        self._take_off()
        try:
            again = self._replan(replace(self.workload, batch=batch))
        except BaseException:  # a caller who goes on with smaller batches still has the plan
            self.applied.install()
            raise
        again.undo()
        self._planned.append((batch, again.applied, again.profile, again.result))
        self._switch(*self._planned[-1])

    def _switch(self, batch: Any, applied: Applied, profile: Profile, result: Result) -> None:
        self._take_off()
        self.applied, self.profile, self.result = applied.install(), profile, result
        self.workload.batch = batch

    def _take_off(self) -> None:
        self.applied.undo()
        self.applied.release()
