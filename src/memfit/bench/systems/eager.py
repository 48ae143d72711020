"""The step as it is. What its peak is made of comes from a profile of its own."""

from __future__ import annotations

from contextlib import nullcontext

from memfit.bench.systems.prepared import Prepared, Setting, around


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The workload's own step."""
    return around(setting.workload, nullcontext)
