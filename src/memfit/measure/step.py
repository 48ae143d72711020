"""One training step, as every measurement in memfit runs it, and the state it must not disturb."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch.utils.checkpoint import CheckpointError

from memfit.errors import ModelError
from memfit.measure.counters import numbers_of, put_back
from memfit.measure.host_random import host_state, set_host_state
from memfit.measure.kept_copies import Copies
from memfit.measure.memory import cuda_capacity
from memfit.measure.switches import switched_off
from memfit.workload import Workload

Phase = Callable[[str], None]
MOST_SKIPPED = 20
_PLENTY = 8  # times what is allocated


class InBackward(Protocol):
    """Trains on a workload's batch with an optimizer that steps in backward."""

    def __call__(
        self,
        workload: Workload,
        *,
        last: bool,
        scaler: torch.amp.GradScaler | None,
        phase: Phase,
    ) -> torch.Tensor:
        """Run forward and backward, in which the `last` batch of a step steps; return the loss."""
        ...


# By the optimizer's id; who entered the block below keeps it, so that nothing is kept alive here.
_in_backward: WeakValueDictionary[int, InBackward] = WeakValueDictionary()


@contextmanager
def stepping_in_backward(optimizer: torch.optim.Optimizer, train: InBackward) -> Iterator[None]:
    """Within it, `run_step` trains this way whatever this optimizer optimizes."""
    _in_backward[id(optimizer)] = train
    try:
        yield
    finally:
        if _in_backward.get(id(optimizer)) is train:
            del _in_backward[id(optimizer)]


def run_step(
    workload: Workload, *, accumulate: int = 1, phase: Phase | None = None
) -> torch.Tensor:
    """Run forward, backward and the optimizer once; leave no gradients; return the loss.

    With `accumulate`, forward and backward run that often before the optimizer. `phase` is called
    with "forward", "backward", "optimizer" and "end" as each begins. An optimizer that steps in
    backward has nothing left to do in its phase, and may have run forward and backward twice.
    """
    say = phase or (lambda name: None)
    train = _in_backward.get(id(workload.optimizer))
    for number in range(accumulate):
        if train is not None:
            last = number == accumulate - 1
            loss = train(workload, last=last, scaler=workload.scaler, phase=say)
            continue
        say("forward")
        loss = workload.compute_loss()
        say("backward")
        run_backward(workload, loss)
    say("optimizer")
    if train is not None:
        pass
    elif workload.scaler is None:
        workload.optimizer.step()
    else:
        workload.scaler.step(workload.optimizer)
        workload.scaler.update()
    drop_gradients(workload)
    say("end")
    return loss.detach()


def run_first_steps(
    workload: Workload, steps: int = 2, *, accumulate: int = 1
) -> torch.Tensor | None:
    """Run `steps` steps, and on while a GradScaler skips them because its first scale is too large.

    The optimizer has made its state then. Returns the loss of the last one.
    """
    skipped, loss = 0, None
    while steps > 0 and skipped < MOST_SKIPPED:
        before = None if workload.scaler is None else workload.scaler.get_scale()
        loss = run_step(workload, accumulate=accumulate)
        if before is not None and workload.scaler is not None:
            skips = workload.scaler.get_scale() < before
            skipped += skips
            steps += skips
        steps -= 1
    return loss


def run_backward(workload: Workload, loss: torch.Tensor) -> None:
    """Back-propagate the loss, scaled if the workload has a scaler."""
    if workload.scaler is not None:
        loss = workload.scaler.scale(loss)
    loss.backward()


def drop_gradients(workload: Workload) -> None:
    """Free every gradient of the model and the optimizer."""
    workload.optimizer.zero_grad(set_to_none=True)
    for parameter in workload.model.parameters():
        parameter.grad = None


@contextmanager
def untouched(
    workload: Workload, *, unmeasured: bool = False, as_it_is: bool = False
) -> Iterator[None]:
    """Restore parameters, buffers, gradients, optimizer, modes, counters and RNG when the block is
    left.

    Copies lie in host memory, so that the device's memory is that of the step alone; where memory
    is `unmeasured`, on a device with plenty of room, which is quicker. Switches of the model that
    work against plans are off within the block, unless the step is to be seen `as_it_is`.
    """
    model, optimizer = workload.model, workload.optimizer
    parameters = list(model.parameters())
    tensors = [*parameters, *model.buffers()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    copies = Copies(on_device=unmeasured and _has_plenty_of_room(workload))
    kept = [copies.of(t) for t in tensors]
    gradients = [p.grad for p in parameters]
    state = {p: _state_copy(s, copies) for p, s in optimizer.state.items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    groups = copy.deepcopy(groups)
    scaler = None if workload.scaler is None else copy.deepcopy(workload.scaler.state_dict())
    numbers = numbers_of(model)
    modes = {module: module.training for module in model.modules()}
    rng = torch.get_rng_state(), _cuda_states(workload.device)
    host_rng = host_state()
    # Kept gradients would count as memory of the step; they come back at the end.
    kept_gradients = [None if g is None else copies.of(g) for g in gradients]
    drop_gradients(workload)
    del gradients
    try:
        with nullcontext() if as_it_is else switched_off(model):
            yield
    finally:
        drop_gradients(workload)
        for module, own in buffers:  # a forward may have put others in their place
            for key, buffer in own.items():
                if key not in module._buffers or module._buffers[key] is not buffer:
                    module._buffers[key] = buffer
        with torch.no_grad():
            for tensor, old in zip(tensors, kept, strict=True):
                tensor.copy_(old)
            for parameter, old_grad in zip(parameters, kept_gradients, strict=True):
                if old_grad is not None:
                    parameter.grad = old_grad.to(parameter.device, copy=True)
        _restore_optimizer(optimizer, state)
        del kept, kept_gradients, state
        copies.release()
        for group, old_group in zip(optimizer.param_groups, groups, strict=True):
            group.update(old_group)
        if scaler is not None and workload.scaler is not None:
            workload.scaler.load_state_dict(scaler)
        for module, training in modes.items():
            module.training = training
        put_back(numbers)
        torch.set_rng_state(rng[0])
        if rng[1] is not None:
            torch.cuda.set_rng_state(rng[1], workload.device)
        set_host_state(host_rng)


@contextmanager
def explained_errors(workload: Workload) -> Iterator[None]:
    """Turn an exception of the user's forward into a ModelError that says where it was raised."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        hint = "run loss_fn(model, batch).backward() once by itself to see it"
        if isinstance(error, CheckpointError):
            hint = "a segment must do the same when it runs again: no caches that grow, no counters"
        raise ModelError(
            f"the training step of {workload.name or 'the workload'} failed: "
            f"{type(error).__name__}: {error}",
            hint=hint,
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a device has no memory left, or tells of a step that this ended.

    A step that fails when some parameters have stepped already is an error of its own, whatever
    made it fail: whoever goes on after it must take back what it did (`untouched`).
    """
    if isinstance(error, ModelError) and error.__cause__ is not None:
        return is_out_of_memory(error.__cause__)
    cpu = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return cpu or isinstance(error, torch.OutOfMemoryError)


def _has_plenty_of_room(workload: Workload) -> bool:
    """Whether copies of all it has are small beside what the device has to spare."""
    device = workload.device
    if device.type != "cuda":
        return False
    spare = cuda_capacity(device) - torch.cuda.max_memory_reserved(device)
    return spare > _PLENTY * torch.cuda.memory_allocated(device)


def _state_copy(state: Any, copies: Copies) -> Any:
    if isinstance(state, torch.Tensor):
        return (state.device, copies.of(state))
    if isinstance(state, dict):
        return {key: _state_copy(value, copies) for key, value in state.items()}
    return copy.deepcopy(state)


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in state:
            del optimizer.state[parameter]
    for parameter, old in state.items():
        current = optimizer.state[parameter]
        for key, value in old.items():
            if isinstance(value, tuple) and isinstance(value[1], torch.Tensor):
                existing = current.get(key)
                if isinstance(existing, torch.Tensor) and existing.shape == value[1].shape:
                    existing.copy_(value[1])
                else:
                    current[key] = value[1].to(value[0], copy=True)
            else:
                current[key] = value
        for key in list(current):
            if key not in old:
                del current[key]


def _cuda_states(device: torch.device) -> torch.Tensor | None:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
