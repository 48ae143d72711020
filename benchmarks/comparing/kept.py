"""What a comparison needs to go on after it was cut off: profiles and plans, in a file."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

from memfit.ir.codec import from_data, to_data
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile


@dataclass(frozen=True)
class Kept:
    """Profiles with what the fits learned, of the step as it is and with its set-up; the plans."""

    plain: Profile | None = None
    set_up: Profile | None = None
    plans: dict[str, Plan] = field(default_factory=dict)


def file_beside(output: Path, name: str, executor: str | None) -> Path:
    """Where it lies: beside the report, and to plan from on another machine."""
    words = [output.stem, *name.replace("@", "-").replace(",", "").split()]
    return output.with_name("-".join([*words, *([executor] if executor else [])]) + ".kept.json.gz")


def read_kept(path: Path) -> Kept:
    """What an earlier run left there; nothing if there is no file."""
    if not path.exists():
        return Kept()
    return from_data(Kept, json.loads(gzip.decompress(path.read_bytes())))


def write_kept(kept: Kept, path: Path) -> None:
    """Keep it; what was there stays whole until then."""
    beside = path.with_name(f"{path.name}.part")
    beside.write_bytes(gzip.compress(json.dumps(to_data(kept)).encode(), compresslevel=1))
    beside.replace(path)
