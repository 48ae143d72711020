"""The steps all built-in targets share: import, seed, build, cast, assemble."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import DeviceMemoryError, MemfitError, ModelError, UsageError
from memfit.targets.options import DTYPES, Options
from memfit.workload import LossFn, Workload

_BROKEN_INSTALL = (ImportError, RuntimeError, AttributeError, OSError)
_ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def import_from(package: str, *names: str) -> list[Any]:
    """Return the package, then `names` in it; a missing or broken install is a UsageError."""
    try:
        module = importlib.import_module(package)
        return [module, *(getattr(module, name) for name in names)]
    except _BROKEN_INSTALL as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            message = f"this target needs the package {package}, which is not installed"
        else:
            message = (
                f"this target needs the package {package}, which is installed but cannot be used "
                f"with torch {torch.__version__}: {describe(error)}"
            )
        raise UsageError(message, hint="pip install 'memfit[zoo]'") from error


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed` inside, and give the caller's random state back afterwards.

    Seeds only the CPU and `device`: torch.manual_seed would reach other devices as well.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def building(target: str, overrides: Mapping[str, object]) -> Iterator[None]:
    """Turn what a model's constructor raises into an error that names the target."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        raise_if_out_of_memory(target, error)
        if overrides:
            fields = ", ".join(f"{name}={value}" for name, value in overrides.items())
            raise UsageError(
                f"{target} cannot be built with {fields}: {describe(error)}",
                hint="change or leave out these --set fields",
            ) from error
        raise ModelError(
            f"{target} cannot be built: {describe(error)}",
            hint="`memfit doctor` shows the installed versions; try another release of the package",
        ) from error


def raise_if_out_of_memory(target: str, error: BaseException) -> None:
    """Raise DeviceMemoryError if `error` says that the model itself found no room."""
    refused = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
    if refused:
        raise DeviceMemoryError(
            f"{target} does not fit on its device before any step is run: {describe(error)}",
            hint="choose a smaller model or another --device",
        ) from error


def describe(error: BaseException) -> str:
    """Return "Type: message" on as many lines as the message has."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def assemble(
    target: str,
    model: torch.nn.Module,
    loss_fn: LossFn,
    batch: Any,
    options: Options,
    *,
    default_optimizer: str,
) -> Workload:
    """Return the workload: the model in train mode, its optimizer, its loss in the asked dtype."""
    model.train()
    fp16_on_cuda = options.dtype == "fp16" and options.device.type == "cuda"
    return Workload(
        model,
        with_autocast(loss_fn, options.device, options.dtype),
        _optimizer(options.optimizer or default_optimizer, list(model.parameters())),
        batch,
        name=target,
        scaler=torch.amp.GradScaler("cuda") if fp16_on_cuda else None,
    )


def _optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    fused = parameters[0].is_cuda or None  # it takes no copies of all parameters there
    return _ADAMS[name](parameters, lr=1e-4, fused=fused)


def with_autocast(loss_fn: LossFn, device: torch.device, dtype: str) -> LossFn:
    """Return `loss_fn` run under autocast; parameters stay fp32. fp32 is `loss_fn` itself."""
    if dtype == "fp32":
        return loss_fn

    def autocast_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        try:
            with torch.autocast(device.type, dtype=DTYPES[dtype]):
                return loss_fn(model, batch)
        except RuntimeError as error:
            if "not implemented for 'Half'" in str(error):
                raise ModelError(
                    f"an operation of this model has no fp16 kernel on {device.type}: {error}",
                    hint="use --dtype bf16",
                ) from error
            raise

    return autocast_loss
