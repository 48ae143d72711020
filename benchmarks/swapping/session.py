"""Workloads by name, and the latest one with its profile, so that parts can share them."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

import memfit
from memfit.capture.segments import EVERY_LAYER
from memfit.ir.profile import Profile
from memfit.measure.bandwidth import device_copy_bandwidth, host_copy_bandwidth
from memfit.targets import resolve_target
from memfit.workload import Workload

Target = tuple[str, dict[str, Any]]
WORKLOADS: dict[str, Target] = {
    "resnet50@64": ("torchvision:resnet50", {"batch": 64}),
    "resnet152@64": ("torchvision:resnet152", {"batch": 64}),
    "vit_b_16@64": ("torchvision:vit_b_16", {"batch": 64}),
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2-large",
        {"batch": 8, "seq": 1024, "dtype": "bf16"},
    ),
    "llama-1b@1x8192 bf16": (
        "transformers:llama-1b",
        {"batch": 1, "seq": 8192, "dtype": "bf16"},
    ),
    "llama-160m@1x32768 bf16": (
        "transformers:llama-160m",
        {
            "batch": 1,
            "seq": 32768,
            "dtype": "bf16",
            "overrides": {"max_position_embeddings": "32768"},
        },
    ),
    "resnet50@32": ("torchvision:resnet50", {"batch": 32}),
    "encoder@32x256": (
        "encoder",
        {
            "batch": 32,
            "seq": 256,
            "overrides": {
                "n_layer": "8",
                "n_embd": "256",
                "n_head": "4",
                "n_ff": "1024",
                "vocab_size": "2000",
            },
        },
    ),
}
LAYERS = "layers"  # executor `module` with every layer a segment: memory goes tensor by tensor
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
# The same shapes of step in no time, from packages that every machine has.
TINY: dict[str, Target] = {
    "resnet50@64": ("transformers:resnet-50", {"batch": 4, "overrides": _RESNET}),
    "resnet152@64": (
        "transformers:resnet-152",
        {"batch": 4, "overrides": _RESNET | {"depths": "3,2"}},
    ),
    "vit_b_16@64": ("transformers:vit-base", {"batch": 4, "overrides": _VIT}),
    "gpt2-large@8x1024 bf16": (
        "transformers:gpt2",
        {"batch": 2, "seq": 32, "dtype": "bf16", "overrides": _GPT2},
    ),
    "llama-1b@1x8192 bf16": (
        "transformers:llama-160m",
        {"batch": 1, "seq": 64, "dtype": "bf16", "overrides": _LLAMA},
    ),
    "llama-160m@1x32768 bf16": (
        "transformers:llama-160m",
        {
            "batch": 1,
            "seq": 96,
            "dtype": "bf16",
            "overrides": _LLAMA | {"max_position_embeddings": "4096"},
        },
    ),
    "resnet50@32": ("transformers:resnet-50", {"batch": 4, "overrides": _RESNET}),
    "encoder@32x256": ("encoder", {"batch": 4, "seq": 32, "overrides": _ENCODER}),
}


@dataclass(frozen=True)
class Rates:
    """Bytes per second of plain copies from and to pinned memory, measured in this run."""

    to_host: float
    to_device: float


class Session:
    """Where the parts run. Holds one workload and one profile at a time."""

    def __init__(self, device: torch.device, *, tiny: bool, steps: int) -> None:
        self.device, self.tiny, self.steps = device, tiny, steps
        self._workload: tuple[str, Workload] | None = None
        self._profile: tuple[tuple[str, str], Profile] | None = None
        self._rates: Rates | None = None

    @property
    def cuda(self) -> bool:
        """Whether there is a GPU; without one all copies stay within the host."""
        return self.device.type == "cuda"

    def workload(self, name: str) -> Workload:
        """The workload of this name."""
        if self._workload is None or self._workload[0] != name:
            self.forget()
            target, options = (TINY if self.tiny else WORKLOADS)[name]
            self._workload = name, resolve_target(target, device=self.device, **options)
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
        self.tidy()

    def tidy(self) -> None:
        """Give back all memory that is held in reserve, pinned memory too."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            empty_host_cache()


def empty_host_cache() -> None:
    """Unpin the blocks that torch keeps for the next copy; they count as used host memory."""
    for name in ("_host_emptyCache", "_accelerator_emptyHostCache"):  # 2.11 and 2.13
        if hasattr(torch._C, name):
            getattr(torch._C, name)()
            return
