"""torch.compile with its activation offloading, which moves the tensors that somebody marks.

torch marks none by itself: here every forward tensor from 1 MiB on is marked, in a pass over the
joint graph, and torch moves those of them that it saves. Private flags of torch, used here alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from memfit.bench.systems.peers.compiled import compiled_whole
from memfit.bench.systems.prepared import Prepared, Setting, Unavailable
from memfit.workload import Workload

SMALLEST_BYTES = 2**20
FLAG = "enable_activation_offloading"
ASYNC = (
    "activation_offload_separate_stream",
    "activation_offload_sink_wait",
    "activation_reload_prefetch",
)


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The model compiled whole with the flags on; "async": on a stream of its own, prefetched."""
    if setting.workload.device.type != "cuda":
        raise Unavailable("the step runs in host memory already: nothing to offload it from")
    return compiled_with_flags(setting.workload, argument)


def compiled_with_flags(workload: Workload, argument: str) -> Prepared:
    """The model compiled whole with the flags on."""
    wanted = {FLAG: True} | ({name: True for name in ASYNC} if argument == "async" else {})
    missing = [name for name in wanted if not hasattr(functorch_config, name)]
    if missing:
        raise Unavailable(f"torch {torch.__version__} has no {missing[0]}")

    @contextmanager
    def flags() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(functorch_config.patch(wanted))
            stack.enter_context(inductor_config.patch(joint_custom_post_pass=MarkLargeTensors()))
            yield

    return compiled_whole(workload, flags)


class MarkLargeTensors(CustomGraphPass):
    """Marks what may be offloaded: results of the joint graph that are large enough."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Mark the nodes of a joint graph."""
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor):
                if value.numel() * value.element_size() >= SMALLEST_BYTES:
                    node.meta["should_offload"] = True

    def uuid(self) -> Any:
        """What compiled code is cached by."""
        return f"memfit marks tensors from {SMALLEST_BYTES} bytes on"
