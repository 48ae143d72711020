"""Do the parts of a batch add up to the whole of it?

A loss that is a mean over samples does; one that compares samples with each other, or is a mean
over what is not ignored, does not. Parts draw other random numbers than the whole batch, so where
the step is random both are compared with constants in the place of random numbers.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import HostMemoryError
from memfit.ir.result import Numerics
from memfit.measure.step import run_backward, untouched
from memfit.runtime.apply import Applied
from memfit.runtime.split import norm_over_the_batch, parts_of, samples_in
from memfit.verify.numerics import (
    REORDERED_TOLERANCE,
    Numbers,
    gradient_error,
    unplanned_numbers,
    workload_is_random,
)
from memfit.workload import Workload

STILL_RANDOM = "its random numbers cannot be held still, so that parts could be compared"
aten = torch.ops.aten


class ConstantRandom(TorchDispatchMode):
    """Random numbers are their mean, so that nothing is dropped and nothing is drawn."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiling goes on as ever; what is compiled draws as ever."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet is aten.native_dropout_backward:  # nothing was scaled up
            return args[0].clone()
        if packet in (aten.rand, aten.randn):
            kwargs.pop("generator", None)
            return torch.full(args[0], 0.5 if packet is aten.rand else 0.0, **kwargs)
        if packet in (aten.rand_like, aten.randn_like):
            return torch.full_like(args[0], 0.5 if packet is aten.rand_like else 0.0, **kwargs)
        if packet is aten.bernoulli:
            return torch.full_like(args[0], args[1]) if len(args) > 1 else args[0].clone()
        if packet is aten.bernoulli_:
            mean = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return args[0].copy_(mean) if torch.is_tensor(mean) else args[0].fill_(mean)
        if packet is aten.uniform_:
            low = args[1] if len(args) > 1 else 0.0
            high = args[2] if len(args) > 2 else 1.0
            return args[0].fill_((low + high) / 2)
        if packet is aten.normal_:
            return args[0].fill_(args[1] if len(args) > 1 else 0.0)
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" in names:  # attention
            place = names.index("dropout_p")
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            kwargs = {n: 0.0 if n == "dropout_p" else v for n, v in kwargs.items()}
        return func(*args, **kwargs)


def why_parts_differ(workload: Workload) -> str | None:
    """Why a batch in two parts is another step than the whole batch, or None.

    Where the whole batch has no room on the device, not even with its activations on the host, or
    these have none there, that is not known.
    """
    constant = workload_is_random(workload)
    with ConstantRandom() if constant else nullcontext():
        if constant and workload_is_random(workload):
            return STILL_RANDOM
        try:
            whole, _ = unplanned_numbers(workload, None)
            parts = _numbers_of_parts(workload, 2, None)
        except (torch.OutOfMemoryError, HostMemoryError):
            return None
        except Exception as error:  # whatever a model says to a batch that it is not made for
            said = str(error).strip().split("\n")[0]
            return f"the step fails with half of the batch: {type(error).__name__}: {said}"
    apart, losses = gradient_error(whole, parts), _losses_apart(whole, parts)
    if max(apart, losses) <= REORDERED_TOLERANCE:
        return None
    return (
        f"two halves of the batch give another step than all of it: gradients {apart:.2g} of "
        f"their length apart, the loss {losses:.2g} of itself (a sum, a mean over what is not "
        "ignored, or samples that are compared with each other)"
    )


def check_split(
    workload: Workload, planned: Applied, result: Numerics, *, forced: bool = False
) -> Numerics:
    """The comparison of one part, with that of all parts together and the whole batch."""
    norm, split = norm_over_the_batch(workload), planned.plan.split
    constant = workload_is_random(workload)
    with ConstantRandom() if constant else nullcontext():
        if constant and workload_is_random(workload):
            return _noted(result, f"parts are not compared with the whole batch: {STILL_RANDOM}")
        # Captured operators draw as they did when they were captured: then by the plain step.
        plain, _ = unplanned_numbers(workload, None)
        parts = _numbers_of_parts(workload, split, None if constant else planned)
    apart, losses = gradient_error(plain, parts), _losses_apart(plain, parts)
    note = f"all parts together are {apart:.2g} of the gradients' length from the whole batch"
    if constant:
        note += ", by the plain step with constants in the place of its random numbers"
    if losses > REORDERED_TOLERANCE:
        note += f", and their loss {losses:.2g} of itself"
    if norm is not None:
        note += f", as forced: batch norm {norm!r} takes its statistics over parts"
    elif forced:
        note += ", as forced"
    agree = norm is not None or forced or max(apart, losses) <= REORDERED_TOLERANCE
    difference = (plain.loss.double() - parts.loss.double()).abs().max().item()
    return replace(
        _noted(result, note),
        loss_max_abs_diff=max(result.loss_max_abs_diff, difference),
        grad_max_rel_diff=max(result.grad_max_rel_diff, apart),
        agree=result.agree and agree,
    )


def _noted(result: Numerics, note: str) -> Numerics:
    note = f"{result.note}; {note}" if result.note else note
    return replace(result, bitwise_vs_unplanned=False, note=note)


def _losses_apart(whole: Numbers, parts: Numbers) -> float:
    """The distance of two losses, as a share of the first one."""
    one, other = whole.loss.double(), parts.loss.double()
    size = one.abs().max().item()
    return (one - other).abs().max().item() / (size or 1.0)


def _numbers_of_parts(workload: Workload, split: int, planned: Applied | None) -> Numbers:
    """The batch in so many parts, weighed by their samples; by a plan, or by the plain step."""
    samples = samples_in(workload.batch)
    setup = None if planned is None else planned.setup
    with (
        untouched(workload, unmeasured=True),
        nullcontext() if planned is None else planned,
        nullcontext() if setup is None else setup.holding_gradients(),
    ):
        total = torch.zeros(())
        for part in parts_of(workload.batch, split):
            loss = workload.compute_loss(part) * (samples_in(part) / samples)
            run_backward(workload, loss)
            total += loss.detach().cpu()
        named = workload.model.named_parameters()
        return Numbers.copied(workload, total, {n: p.grad for n, p in named if p.grad is not None})
