"""DeepSpeed ZeRO stage 2 on one rank with the optimizer on the CPU (ZeRO-Offload)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from memfit.bench.systems.peers.group_of_one import join_a_group_of_one
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
from memfit.workload import Workload

BUCKET = 500_000_000  # gradients, DeepSpeed's own choice


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The step by a DeepSpeed engine around the model and an optimizer like the workload's."""
    workload = setting.workload
    refuse_scaler(workload, family)
    refuse_other_gpus(workload.device, family)
    if workload.device.type != "cuda":
        raise Unavailable("the step runs in host memory already: nothing to offload it from")
    return by_engine(workload)


def by_engine(workload: Workload) -> Prepared:
    """The same on any device: tests train on a CPU."""
    initialize: Any = import_from("deepspeed", "initialize")[1]
    # It looks for MPI where these are not there, and does not where they are.
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    join_a_group_of_one(workload.device)
    options = optimizer_options(workload.optimizer)
    groups = only_known(with_parameters(group_names(workload), workload.model), options)
    engine: Any = initialize(
        model=workload.model,
        optimizer=type(workload.optimizer)(groups, **options),
        config=_config(workload),
    )[0]

    def step() -> None:
        engine.backward(workload.loss_fn(engine, workload.batch))
        engine.step()

    return Prepared(step, partial(total_static, workload))


def _config(workload: Workload) -> dict[str, Any]:
    pinned = workload.device.type == "cuda"
    numbers = sum(p.numel() for p in workload.model.parameters() if p.requires_grad)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples_in(workload.batch),
        "zero_optimization": {
            "stage": 2,
            # A bucket is taken whole: one larger than the model would be its peak.
            "reduce_bucket_size": min(numbers, BUCKET),
            "offload_optimizer": {"device": "cpu", "pin_memory": pinned},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # it clips to a norm of 1 unless told otherwise
    }
    dtype = _autocast_dtype(workload)
    if dtype is not None:
        # The engine switches off an autocast around it that its own settings do not name. Without
        # modules whose gradients go in few bits: those would take a bucket of their own.
        name = str(dtype).removeprefix("torch.")
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": name,
            "lower_precision_safe_modules": [],
        }
    return config


class _Called(Exception):
    """The model was called."""


def _autocast_dtype(workload: Workload) -> torch.dtype | None:
    """The dtype of the autocast in which the loss calls the model; None where there is none."""
    found: list[torch.dtype] = []
    kind = workload.device.type

    def look(*_: Any) -> None:
        if torch.is_autocast_enabled(kind):
            found.append(torch.get_autocast_dtype(kind))
        raise _Called  # nothing has run yet: no buffer and no random number has changed

    handle = workload.model.register_forward_pre_hook(look, prepend=True)
    try:
        workload.loss_fn(workload.model, workload.batch)
    except _Called:
        pass
    finally:
        handle.remove()
    return found[0] if found else None
