"""Are the planned step's numbers those of the unplanned one?"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.errors import HostMemoryError
from memfit.ir.plan import Plan
from memfit.ir.result import Numerics
from memfit.measure.memory import cuda_capacity
from memfit.measure.step import (
    drop_gradients,
    is_out_of_memory,
    run_backward,
    untouched,
)
from memfit.runtime.apply import Applied
from memfit.runtime.compile.choice import OtherGraph
from memfit.runtime.random_state import RandomState
from memfit.verify.deterministic import deterministic
from memfit.verify.saved_on_host import saved_on_host
from memfit.workload import Workload

# Two exact plans of one model under bf16 autocast differ by this much when fusion differs.
RANDOM_TOLERANCE = 5e-2
ROUNDING = 1e-6  # of float32, beside which a factor of two means nothing
REORDERED_TOLERANCE = 1e-2  # of all gradients' length; bf16 takes up most of it
INT8_TOLERANCE = 1e-1  # of all gradients' length, where frozen weights are rounded to 8 bits
EAGER_TOLERANCE = 0.1  # of a gradient's largest, of the same operators run as captured graphs
SMALL = 1e-3  # of the largest gradient: smaller ones are measured by this
REPEATS = 3  # that show whether a step repeats itself
_COPIES = 5  # there at once when two runs on the device are compared with a third
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Numbers:
    """What one forward and backward gave; in host memory unless the device has room to spare."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @classmethod
    def copied(
        cls, workload: Workload, loss: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> Numbers:
        """Copies of a loss, of gradients or what is compared in their place, and of all buffers."""
        home = _home(workload.device, tensors.values())
        return cls(
            loss.detach().cpu(),
            {n: _copy(tensor, home) for n, tensor in tensors.items()},
            {n: _host(b) for n, b in workload.model.named_buffers()},
        )


def check_numerics(
    workload: Workload, planned: Applied, unplanned: Applied | None = None
) -> Numerics:
    """Compare loss, gradients and buffers of the planned and the unplanned step.

    Both run from the same state, by the same executor; `unplanned` None is the plain module.
    Deterministic algorithms are asked for, under `graph` only where the usual ones differ.
    Recomputed operators are the same operators, so the numbers must be the same bit for bit, except
    under `inductor`: there a plan changes what is fused, and the planned step may be at most twice
    as far from eager full precision as the unplanned one, or where that is no measure some percent
    from the unplanned one.
    When the unplanned step does not fit on the device, its saved tensors lie in host memory. When
    it does not repeat itself, both run again with attention kernels that do.
    """
    # Asking for determinism compiles every segment anew. Fused code is compared within a tolerance.
    if planned.plan.executor != "module":
        result = _planned_against_unplanned(workload, planned, unplanned)
        if result.bitwise_vs_unplanned or planned.plan.executor == "inductor":
            return result
    with deterministic():
        result = _planned_against_unplanned(workload, planned, unplanned)
    # A step that repeated itself once may have done so by chance.
    same = result.bitwise_vs_unplanned or (_is_only_near(planned.plan) and result.agree)
    if not same and workload.device.type == "cuda":
        result = _with_repeatable_kernels(workload, planned, unplanned) or result
    return result


def _with_repeatable_kernels(
    workload: Workload, planned: Applied, unplanned: Applied | None
) -> Numerics | None:
    """The comparison by kernels that repeat themselves; None where no kind of them runs here."""
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "deterministic": partial(deterministic, strict=True)
    }
    if unplanned is None:  # compiled code has chosen its attention already
        kinds["cudnn attention"] = partial(sdpa_kernel, [SDPBackend.CUDNN_ATTENTION])
        kinds["math attention"] = partial(sdpa_kernel, [SDPBackend.MATH])
    for name, kernels in kinds.items():
        try:
            with deterministic(), kernels():
                again = _planned_against_unplanned(workload, planned, unplanned)
        except (RuntimeError, HostMemoryError, OtherGraph) as error:
            # None for an operator, or no room, or not the operators of the plan.
            log.info("no comparison by %s kernels: %s", name, error)
            drop_gradients(workload)
            continue
        finally:
            gc.collect()
        if again.repeatable:
            note = f"compared with {name} kernels: the usual ones do not repeat themselves"
            return replace(again, note=f"{note}; {again.note}" if again.note else note)
    return None


def _planned_against_unplanned(
    workload: Workload, planned: Applied, base: Applied | None
) -> Numerics:
    unplanned, on_host = unplanned_numbers(workload, base)
    note = None
    if on_host:
        note = "the unplanned step does not fit: its activations were kept in host memory"
    if planned.graphs is not None:  # the first call runs as ever
        _numbers(workload, planned)
    actual = _numbers(workload, planned)
    result = replace(compare(unplanned, actual, small=SMALL), note=note)
    if _rounds_weights(planned.plan):
        why = "frozen weights are rounded to 8 bits"
        return _near(result, unplanned, actual, why, INT8_TOLERANCE)
    if planned.plan.executor == "inductor":
        if workload_is_random(workload):
            return _against_unplanned(workload, base, result, unplanned, actual)
        return _against_reference(workload, result, unplanned, actual)
    if base is not None:
        result = _beside_eager(workload, result, unplanned)
        if not result.agree and result.bitwise_vs_unplanned:
            return result
    if result.bitwise_vs_unplanned:
        return result
    if _reorders(planned.plan):
        why = "the loss is summed in another order"
        return _near(result, unplanned, actual, why, REORDERED_TOLERANCE)
    # Is it the plan, or is the model itself not repeatable?
    for _ in range(REPEATS if workload.device.type == "cuda" else 1):
        again = compare(unplanned, _numbers(workload, base, on_host=on_host))
        if not again.bitwise_vs_unplanned:
            note = (
                "the unplanned step does not repeat itself either: two runs differ by "
                f"{again.grad_max_rel_diff:.2g} in gradients"
            )
            return replace(result, note=note, repeatable=False)
    return replace(result, agree=False)


def _beside_eager(workload: Workload, result: Numerics, unplanned: Numbers) -> Numerics:
    """The comparison with how far the unplanned code is from plain eager; too far is another step.

    An eager step that is as far from itself tells nothing.
    """
    eager, _ = unplanned_numbers(workload, None)
    apart = compare(eager, unplanned, small=SMALL).grad_max_rel_diff
    result = replace(result, eager_max_rel_diff=apart)
    if apart <= EAGER_TOLERANCE:
        return result
    again, _ = unplanned_numbers(workload, None)
    if apart <= 2 * compare(eager, again, small=SMALL).grad_max_rel_diff:
        return result
    note = f"the code of its segments is not the plain step: gradients are {apart:.2g} apart"
    return replace(result, agree=False, note=f"{result.note}; {note}" if result.note else note)


def unplanned_numbers(workload: Workload, base: Applied | None) -> tuple[Numbers, bool]:
    """The unplanned step's numbers, and whether its activations had to lie in host memory."""
    try:
        return _numbers(workload, base), False
    except torch.OutOfMemoryError:
        pass
    gc.collect()  # outside of the except block what the failed step held is free
    torch.cuda.empty_cache()
    return _numbers(workload, base, on_host=True), True


def _is_only_near(plan: Plan) -> bool:
    return _reorders(plan) or _rounds_weights(plan)


def _reorders(plan: Plan) -> bool:
    return "tiled_loss" in plan.techniques


def _rounds_weights(plan: Plan) -> bool:
    return any(name.startswith("int8_weights") for name in plan.techniques)


def _near(
    result: Numerics, unplanned: Numbers, planned: Numbers, why: str, tolerance: float
) -> Numerics:
    """Near, not equal, and why."""
    apart = gradient_error(unplanned, planned)
    note = f"{why}: all gradients together are {apart:.2g} of their length from the unplanned ones"
    note = f"{result.note}; {note}" if result.note else note
    return replace(result, agree=apart <= tolerance, note=note)


def _against_unplanned(
    workload: Workload,
    base: Applied | None,
    result: Numerics,
    unplanned: Numbers,
    planned: Numbers,
) -> Numerics:
    """How far the planned step is from the unplanned one, beside how far that is from itself.

    Compiled code draws other random numbers than eager code, so there is no reference.
    """
    apart = gradient_error(unplanned, planned)
    again, _ = unplanned_numbers(workload, base)
    itself = gradient_error(unplanned, again)
    note = (
        "compiled code draws other random numbers than eager: no full-precision reference; all "
        f"gradients together are {apart:.2g} of their length from the unplanned ones, which are "
        f"{itself:.2g} from themselves in a second run"
    )
    note = f"{result.note}; {note}" if result.note else note
    return replace(result, agree=apart <= max(RANDOM_TOLERANCE, 2 * itself), note=note)


def _against_reference(
    workload: Workload, result: Numerics, unplanned: Numbers, planned: Numbers
) -> Numerics:
    """How far both steps are from eager full precision, or from each other where that is so far
    that gradients of zero would pass."""
    with full_precision():
        reference, _ = unplanned_numbers(workload, None)
    errors = {
        "planned": gradient_error(reference, planned),
        "unplanned": gradient_error(reference, unplanned),
    }
    agree = errors["planned"] <= 2 * errors["unplanned"] + ROUNDING
    compared = replace(result, error_vs_reference=errors, agree=agree)
    if compared.reference_judges or not agree:
        return compared
    why = (
        "full precision is no measure here: unplanned gradients are "
        f"{errors['unplanned']:.2g} of their length from it"
    )
    near = _near(result, unplanned, planned, why, RANDOM_TOLERANCE)
    return near if near.agree else replace(compared, note=near.note)


def workload_is_random(workload: Workload) -> bool:
    """Whether a forward draws random numbers."""
    with untouched(workload, unmeasured=True), torch.no_grad():
        before = RandomState.of([workload.device])
        workload.compute_loss()
        return not before.same_as(RandomState.of([workload.device]))


def gradient_error(reference: Numbers, actual: Numbers) -> float:
    """The distance of all gradients from the reference's, as a share of the reference's length."""
    distance = length = 0.0
    for name, expected in reference.gradients.items():
        difference = _wide(actual.gradients[name].to(expected.device)) - _wide(expected)
        distance += float(difference.abs().square().sum())
        length += float(_wide(expected).abs().square().sum())
    return (distance / length) ** 0.5 if length else distance**0.5


@contextmanager
def full_precision() -> Iterator[None]:
    """Run without autocast and without shortened float32 products."""
    enter = torch.autocast.__enter__
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32

    def disabled(self: torch.autocast) -> Any:
        self._enabled = False
        return enter(self)

    torch.autocast.__enter__ = disabled  # type: ignore[method-assign]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn


def compare(expected: Numbers, actual: Numbers, *, small: float = 0.0) -> Numerics:
    """The differences between two runs; NaN counts as equal to NaN.

    Differences are shares of a tensor's largest value. Gradients that are nothing but rounding (a
    bias before a softmax has none) are `small` beside the largest one, and measured by that share.
    """
    same = _same(expected.loss, actual.loss)
    worst = 0.0
    least = small * max(map(_largest, expected.gradients.values()), default=0.0) if small else 0.0
    for one, other, floor in (
        (expected.gradients, actual.gradients, least),
        (expected.buffers, actual.buffers, 0.0),
    ):
        same = same and one.keys() == other.keys()
        for name in one.keys() & other.keys():
            if not _same(one[name], other[name]):
                same = False
                worst = max(worst, _relative(one[name], other[name], floor))
    difference = (expected.loss.double() - actual.loss.double()).abs().max().item()
    return Numerics(same, 0.0 if same else difference, worst, agree=same)


def _numbers(workload: Workload, planned: Applied | None, *, on_host: bool = False) -> Numbers:
    with untouched(workload, unmeasured=True), ExitStack() as stack:
        if workload.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(workload.device)
        if planned is not None:
            stack.enter_context(planned)
            if planned.setup is not None:
                stack.enter_context(planned.setup.holding_gradients())
        if on_host:
            stack.enter_context(saved_on_host())
        try:
            loss = workload.compute_loss()
            run_backward(workload, loss)
        except RuntimeError as error:
            if is_out_of_memory(error):
                drop_gradients(workload)
            raise
        parameters = workload.model.named_parameters()
        gradients = {n: p.grad for n, p in parameters if p.grad is not None}
        return Numbers.copied(workload, loss, gradients)


def _home(device: torch.device, tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where copies of these go: to the host if they might be in a later step's way."""
    if device.type == "cuda":
        spare = cuda_capacity(device) - torch.cuda.max_memory_reserved(device)
        if spare > _COPIES * sum(tensor.nbytes for tensor in tensors):
            return device
    return torch.device("cpu")


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return _copy(tensor, torch.device("cpu"))


def _copy(tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).to(home, copy=True)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    other = other.to(one.device)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _relative(one: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    if one.shape != other.shape:
        return float("inf")
    return _largest(_wide(one) - _wide(other.to(one.device))) / (max(_largest(one), floor) or 1.0)


def _largest(tensor: torch.Tensor) -> float:
    return _wide(tensor).abs().max().item() if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers in double precision; complex ones stay complex."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
