"""DeepSpeed ZeRO stage 2 on one rank with the optimizer on the CPU (ZeRO-Offload)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from memfit.bench.systems.peers.rebuilt import (
    group_names,
    only_known,
    optimizer_options,
    refuse_other_gpus,
    refuse_scaler,
    with_parameters,
)
from memfit.bench.systems.prepared import Prepared, Setting, Unavailable, total_static
from memfit.runtime.split import samples_in
from memfit.targets.build import import_from


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The step by a DeepSpeed engine around the model and an optimizer like the workload's."""
    workload = setting.workload
    refuse_scaler(workload, family)
    refuse_other_gpus(workload.device, family)
    if workload.device.type != "cuda":
        raise Unavailable("the step runs in host memory already: nothing to offload it from")
    initialize: Any = import_from("deepspeed", "initialize")[1]
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }.items():
        os.environ.setdefault(name, value)
    options = optimizer_options(workload.optimizer)
    groups = only_known(with_parameters(group_names(workload), workload.model), options)
    engine: Any = initialize(
        model=workload.model,
        optimizer=type(workload.optimizer)(groups, **options),
        config={
            "train_micro_batch_size_per_gpu": samples_in(workload.batch),
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )[0]

    def step() -> None:
        engine.backward(workload.loss_fn(engine, workload.batch))
        engine.step()

    return Prepared(step, partial(total_static, workload))
