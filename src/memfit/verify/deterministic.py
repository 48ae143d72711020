"""Kernels that repeat themselves bit for bit, for as long as numbers are compared.

The only module that touches torch's settings for them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from memfit.measure.cuda_allocator import drop_cublas_scratch

# What torch wants to find in the environment before it runs deterministic kernels and no others.
CUBLAS, CUBLAS_REPEATS = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


@contextmanager
def deterministic(*, strict: bool = False) -> Iterator[None]:
    """Ask torch for deterministic algorithms where it has them; `strict`: or else to raise.

    Some kernels (attention) are only deterministic when it is strict.
    """
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    with warnings.catch_warnings(), _repeatable_products() if strict else nullcontext():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        settings.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = before[2]


@contextmanager
def _repeatable_products() -> Iterator[None]:
    """Put the setting for repeatable matrix products into the environment, if it is not there.

    Torch reads it at every product (which is why it is not left there), together with the size of
    a workspace that it keeps: workspaces of another size must go.
    """
    before = os.environ.get(CUBLAS)
    if before in CUBLAS_REPEATS:
        yield
        return
    _drop_workspaces()
    os.environ[CUBLAS] = CUBLAS_REPEATS[0]
    try:
        yield
    finally:
        _drop_workspaces()
        if before is None:
            del os.environ[CUBLAS]
        else:
            os.environ[CUBLAS] = before


def _drop_workspaces() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        drop_cublas_scratch()
