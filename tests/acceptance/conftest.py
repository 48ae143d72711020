"""Seven workloads small enough for a CPU, each profiled once for all the tests that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.ir.profile import Profile
from memfit.targets import resolve_target
from memfit.workload import Workload

_TEXT = {"batch": 8, "seq": 64}
_WIDE = {
    "hidden_size": "128",
    "intermediate_size": "512",
    "num_hidden_layers": "6",
    "num_attention_heads": "4",
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "encoder": {
        "batch": 16,
        "seq": 64,
        "overrides": {"n_embd": "128", "n_head": "4", "n_ff": "512", "vocab_size": "1000"},
    },
    "transformers:gpt2": {
        **_TEXT,
        "overrides": {"n_layer": "6", "n_embd": "128", "n_head": "4", "vocab_size": "1000"},
    },
    "transformers:llama-160m": {
        **_TEXT,
        "overrides": {**_WIDE, "num_key_value_heads": "4", "vocab_size": "1000"},
    },
    "transformers:vit-base": {
        "batch": 16,
        "overrides": {**_WIDE, "image_size": "128", "num_labels": "100"},
    },
    "transformers:resnet-50": {
        "batch": 16,
        "overrides": {
            "image_size": "96",
            "embedding_size": "32",
            "hidden_sizes": "[64,128,256,512]",
            "num_labels": "100",
        },
    },
    "transformers:bert-base": {**_TEXT, "overrides": {**_WIDE, "vocab_size": "1000"}},
    "transformers:t5-small": {
        **_TEXT,
        "overrides": {
            "d_model": "128",
            "d_ff": "512",
            "d_kv": "32",
            "num_heads": "4",
            "num_layers": "4",
            "num_decoder_layers": "4",
            "vocab_size": "1000",
        },
    },
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The operators are too small to be shared between cores, and their times would jump."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Profiled:
    """A workload with the profile of its step."""

    target: str
    workload: Workload
    profile: Profile

    @property
    def peak_bytes(self) -> int:
        """The measured peak of the unplanned step."""
        assert self.profile.baseline is not None
        return self.profile.baseline.peak_bytes

    def budget(self, share: float) -> int:
        """Static bytes and this share of what the unplanned step needs above them."""
        static = self.profile.graph.fixed_bytes
        return int(static + share * (self.peak_bytes - static))


@cache
def _profiled(target: str, executor: str | None) -> Profiled:
    workload = _build(target)
    return Profiled(target, workload, memfit.profile(workload, executor=executor))


def _build(target: str) -> Workload:
    torch.manual_seed(0)
    return resolve_target(target, **WORKLOADS[target])


@pytest.fixture(scope="session")
def build_workload() -> Callable[[str], Workload]:
    """The workload of a target, the same every time."""
    return _build


@pytest.fixture(scope="session")
def profile_of() -> Callable[[str], Profile]:
    """The profile of a target by the CPU's usual executor."""
    return lambda target: _profiled(target, None).profile


@pytest.fixture(scope="session")
def every_profile() -> Iterator[Profiled]:
    """All the workloads with their profiles, one after the other."""
    return (_profiled(target, None) for target in WORKLOADS)


@pytest.fixture(scope="session")
def profiled_of() -> Callable[[str], Profiled]:
    """A workload with its profile by the CPU's usual executor."""
    return lambda target: _profiled(target, None)


@pytest.fixture(scope="module", params=list(WORKLOADS))
def profiled(request: pytest.FixtureRequest) -> Profiled:
    """Each workload with its profile by the CPU's usual executor."""
    return _profiled(request.param, None)


@pytest.fixture(
    scope="module", params=["encoder", "transformers:resnet-50", "transformers:t5-small"]
)
def profiled_by_module(request: pytest.FixtureRequest) -> Profiled:
    """Some of the workloads with their profiles by executor `module`."""
    return _profiled(request.param, "module")


class Residual(nn.Module):
    """A residual block that works in place wherever it can."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out.add_(x))


class InplaceResNet(nn.Module):
    """A ResNet in small with batch-norm and in-place ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(*(Residual(16) for _ in range(6)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


@pytest.fixture(scope="session")
def inplace_resnet() -> Callable[[], Workload]:
    """The workload of an InplaceResNet, the same every time."""

    def build() -> Workload:
        torch.manual_seed(0)
        model = InplaceResNet()
        batch = (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Workload(
            model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), optimizer, batch
        )

    return build
