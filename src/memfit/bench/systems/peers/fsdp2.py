"""FSDP2 with CPUOffloadPolicy on one rank: parameters, gradients and optimizer on the host."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils._pytree import tree_leaves

from memfit.bench.systems.peers.group_of_one import join_a_group_of_one
from memfit.bench.systems.peers.rebuilt import (
    group_names,
    only_known,
    optimizer_options,
    refuse_other_gpus,
    refuse_scaler,
    step_of,
    with_parameters,
)
from memfit.bench.systems.prepared import Prepared, Setting, block_names
from memfit.workload import Workload


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """Every block a unit of its own, the rest of the model another; a group of one process."""
    workload = setting.workload
    refuse_scaler(workload, family)
    refuse_other_gpus(workload.device, family)
    device = workload.device
    groups, options = group_names(workload), optimizer_options(workload.optimizer)
    kind = type(workload.optimizer)
    names = block_names(workload)
    model = workload.model
    join_a_group_of_one(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    modules = dict(model.named_modules())
    for name in names:
        fully_shard(modules[name], mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = kind(only_known(with_parameters(groups, model), options), **options)
    workload.optimizer.param_groups.clear()  # it would keep the whole parameters alive
    return Prepared(
        step_of(workload, model, optimizer), lambda: _static(workload, model, optimizer)
    )


def _static(workload: Workload, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that lie in host memory between steps; on CUDA the allocator itself is asked."""
    state = [leaf for s in optimizer.state.values() for leaf in tree_leaves(s)]
    tensors = [*model.parameters(), *model.buffers(), *workload.batch_tensors(), *state]
    seen: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
