"""DeepSpeed's engine and torchao's optimizer train as the plain step does.

Where the packages are installed they are the real ones, on a CPU; else something that does as they
do in what the benchmark relies on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from memfit.bench.systems.peers.deepspeed import by_engine
from memfit.bench.systems.peers.deepspeed import prepare as prepare_deepspeed
from memfit.bench.systems.peers.torchao import offloaded
from memfit.bench.systems.peers.torchao import prepare as prepare_torchao
from memfit.bench.systems.prepared import Setting, Unavailable
from memfit.measure.step import run_step
from memfit.targets import resolve_target
from memfit.workload import Workload

SRC = Path(__file__).resolve().parents[3] / "src"
SIZES = {"n_layer": "2", "n_embd": "64", "n_head": "2", "n_ff": "64", "vocab_size": "50"}


def two_groups(dtype: str = "fp32", fused: bool | None = None) -> Workload:
    """Two groups, and gradients of a norm above 1: DeepSpeed would clip them by itself.

    Biases of keys have gradients of noise alone, which Adam makes large: both must be `fused`.
    """
    torch.manual_seed(0)
    overrides = {**SIZES, "dropout": "0"}
    made = resolve_target(
        "encoder", batch=4, seq=16, dtype=dtype, device="cpu", overrides=overrides
    )
    biases = [p for p in made.model.parameters() if p.dim() == 1]
    others = [p for p in made.model.parameters() if p.dim() > 1]
    groups = [{"params": biases, "weight_decay": 0.0, "lr": 0.01}, {"params": others}]
    made.optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5, fused=fused)
    return made


def assert_trains_as_plain(step: Any, workload: Workload, plain: Workload) -> None:
    for _ in range(3):
        run_step(plain)
        step()
    for mine, theirs in zip(workload.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


class Engine:
    """As DeepSpeed's 0.19: what its configuration does not name it switches off, or does itself."""

    made: Engine

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]
    ) -> None:
        self.module, self.optimizer, self.config = model, optimizer, config
        self.clip = config.get("gradient_clipping", 1.0)
        Engine.made = self

    def __call__(self, *inputs: Any) -> Any:
        own = self.config.get("torch_autocast", {"enabled": False, "dtype": "bfloat16"})
        dtype = getattr(torch, own["dtype"])
        with torch.autocast("cpu", dtype=dtype, enabled=own["enabled"]):
            return self.module(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that stands in for DeepSpeed, and no process group: it can be joined once."""
    stub = ModuleType("deepspeed")
    stub.initialize = lambda **given: (Engine(**given), None, None, None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", stub)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(
        "memfit.bench.systems.peers.deepspeed.join_a_group_of_one", lambda device: None
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_clipped_gradients_and_switched_autocast_off(engine: None, dtype: str) -> None:
    """It clips to a norm of 1 and ends an autocast around it, unless its configuration says."""
    made, plain = two_groups(dtype), two_groups(dtype)
    prepared = by_engine(made)
    config = Engine.made.config
    assert config["gradient_clipping"] == 0.0
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    numbers = sum(p.numel() for p in made.model.parameters())
    assert config["zero_optimization"]["reduce_bucket_size"] == numbers, "2 GB for any model"
    asked = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    assert config.get("torch_autocast") == (asked if dtype == "bf16" else None)
    groups = Engine.made.optimizer.param_groups
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.01, 0.0), (0.1, 0.5)]
    assert_trains_as_plain(prepared.step, made, plain)


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from test_offloading_peers import assert_trains_as_plain, by_engine, two_groups
made, plain = two_groups({dtype!r}), two_groups({dtype!r})
assert_trains_as_plain(by_engine(made).step, made, plain)
print("as plain")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_real_deepspeed_trains_as_the_plain_step_does(dtype: str) -> None:
    """In a process of its own: a group can be joined once. DeepSpeed may compile for minutes."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SRC), *filter(None, [env.get("PYTHONPATH")])])
    program = PROGRAM.format(folder=str(Path(__file__).parent), dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().endswith("as plain"), done.stderr


class CPUOffloadOptimizer:
    """As torchao's 0.18: an optimizer for each large parameter on the host, one for the others."""

    def __init__(
        self,
        params: list[dict[str, Any]],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        offload_gradients: bool = False,
        minimal_size: int = 4096,
        **kwargs: Any,
    ) -> None:
        assert offload_gradients
        if "fused" not in kwargs:
            kwargs["fused"] = True
        self.pairs: list[tuple[torch.nn.Parameter, torch.Tensor, torch.optim.Optimizer]] = []
        small = []
        for group in params:
            kept = []
            for parameter in group.pop("params"):
                if parameter.numel() < minimal_size:
                    kept.append(parameter)
                    continue
                host = parameter.detach().clone()
                host.grad = torch.empty_like(host)
                parameter.register_post_accumulate_grad_hook(self._take)
                own = optimizer_class([{"params": host, **group}], **kwargs)
                self.pairs.append((parameter, host, own))
            small.append({"params": kept, **group})
        self.small = optimizer_class(small, **kwargs)
        CPUOffloadOptimizer.made = self

    made: CPUOffloadOptimizer

    def _take(self, parameter: torch.nn.Parameter) -> None:
        (host,) = (h for p, h, _ in self.pairs if p is parameter)
        host.grad.copy_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.small.step()
        for parameter, host, own in self.pairs:
            own.step()
            parameter.copy_(host)

    def zero_grad(self) -> None:
        self.small.zero_grad()


def test_torchao_had_its_fused_step_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that the workload leaves open came as None, and so put torchao's default away."""
    stub = ModuleType("torchao.optim")
    stub.CPUOffloadOptimizer = CPUOffloadOptimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", stub)
    made, plain = two_groups(), two_groups(fused=True)
    prepared = offloaded(made)
    optimizer = CPUOffloadOptimizer.made
    groups = [group for _, _, own in optimizer.pairs for group in own.param_groups]
    assert groups and optimizer.small.param_groups
    assert all(group["fused"] is True for group in groups)
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(0.1, 0.5)}
    assert optimizer.small.param_groups[0]["lr"] == 0.01
    assert_trains_as_plain(prepared.step, made, plain)


@contextmanager
def streams_stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchao asks of a GPU, done by a CPU at once."""
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(
        wait_stream=lambda other: None, record_event=lambda: event, synchronize=lambda: None
    )
    plain = torch.empty_like
    with monkeypatch.context() as patch:
        patch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cuda"])
        patch.setattr(torch.cuda, "Stream", lambda: stream)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "stream", lambda which: nullcontext())
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, which: None)
        patch.setattr(
            torch,
            "empty_like",
            lambda *words, pin_memory=False, **options: plain(*words, **options),
        )
        yield


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_real_torchao_trains_as_the_plain_step_does(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    import torchao.optim  # noqa: F401

    made, plain = two_groups(dtype), two_groups(dtype, fused=True)
    with streams_stood_in(monkeypatch):
        assert_trains_as_plain(offloaded(made).step, made, plain)


@pytest.mark.parametrize("prepare", [prepare_deepspeed, prepare_torchao])
def test_on_a_cpu_there_is_nothing_to_offload_from(prepare: Any) -> None:
    with pytest.raises(Unavailable, match="host memory already"):
        prepare(Setting(two_groups(), 1, print), "peer", "")
