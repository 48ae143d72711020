"""Tests that need an NVIDIA GPU: `python3 -m pytest tests/gpu` on a machine that has one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# Attention kernels repeat themselves bit for bit only when torch may insist on it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if torch.cuda.is_available() else "needs an NVIDIA GPU"
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))
