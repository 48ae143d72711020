"""torch.utils.checkpoint on the model's blocks, eager or compiled."""

from __future__ import annotations

from memfit.bench.systems.peers.compiled import checkpointed, compiled_blocks, replaced
from memfit.bench.systems.prepared import Prepared, Setting, around, block_names


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """Every block checkpointed, or the first half of them."""
    workload = setting.workload
    names = block_names(workload)
    if family == "checkpoint-compiled":
        return compiled_blocks(workload, names, None, again=True)
    chosen = names[: len(names) // 2] if argument == "half" else names
    return around(workload, lambda: replaced(workload.model, chosen, checkpointed))
