"""The safety valve: saved tensors go to host memory while device memory is short, and only then."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from memfit.errors import UsageError
from memfit.ir.pressure import PressureStatistics
from memfit.runtime.pressure.attention import Attention
from memfit.runtime.pressure.gauge import no_capacity
from memfit.runtime.pressure.saved_tensors import SavedTensors, Settings
from memfit.units import parse_bytes

_GAP = 0.1  # between the threshold and where moving stops
_MIN_TENSOR_BYTES = 2**20  # a smaller copy takes longer to start than to make

_at_work: Valve | None = None
_guard = threading.Lock()


class Valve:
    """A safety valve, open between entering and leaving it. See `pressure`."""

    def __init__(self, settings: Settings) -> None:
        self._saved_tensors = SavedTensors(settings)
        self._attention = Attention(self._saved_tensors)
        self._thread = 0

    @property
    def statistics(self) -> PressureStatistics:
        """What the valve did since it was made; waits for copies under way."""
        return self._saved_tensors.statistics()

    @property
    def refusals(self) -> int:
        """How often a tensor that was to move was refused host memory, and stayed.

        Tensors as large are not tried until some host memory came back, and do not count.
        """
        return self._saved_tensors.refusals

    @property
    def dozes(self) -> bool:
        """Whether memory is so far from short that saved tensors are not looked at."""
        return self._attention.dozes

    @property
    def copies_in_flight(self) -> int:
        """Copies to the host and back that are under way now; the device is not waited for."""
        return self._saved_tensors.in_flight()

    def __enter__(self) -> Valve:
        global _at_work
        with _guard:
            if _at_work is not None:
                raise self._in_use(_at_work)
            _at_work = self
        try:
            self._saved_tensors.open()
            self._attention.begin()
        except BaseException:
            _at_work = None
            raise
        self._thread = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _at_work
        if self._thread != threading.get_ident():
            raise UsageError(
                "a valve is left in another thread than it was entered in",
                hint="enter and leave memfit.pressure in the thread that runs the forward",
            )
        self._attention.end()
        self._thread = 0
        try:
            self._saved_tensors.close()
        finally:
            _at_work = None

    def _in_use(self, other: Valve) -> UsageError:
        which = "this valve" if other is self else "another valve"
        where = "here" if other._thread == threading.get_ident() else "in another thread"
        return UsageError(
            f"{which} is at work {where}, and there is one for the memory of a process",
            hint="enter one memfit.pressure around the whole loop, or leave it before the next",
        )


def pressure(
    threshold: float = 0.8,
    *,
    capacity: int | str | None = None,
    host_budget: int | str | None = None,
    min_tensor_bytes: int | str = _MIN_TENSOR_BYTES,
    release_at: float | None = None,
    device: torch.device | str | None = None,
) -> Valve:
    """A safety valve around a training loop, or around each of its steps: a context manager.

    While more than `threshold` of the `capacity` is allocated, the tensors saved for the backward
    that are idle longest move to host memory (at most `host_budget`), until `release_at` of the
    capacity is in use (threshold less 0.1). 0 moves everything that can. Tensors below
    `min_tensor_bytes` stay.

    What host memory has no room for stays on the device: training goes on, a warning says so once
    and `refusals` counts it.

    The capacity is what this process may take of the GPU, the device that of the first large
    tensor saved there. On the CPU, where saved tensors are all that is counted, it must be given.

    On CUDA, a valve that saw a step use far less than the threshold takes its hooks away: until
    more is in use it looks only when modules are called (`dozes`).

    It sees what is saved in the thread that enters it; backwards may run in any. What forwards in
    other threads save stays on the device, and a warning says so once where the valve notices it:
    while it has no hooks, and before a first tensor is saved in its own thread.

    A model compiled as a whole saves everything at once, when its forward is over, and its backward
    wants all of it: nothing of it can move. Compile its blocks.

    What torch.func.grad, vjp, jacrev and hessian save inside themselves stays on the device, for
    they forbid hooks.

    Host memory is pinned when it is first needed and given back on leaving: where memory is short
    in every step, enter once around the loop.
    """
    _check_share("threshold", threshold, 1.0)
    if release_at is None:
        release_at = max(0.0, threshold - _GAP)
    _check_share("release_at", release_at, threshold)
    settings = Settings(
        threshold=float(threshold),
        release_at=float(release_at),
        capacity=None if capacity is None else _positive("capacity", capacity),
        host_budget=None if host_budget is None else _positive("host_budget", host_budget),
        min_tensor_bytes=max(1, _not_negative("min_tensor_bytes", min_tensor_bytes)),
        device=None if device is None else _device(device),
    )
    on_cpu = settings.device.type == "cpu" if settings.device else not torch.cuda.is_available()
    if on_cpu and capacity is None and threshold > 0:
        raise no_capacity("cpu")
    return Valve(settings)


def _check_share(name: str, value: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:
        raise UsageError(
            f"{name} is {value!r}, not a share of the capacity between 0 and {most:g}",
            hint="memfit.pressure(threshold=0.8) acts when 80 % of the memory is in use",
        )


def _positive(name: str, value: int | str) -> int:
    size = parse_bytes(value)
    if size <= 0:
        raise UsageError(
            f"{name} is {value!r}, which is not above zero", hint=f'{name}="1GiB" for example'
        )
    return size


def _not_negative(name: str, value: int | str) -> int:
    size = parse_bytes(value)
    if size < 0:
        raise UsageError(
            f"{name} is {value!r}, below 0",
            hint=f"{name}=0 moves tensors of any size, the usual 1 MiB leaves out what is small",
        )
    return size


def _device(value: torch.device | str) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{value!r} names no device", hint='device="cuda" for example') from error
    if device.type not in ("cuda", "cpu"):
        raise UsageError(
            f"memory of devices of type {device.type!r} cannot be swapped",
            hint="the valve works on cuda; on the cpu it copies within the host",
        )
    if device.type == "cuda":
        _check_cuda(device)
        return device
    return torch.device("cpu")  # there is one, and its tensors know no index


def _check_cuda(device: torch.device) -> None:
    """Refuse a GPU that is not there: no tensor would ever be saved on it."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found <= (device.index or 0):
        there = {0: "is no CUDA device", 1: "is one CUDA device"}
        raise UsageError(
            f"device is {str(device)!r}, and there "
            f"{there.get(found, f'are {found} CUDA devices')} here",
            hint="leave device out to take that of the first large saved tensor"
            + ("" if found else ', or give device="cpu" and a capacity'),
        )
