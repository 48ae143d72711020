"""What all tests share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_garbage() -> None:
    """Every recording collects garbage first: let it not look through all imports each time."""
    gc.collect()
    gc.freeze()
