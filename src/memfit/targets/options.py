"""What every target is asked with: sizes, number format, optimizer and device, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch

from memfit.errors import UsageError

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Options:
    """Checked options of a target; `given` names those the caller set."""

    batch: int | None
    seq: int | None
    dtype: str
    optimizer: str | None
    device: torch.device
    overrides: Mapping[str, str]
    seed: int
    given: frozenset[str]

    def refuse_seq(self, target: str) -> None:
        """Raise if a sequence length was given to a target that has none."""
        if self.seq is not None:
            raise UsageError(
                f"{target} trains on images and has no sequence length, but seq={self.seq}",
                hint="leave out --seq; the image size follows the model",
            )


def check_options(
    *,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    optimizer: str | None,
    device: str | torch.device | None,
    overrides: Mapping[str, str] | None,
    seed: int,
) -> Options:
    """Return the options with defaults filled in, or raise UsageError for one that is wrong."""
    _check_size("batch", batch)
    _check_size("seq", seq)
    if dtype is not None:
        _check_word("dtype", dtype, DTYPES)
    if optimizer is not None:
        _check_word("optimizer", optimizer, OPTIMIZERS)
    asked = {"batch": batch, "seq": seq, "dtype": dtype, "optimizer": optimizer, "device": device}
    options = Options(
        batch=batch,
        seq=seq,
        dtype=dtype or "fp32",
        optimizer=optimizer,
        device=check_device("cpu" if device is None else device),
        overrides=dict(overrides or {}),
        seed=seed,
        given=frozenset(name for name, value in asked.items() if value is not None),
    )
    if options.device.type == "meta" and options.dtype != "fp32":
        raise UsageError(
            f"dtype {options.dtype} needs autocast, which the meta device does not have",
            hint="use --dtype fp32 with --device meta, or --device cpu",
        )
    return options


def check_device(device: str | torch.device) -> torch.device:
    """Return the torch device, or raise UsageError where this machine does not have it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"unknown device {device!r}", hint="devices are cpu, cuda and cuda:N"
        ) from error
    if found.type not in ("cpu", "cuda", "meta"):
        raise UsageError(
            f"memfit does not train on {found.type!r} devices",
            hint="devices are cpu, cuda and cuda:N",
        )
    if found.type == "cuda":
        _check_cuda(found)
    return found


def suggest(word: str, known: Iterable[str], *, printed: Mapping[str, str] | None = None) -> str:
    """Return "did you mean A or B? " for the names near `word`, or "" where none is near.

    `printed` says what to print for a name, where that is not the name itself.
    """
    names = {name.lower(): (printed or {}).get(name, name) for name in known}
    near = dict.fromkeys(names[key] for key in get_close_matches(word.lower(), names))
    return f"did you mean {' or '.join(near)}? " if near else ""


def _check_size(name: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} is {value!r}, not a whole number", hint=f"for example --{name} 8")
    if value <= 0:
        raise UsageError(f"{name} is {value}, but must be at least 1", hint=f"try --{name} 1")


def _check_word(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(
            f"unknown {name} {value!r}",
            hint=f"{suggest(value, known)}known are {', '.join(known)}",
        )


def _check_cuda(device: torch.device) -> None:
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else "torch sees no CUDA device"
        )
        raise UsageError(
            f"device {str(device)!r} was asked for, but {why}",
            hint="use --device cpu; `memfit doctor` shows what torch sees",
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UsageError(
            f"device {str(device)!r} was asked for, but torch sees {count} CUDA device(s)",
            hint=f"the last one is cuda:{count - 1}",
        )
