"""Workloads by name, and small ones of the same shapes of step, to try a benchmark out."""

from __future__ import annotations

from typing import Any

import torch

from memfit.bench.workloads import SUITES
from memfit.targets import resolve_target
from memfit.workload import Workload

Target = tuple[str, dict[str, Any]]


def _text(name: str, batch: int, seq: int, **more: Any) -> Target:
    return f"transformers:{name}", {"batch": batch, "seq": seq, "dtype": "bf16", **more}


def _of_suites() -> dict[str, Target]:
    """The workloads of `memfit bench`."""
    found: dict[str, Target] = {}
    for spec in (spec for suite in SUITES.values() for spec in suite.workloads):
        options = {"batch": spec.batch, "seq": spec.seq, "dtype": spec.dtype}
        given = {name: value for name, value in options.items() if value is not None}
        found[spec.name] = (spec.target, given)
    return found


_SMALL_ENCODER = {
    "n_layer": "8",
    "n_embd": "256",
    "n_head": "4",
    "n_ff": "1024",
    "vocab_size": "2000",
}
WORKLOADS: dict[str, Target] = _of_suites() | {
    "resnet50@16": ("torchvision:resnet50", {"batch": 16}),
    "resnet50@32": ("torchvision:resnet50", {"batch": 32}),
    "resnet50@64": ("torchvision:resnet50", {"batch": 64}),
    "resnet152@64": ("torchvision:resnet152", {"batch": 64}),
    "vit_b_16@16": ("torchvision:vit_b_16", {"batch": 16}),
    "vit_b_16@64": ("torchvision:vit_b_16", {"batch": 64}),
    "encoder@64x128": ("encoder", {"batch": 64, "seq": 128}),
    "encoder@256x128": ("encoder", {"batch": 256, "seq": 128}),
    "encoder@32x256": ("encoder", {"batch": 32, "seq": 256, "overrides": _SMALL_ENCODER}),
    "encoder@8x64, 4 layers": (
        "encoder",
        {
            "batch": 8,
            "seq": 64,
            "overrides": {"n_layer": "4", "n_embd": "256", "vocab_size": "2000"},
        },
    ),
    "gpt2@2x128 bf16": _text("gpt2", 2, 128),
    "gpt2@2x512 bf16": _text("gpt2", 2, 512),
    "resnet50@8": ("torchvision:resnet50", {"batch": 8}),
    "vit_b_16@4": ("torchvision:vit_b_16", {"batch": 4}),
    "gpt2@4x64": ("transformers:gpt2", {"batch": 4, "seq": 64}),
    "gpt2@4x64, 4 layers": (
        "transformers:gpt2",
        {
            "batch": 4,
            "seq": 64,
            "overrides": {"n_layer": "4", "n_embd": "128", "n_head": "4", "vocab_size": "2000"},
        },
    ),
    "gpt2@8x1024 bf16": _text("gpt2", 8, 1024),
    "gpt2-large@8x1024 bf16": _text("gpt2-large", 8, 1024),
    "gpt2-xl@4x1024 bf16": _text("gpt2-xl", 4, 1024),
    "llama-1b@2x2048 bf16": _text("llama-1b", 2, 2048),
    "llama-1b@1x8192 bf16": _text("llama-1b", 1, 8192),
    "llama-160m@1x32768 bf16": _text(
        "llama-160m", 1, 32768, overrides={"max_position_embeddings": "32768"}
    ),
}
_RESNET = {
    "embedding_size": "8",
    "hidden_sizes": "8,16",
    "depths": "2,2",
    "image_size": "48",
    "num_labels": "10",
    "layer_type": "basic",
}
_VIT = {
    "hidden_size": "32",
    "num_hidden_layers": "2",
    "num_attention_heads": "2",
    "intermediate_size": "64",
    "image_size": "48",
    "num_labels": "10",
}
_GPT2 = {"n_layer": "2", "n_embd": "32", "n_head": "2", "vocab_size": "100"}
_LLAMA = {
    "num_hidden_layers": "2",
    "hidden_size": "32",
    "intermediate_size": "64",
    "num_attention_heads": "4",
    "num_key_value_heads": "4",
    "vocab_size": "100",
}
_ENCODER = {"n_layer": "2", "n_embd": "32", "n_head": "2", "n_ff": "64", "vocab_size": "100"}
# By what a workload's name begins with; of packages that every machine has.
_TINY: dict[str, Target] = {
    "resnet50": ("transformers:resnet-50", {"batch": 4, "overrides": _RESNET}),
    "resnet152": (
        "transformers:resnet-152",
        {"batch": 4, "overrides": _RESNET | {"depths": "3,2"}},
    ),
    "vit": ("transformers:vit-base", {"batch": 4, "overrides": _VIT}),
    "encoder": ("encoder", {"batch": 4, "seq": 32, "overrides": _ENCODER}),
    "gpt2": _text("gpt2", 4, 64, overrides=_GPT2),
    "llama-1b": _text("llama-160m", 1, 64, overrides=_LLAMA),
    "llama-160m": _text(
        "llama-160m", 1, 96, overrides=_LLAMA | {"max_position_embeddings": "4096"}
    ),
}


def target_of(name: str, *, tiny: bool = False) -> Target:
    """The target and its options; if `tiny`, of a model of the same kind with a few layers."""
    if not tiny:
        return WORKLOADS[name]
    return next(target for prefix, target in _TINY.items() if name.startswith(prefix))


def device_here() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def build(name: str, *, tiny: bool = False) -> Workload:
    """The workload of this name, on the GPU where there is one."""
    target, options = target_of(name, tiny=tiny)
    return resolve_target(target, device=device_here(), **options)


def freeze_lower_half(workload: Workload) -> None:
    """Train only the upper half of the model's blocks, and what is in no block."""
    lists = [m for m in workload.model.modules() if isinstance(m, torch.nn.ModuleList)]
    blocks = max(lists, key=len)
    for block in blocks[: len(blocks) // 2]:
        block.requires_grad_(False)
    for group in workload.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
