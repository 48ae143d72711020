"""Hooks for saved tensors that are in force, seen without those of a safety valve.

A valve sets its hooks and takes them away in the middle of a step. They take what nobody else
wants, so whoever asks whether hooks came up within a step looks through them.
"""

from __future__ import annotations

from typing import Any

import torch

_of_a_valve: tuple[Any, Any] | None = None  # there is one valve at work in a process
_beneath: Any = None  # the hooks that were in force when those were set


def top_hooks() -> Any:
    """The hooks that are on top in this thread, as (pack, unpack), or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooks_but_a_valves() -> Any:
    """The hooks that are on top, or those beneath where they are a valve's."""
    top = top_hooks()
    return _beneath if top is not None and top == _of_a_valve else top


def look_through(pair: tuple[Any, Any]) -> None:
    """These are a valve's, which is about to set them on top."""
    global _of_a_valve, _beneath
    _of_a_valve, _beneath = pair, top_hooks()


def look_through_none() -> None:
    """A valve takes its hooks away."""
    global _of_a_valve, _beneath
    _of_a_valve = _beneath = None
