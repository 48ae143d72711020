"""Are the planned step's numbers those of the unplanned one?"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.ir.result import Numerics
from memfit.measure.step import drop_gradients, is_out_of_memory, run_backward, untouched
from memfit.runtime.apply import Applied
from memfit.workload import Workload


@dataclass(frozen=True)
class Numbers:
    """What one forward and backward gave, in host memory."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def check_numerics(workload: Workload, planned: Applied) -> Numerics:
    """Compare loss, gradients and buffers of the planned and the unplanned step, bit for bit.

    Both run from the same state with deterministic algorithms. When the unplanned step does not
    fit on the device, its saved tensors lie in host memory: the arithmetic is the same. When it
    does not repeat itself, both run again with attention kernels that do.
    """
    with deterministic():
        result = _planned_against_unplanned(workload, planned)
        if result.repeatable or workload.device.type != "cuda":
            return result
        for kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel([kernel, SDPBackend.MATH]):
                again = _planned_against_unplanned(workload, planned)
            if again.repeatable:
                name = kernel.name.lower().replace("_", " ")
                note = f"compared with {name} kernels: the usual ones do not repeat themselves"
                return replace(again, note=f"{note}; {again.note}" if again.note else note)
    return result


def _planned_against_unplanned(workload: Workload, planned: Applied) -> Numerics:
    note = unplanned = None
    try:
        unplanned = _numbers(workload, None)
    except torch.OutOfMemoryError:
        note = "the unplanned step does not fit: its activations were kept in host memory"
    if unplanned is None:  # outside of the except block what the failed step held is free
        torch.cuda.empty_cache()
        unplanned = _numbers(workload, None, on_host=True)
    result = compare(unplanned, _numbers(workload, planned))
    if result.bitwise_vs_unplanned:
        return replace(result, note=note)
    # Is it the plan, or is the model itself not repeatable?
    again = compare(unplanned, _numbers(workload, None, on_host=note is not None))
    if again.bitwise_vs_unplanned:
        return replace(result, note=note)
    note = (
        "the unplanned step does not repeat itself either: two runs differ by "
        f"{again.grad_max_rel_diff:.2g} in gradients"
    )
    return replace(result, note=note, repeatable=False)


def compare(expected: Numbers, actual: Numbers) -> Numerics:
    """The differences between two runs; NaN counts as equal to NaN."""
    same = _same(expected.loss, actual.loss)
    worst = 0.0
    for one, other in (
        (expected.gradients, actual.gradients),
        (expected.buffers, actual.buffers),
    ):
        same = same and one.keys() == other.keys()
        for name in one.keys() & other.keys():
            if not _same(one[name], other[name]):
                same = False
                worst = max(worst, _relative(one[name], other[name]))
    difference = (expected.loss.double() - actual.loss.double()).abs().max().item()
    return Numerics(same, 0.0 if same else difference, worst)


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch for deterministic algorithms where it has them."""
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = before[2]


def _numbers(workload: Workload, planned: Applied | None, *, on_host: bool = False) -> Numbers:
    with untouched(workload), ExitStack() as stack:
        if planned is not None:
            stack.enter_context(planned)
        if on_host:
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        try:
            loss = workload.compute_loss()
            run_backward(workload, loss)
        except RuntimeError as error:
            if is_out_of_memory(error):
                drop_gradients(workload)
            raise
        model = workload.model
        return Numbers(
            loss.detach().cpu(),
            {n: _host(p.grad) for n, p in model.named_parameters() if p.grad is not None},
            {n: _host(b) for n, b in model.named_buffers()},
        )


def _host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).to("cpu", copy=True)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    scale = one.double().abs().max().item() or 1.0
    return (one.double() - other.double()).abs().max().item() / scale
