"""By which executor a step is run; on CUDA compiled, unless the host cannot keep up with that.

Compiled convolutions launch more kernels than cuDNN's layers, and every compiled segment costs the
host some more: for a ResNet-50 of 64 images on an H200 36 ms a step, where the layers by themselves
take 20 ms and the kernels 20 to 25. Launched as CUDA graphs they cost the host nothing; a step that
cannot be is better run by its layers then. On a smaller GPU the host is far ahead of its device.
"""

from __future__ import annotations

from functools import partial

from memfit.measure.step import drop_gradients, is_out_of_memory, run_step
from memfit.measure.timing import host_and_step_seconds
from memfit.runtime.layout import channels_last, has_mostly_convolutions
from memfit.runtime.random_state import RandomState
from memfit.workload import Workload

COMPILED_HOST = 1.8  # times the host's seconds of the layers by themselves
LAUNCH_BOUND = 0.9  # of the step that its host is busy


def usual_executor(workload: Workload, *, convolutions: bool, cuda_graphs: bool) -> str:
    """The executor for a step on CUDA, most of which are `convolutions` or not.

    With `cuda_graphs` it may be launched as such, unless it draws random numbers.
    """
    if not convolutions:
        return "inductor"
    before = RandomState.of([workload.device])
    layers_are_quicker = is_launch_bound(workload)
    draws = not before.same_as(RandomState.of([workload.device]))
    return "module" if layers_are_quicker and (draws or not cuda_graphs) else "inductor"


def surely_compiled(workload: Workload, executor: str | None) -> bool:
    """Whether a step will be compiled for a GPU, as far as that is known before it ran."""
    if workload.device.type != "cuda":
        return False
    usual = executor is None and not has_mostly_convolutions(workload.model)
    return usual or executor == "inductor"


def is_launch_bound(workload: Workload) -> bool:
    """Whether compiled segments would have the device wait for the host; not where the plain step
    does not fit, on a device so small."""
    try:
        with channels_last(workload.model, True):
            host_s, step_s = host_and_step_seconds(partial(run_step, workload), workload.device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        drop_gradients(workload)
        return False
    return COMPILED_HOST * host_s > step_s
