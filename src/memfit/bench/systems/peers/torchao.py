"""torchao's CPUOffloadOptimizer: optimizer state and steps on the host, gradients sent there."""

from __future__ import annotations

from functools import partial
from typing import Any

from memfit.bench.systems.peers.rebuilt import (
    group_names,
    only_known,
    optimizer_options,
    refuse_other_gpus,
    refuse_scaler,
    step_of,
    with_parameters,
)
from memfit.bench.systems.prepared import Prepared, Setting, Unavailable, total_static
from memfit.targets.build import import_from
from memfit.workload import Workload


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The step with the workload's optimizer inside torchao's, offloading gradients."""
    workload = setting.workload
    refuse_scaler(workload, family)
    refuse_other_gpus(workload.device, family)
    if workload.device.type != "cuda":
        raise Unavailable("the step runs in host memory already: nothing to offload it from")
    return offloaded(workload)


def offloaded(workload: Workload) -> Prepared:
    """The same wherever torchao has its streams: tests stand in for them on a CPU."""
    offloading: Any = import_from("torchao.optim", "CPUOffloadOptimizer")[1]
    options = optimizer_options(workload.optimizer)
    if options.get("fused") is None:  # torchao's own choice, its fused step on the host, is faster
        options.pop("fused", None)
    groups = only_known(with_parameters(group_names(workload), workload.model), options)
    optimizer = offloading(groups, type(workload.optimizer), offload_gradients=True, **options)
    workload.optimizer.state.clear()
    step = step_of(workload, workload.model, optimizer)
    return Prepared(step, partial(total_static, workload))
