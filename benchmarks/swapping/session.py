"""The latest workload with its profile, so that parts can share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import tidy
from workloads import build, device_here

import memfit
from memfit.capture.segments import EVERY_LAYER
from memfit.ir.profile import Profile
from memfit.measure.bandwidth import device_copy_bandwidth, host_copy_bandwidth
from memfit.workload import Workload

LAYERS = "layers"  # executor `module` with every layer a segment: memory goes tensor by tensor


@dataclass(frozen=True)
class Rates:
    """Bytes per second of plain copies from and to pinned memory, measured in this run."""

    to_host: float
    to_device: float


class Session:
    """Where the parts run. Holds one workload and one profile at a time."""

    def __init__(self, *, tiny: bool, steps: int) -> None:
        self.device, self.tiny, self.steps = device_here(), tiny, steps
        self._whole = True  # nothing failed half-way
        self._workload: tuple[str, Workload] | None = None
        self._profile: tuple[tuple[str, str], Profile] | None = None
        self._rates: Rates | None = None

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU; without one all copies stay within the host."""
        return self.device.type == "cuda"

    def running(self, run: Callable[..., dict[str, Any]], *args: Any) -> Callable[[], Any]:
        """A part to run here later; after one that failed it begins with nothing of it."""

        def work() -> dict[str, Any]:
            if not self._whole:
                self.forget()
            self._whole = False
            row = run(self, *args)
            self._whole = True
            return row

        return work

    def workload(self, name: str) -> Workload:
        """The workload of this name."""
        if self._workload is None or self._workload[0] != name:
            self.forget()
            self._workload = name, build(name, tiny=self.tiny)
        return self._workload[1]

    def profile(self, name: str, executor: str) -> Profile:
        """Its profile by this executor."""
        workload = self.workload(name)
        if self._profile is None or self._profile[0] != (name, executor):
            options: dict[str, Any] = {"executor": executor}
            if executor == LAYERS:
                options = {"executor": "module", "segments": [EVERY_LAYER]}
            self._profile = (name, executor), memfit.profile(workload, **options)
        return self._profile[1]

    def learned(self, name: str, executor: str, profile: Profile) -> None:
        """Keep a profile that knows more."""
        self._profile = (name, executor), profile

    def rates(self) -> Rates:
        """The copy rates of this machine, measured once a run."""
        if self._rates is None:
            if self.cuda:
                copied = device_copy_bandwidth(self.device)
                self._rates = Rates(copied.pinned_to_host, copied.pinned_to_device)
            else:
                rate = host_copy_bandwidth(2**24, 3)
                self._rates = Rates(rate, rate)
        return self._rates

    def forget(self) -> None:
        """Let go of the workload and its profile."""
        self._workload = self._profile = None
        tidy()
