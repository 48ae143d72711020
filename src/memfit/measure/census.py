"""What is live on a device, as far as Python can see it: told when a loop ends in an error."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from memfit.measure.memory import storages_of
from memfit.units import format_bytes

MOST = 3  # of the largest are named; tensors of one shape and kind count together


def failure_notes(
    error: BaseException, step: int, phase: str, device: torch.device, used_bytes: int
) -> list[str]:
    """How far a loop came and what was live, in words; `used_bytes` are all that is in use."""
    first = str(error).strip().splitlines()
    said = f": {first[0]}" if first else ""
    notes = [f"ended in step {step}, {phase}, by {type(error).__name__}{said}"]
    kinds, largest = live_tensors(device)
    if device.type == "cuda":  # of the process's resident bytes most are no tensors
        rest = used_bytes - sum(kinds.values())
        kinds["saved for backward, workspaces"] = max(rest, 0)
    parts = [f"{format_bytes(size)} {kind}" for kind, size in kinds.items() if size]
    unseen = "; gc.freeze() hides others" if gc.get_freeze_count() else ""
    notes.append(f"live then: {', '.join(parts) or 'no tensors'}{unseen}")
    if largest:
        notes.append(f"largest: {', '.join(largest)}")
    return notes


def live_tensors(
    device: torch.device, known: Mapping[str, Sequence[torch.Tensor]] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Bytes of the tensors on a device by kind, every storage once, and the largest in words.

    Tensors that are `known` are counted by their kinds, which may be ones of their own. Others are
    those that the garbage collector knows: what was frozen (`gc.freeze`) has to be known.
    """
    there = [t for t in _tensors() if t.device.type == device.type]
    given = {
        kind: [t for t in tensors if t.device.type == device.type]
        for kind, tensors in (known or {}).items()
    }
    parameters: list[torch.Tensor] = [t for t in there if isinstance(t, torch.nn.Parameter)]
    gradients = [t.grad for t in there if t.is_leaf and t.grad is not None]
    by_kind: dict[str, list[torch.Tensor]] = {
        "parameters": [*given.pop("parameters", []), *parameters],
        "gradients": [*given.pop("gradients", []), *gradients],
        **given,
        "activations": [t for t in there if t.requires_grad and not t.is_leaf],
        "other tensors": there,
    }
    kinds: dict[str, int] = {}
    sizes: Counter[str] = Counter()  # of tensors that read the same
    seen: set[int] = set()
    for kind, tensors in by_kind.items():
        kinds[kind] = 0
        for tensor in tensors:
            fresh = {at: size for at, size in _memory_of(tensor).items() if at not in seen}
            seen.update(fresh)
            size = sum(fresh.values())
            kinds[kind] += size
            dtype = str(tensor.dtype).removeprefix("torch.")
            sizes[f"{dtype}{list(tensor.shape)} ({kind})"] += size
    largest = [f"{format_bytes(size)} {words}" for words, size in sizes.most_common(MOST) if size]
    return kinds, largest


def _memory_of(tensor: torch.Tensor) -> dict[int, int]:
    """Bytes by address; none of a tensor that only stands for others, or hides where it lies."""
    try:
        return {storage.data_ptr(): storage.nbytes() for storage in storages_of(tensor)}
    except RuntimeError:  # inside vmap and the like, and those of mkldnn
        return {}


def _tensors() -> Iterator[torch.Tensor]:
    """Every tensor with memory that Python knows of."""
    plain = (torch.Tensor, torch.nn.Parameter)
    for thing in gc.get_objects():
        if type(thing) not in plain or thing.device.type == "meta":
            continue
        if not (thing.is_sparse or thing.is_nested):
            yield thing
