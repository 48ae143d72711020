"""Names -> workloads: built-ins, model zoos and the user's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from memfit.errors import UsageError
from memfit.targets.architectures import ARCHITECTURES
from memfit.targets.encoder import build_encoder
from memfit.targets.huggingface import build_transformers
from memfit.targets.options import Options, check_options, suggest
from memfit.targets.user_file import build_from_file, is_file_target
from memfit.targets.vision import build_timm, build_torchvision
from memfit.workload import Workload

__all__ = ["is_file_target", "resolve_target", "target_names"]

_ZOOS: dict[str, Callable[[str, Options], Workload]] = {
    "torchvision": build_torchvision,
    "timm": build_timm,
    "transformers": build_transformers,
}
_FORMS = (
    "encoder, torchvision:NAME, timm:NAME, transformers:NAME "
    f"({', '.join(ARCHITECTURES)}) or path/to/file.py:function"
)


def target_names() -> list[str]:
    """Return the names that need no zoo of their own to be listed: the built-in and the table."""
    return ["encoder", *(f"transformers:{name}" for name in ARCHITECTURES)]


def resolve_target(
    target: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    device: str | torch.device | None = None,
    overrides: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Workload:
    """Return the workload that `target` names, the same one for the same arguments.

    None means "not given": built-in targets then use fp32 on the CPU, a file's function its own
    defaults. `overrides` are fields of the model's configuration as text, {"n_layer": "4"}.
    """
    options = check_options(
        batch=batch,
        seq=seq,
        dtype=dtype,
        optimizer=optimizer,
        device=device,
        overrides=overrides,
        seed=seed,
    )
    if is_file_target(target):
        return build_from_file(target, options)
    if target == "encoder":
        return build_encoder(options)
    zoo, separator, name = target.partition(":")
    if separator and zoo in _ZOOS:
        return _ZOOS[zoo](name, options)
    raise _unknown_target(target)


def _unknown_target(target: str) -> UsageError:
    # "gpt2" alone is the commonest slip, so the names behind the colon count too.
    printed = {name.rpartition(":")[2]: name for name in target_names()}
    printed |= {f"{zoo}:": f"{zoo}:NAME" for zoo in _ZOOS}
    return UsageError(
        f"unknown target {target!r}",
        hint=f"{suggest(target, [*target_names(), *printed], printed=printed)}targets are {_FORMS}",
    )
