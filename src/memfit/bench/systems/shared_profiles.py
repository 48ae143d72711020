"""Profiles that the cells of one run leave to each other: a step is profiled once, planned often.

They hold for the run alone: same machine, same versions, same cap. What a fit learns from running
its own plan is not handed on: each fit runs its plan once outside of the budget's cap.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from memfit.ir.bench import WorkloadSpec
from memfit.ir.codec import from_data, to_data
from memfit.ir.profile import Profile
from memfit.runtime.signature import describe, model_signature
from memfit.workload import Workload

How = tuple[str | None, bool]  # by which executor, and whether it may be launched as CUDA graphs


@dataclass(frozen=True)
class Found:
    """A profile, and the system whose cell made it."""

    by: str
    profile: Profile


@dataclass(frozen=True)
class SharedProfiles:
    """Where a cell finds profiles and leaves its own; without a folder nothing is shared."""

    folder: str | None = None
    workload: WorkloadSpec | None = None
    system: str = ""

    def find(self, workload: Workload, how: How) -> Found | None:
        """The profile of this workload, run in this way; None when nobody has made it yet."""
        path = self._path(how)
        if path is None or not path.exists():
            return None
        found = from_data(Found, json.loads(path.read_text(encoding="utf-8")))
        here = model_signature(workload.model), describe(workload)
        same = (found.profile.fingerprint, found.profile.workload) == here
        return found if same else None  # a function of the user's may build another one each time

    def keep(self, profile: Profile, how: How) -> None:
        """Leave a profile, asked for in this way, to the cells that follow."""
        path = self._path(how)
        if path is None:
            return
        beside = path.with_suffix(f".{os.getpid()}.part")  # others may be at it
        beside.write_text(json.dumps(to_data(Found(self.system, profile))), encoding="utf-8")
        beside.replace(path)  # a cell may be ended at any moment

    def _path(self, how: How) -> Path | None:
        if self.folder is None:
            return None
        key = json.dumps([to_data(self.workload), *how]).encode()
        return Path(self.folder) / f"{hashlib.sha256(key).hexdigest()[:16]}.profile.json"
