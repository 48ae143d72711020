"""By which executor a step is run; on CUDA compiled, unless the host cannot keep up with that.

Compiled convolutions launch more kernels than cuDNN's layers, and every compiled segment costs the
host some more: for a ResNet-50 of 64 images on an H200 36 ms a step, where the layers by themselves
take 20 ms and the device works for 25. On a smaller GPU the same host is far ahead of its device.
"""

from __future__ import annotations

import statistics
import time

from memfit.measure.step import drop_gradients, is_out_of_memory, run_step
from memfit.measure.timing import Clock
from memfit.runtime.layout import channels_last
from memfit.workload import Workload

COMPILED_HOST = 1.8  # times the host's seconds of the layers by themselves
_WARMUP, _ROUNDS = 3, 5


def usual_executor(workload: Workload, *, convolutions: bool) -> str:
    """The executor for a step on CUDA, most of which are `convolutions` or not."""
    return "module" if convolutions and is_launch_bound(workload) else "inductor"


def is_launch_bound(workload: Workload) -> bool:
    """Whether compiled segments would have the device wait for the host; not where the plain step
    does not fit, on a device so small."""
    clock = Clock(workload.device)
    host_s, step_s = [], []
    try:
        with channels_last(workload.model, True):
            for _ in range(_WARMUP + _ROUNDS):
                clock.settle()
                start = time.perf_counter()
                run_step(workload)
                host_s.append(time.perf_counter() - start)
                clock.settle()
                step_s.append(time.perf_counter() - start)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        drop_gradients(workload)
        return False
    host, step = (statistics.median(seconds[_WARMUP:]) for seconds in (host_s, step_s))
    return COMPILED_HOST * host > step
