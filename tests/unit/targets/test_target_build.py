"""The steps targets share: imports, errors of constructors, optimizers, autocast."""

import sys
from typing import Any

import pytest
import torch

from memfit.errors import DeviceMemoryError, ModelError, UsageError
from memfit.targets import resolve_target
from memfit.targets.build import assemble, building, import_from, with_autocast
from memfit.targets.options import check_options

TINY = {"n_layer": "1", "n_embd": "16", "n_head": "2", "n_ff": "32", "vocab_size": "50"}


@pytest.mark.parametrize(
    ("target", "package"),
    [
        ("torchvision:resnet18", "torchvision"),
        ("timm:resnet18", "timm"),
        ("transformers:gpt2", "transformers"),
    ],
)
def test_missing_package_names_the_extra(
    target: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"package {package}, which is not installed") as caught:
        resolve_target(target)
    assert caught.value.hint == "pip install 'memfit[zoo]'"


@pytest.mark.parametrize("kind", [ImportError, RuntimeError, AttributeError, OSError])
def test_broken_package_names_the_extra(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise kind("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(UsageError, match=rf"cannot be used.*{kind.__name__}: operator") as caught:
        import_from("torchvision")
    assert isinstance(caught.value.__cause__, kind)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_model_that_finds_no_room_is_a_memory_error(error: Exception) -> None:
    with pytest.raises(DeviceMemoryError, match="big does not fit"), building("big", {}):
        raise error


def test_constructor_error_blames_overrides_or_the_model() -> None:
    with pytest.raises(UsageError, match="m cannot be built with a=1: ValueError: no"):
        with building("m", {"a": "1"}):
            raise ValueError("no")
    with pytest.raises(ModelError, match="m cannot be built: ValueError: no"), building("m", {}):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        ("adam", torch.optim.Adam, {"lr": 1e-4, "foreach": None}),
        ("adamw", torch.optim.AdamW, {"lr": 1e-4, "foreach": None}),
    ],
)
def test_optimizers(name: str, kind: type, settings: dict[str, Any]) -> None:
    workload = resolve_target("encoder", batch=1, seq=2, optimizer=name, overrides=TINY)
    assert type(workload.optimizer) is kind
    assert settings.items() <= workload.optimizer.param_groups[0].items()


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_runs_the_loss_in_the_dtype_with_fp32_parameters(
    dtype: str, expected: torch.dtype
) -> None:
    workload = resolve_target("encoder", batch=2, seq=4, dtype=dtype, overrides=TINY)
    seen = []
    workload.model.head.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    workload.compute_loss().backward()
    assert seen == [expected]
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}
    assert all(p.grad is not None for p in workload.model.parameters())
    assert workload.scaler is None


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_fp16_on_cuda_has_a_gradient_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    nothing = dict.fromkeys(("batch", "seq", "optimizer", "overrides"))
    options = check_options(dtype="fp16", device="cuda", seed=0, **nothing)
    monkeypatch.undo()
    model = torch.nn.Linear(2, 1)
    workload = assemble("t", model, lambda m, x: m(x).sum(), None, options, default_optimizer="sgd")
    assert isinstance(workload.scaler, torch.amp.GradScaler)


def test_operation_without_fp16_kernel_is_a_model_error() -> None:
    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("\"some_op\" not implemented for 'Half'")

    with pytest.raises(ModelError, match="no fp16 kernel on cpu") as caught:
        with_autocast(loss, torch.device("cpu"), "fp16")(torch.nn.Identity(), None)
    assert caught.value.hint == "use --dtype bf16"
