"""The workloads of a benchmark: those of named suites, and any target of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from memfit.bench.systems.catalogue import PEERS, SWEPT
from memfit.errors import UsageError
from memfit.ir.bench import WorkloadSpec
from memfit.targets import is_file_target, target_names
from memfit.targets.options import suggest

ZOOS = ("torchvision", "timm", "transformers")


@dataclass(frozen=True)
class Suite:
    """Workloads, and the systems and memfit budgets they are run with unless others are named;
    some with more systems `also`, by their names."""

    workloads: tuple[WorkloadSpec, ...]
    systems: tuple[str, ...]
    budgets: tuple[str, ...]
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def named(spec: WorkloadSpec) -> WorkloadSpec:
    """The spec with the name its target and options give it: "gpt2-large@8x1024 bf16"."""
    short = spec.target if is_file_target(spec.target) else spec.target.rpartition(":")[2]
    if is_file_target(spec.target):
        path, _, function = spec.target.rpartition(":")
        short = f"{Path(path).name}:{function}"
    sizes = "x".join(str(n) for n in (spec.batch, spec.seq) if n is not None)
    words = [w for w in (spec.dtype, spec.optimizer, *spec.fields) if w]
    name = " ".join([f"{short}@{sizes}" if sizes else short, *words])
    series = " ".join([short if spec.seq is None else f"{short} x{spec.seq}", *words])
    return replace(spec, name=name, series=series)


def sized(spec: WorkloadSpec, sizes: Sequence[int]) -> tuple[WorkloadSpec, ...]:
    """The workload at each of these batch sizes."""
    return tuple(named(replace(spec, batch=size)) for size in sizes)


def _of(target: str, batch: int | None = None, **options: int | str | None) -> WorkloadSpec:
    return named(WorkloadSpec("", target, batch, **options))  # type: ignore[arg-type]


RESNET152, ENCODER = _of("torchvision:resnet152"), _of("encoder", seq=128)
# What the host holds up is launched as CUDA graphs; what logits fill has its loss in tiles. Budgets
# are those around which peers lie.
_GRAPHS = tuple(f"memfit:{share}% launch=graphs" for share in (60, 50, 40))
_TILES = ("memfit:70%", *(f"memfit:{share}% allow=+tiled_loss" for share in (60, 40)))
_STEPS = tuple(f"memfit:{share}% allow=+tiled_loss+step_in_backward" for share in (60, 45))
# Sweeps run memfit by whole segments, which compile nothing; these are what it would choose itself.
_RESNETS, _ENCODERS = (
    sized(RESNET152, (4, 8, 16, 32, 64)),
    sized(ENCODER, (2, 4, 8, 16, 32, 64, 128, 256)),
)
_BEST = {
    **{spec.name: ("memfit:65% launch=graphs",) for spec in _RESNETS if spec.batch in (16, 64)},
    **{spec.name: ("memfit:65% executor=inductor",) for spec in _ENCODERS},
}
SUITES = {
    "peers": Suite(
        (
            _of("torchvision:resnet50", 64),
            _of("torchvision:resnet152", 64),
            _of("torchvision:vit_b_16", 64),
            _of("encoder", 256, seq=128),
            _of("transformers:gpt2-large", 8, seq=1024, dtype="bf16"),
        ),
        PEERS,
        ("80%", "60%", "40%"),
        {
            "resnet50@64": _GRAPHS,
            "resnet152@64": _GRAPHS,
            "encoder@256x128": _TILES,
            "gpt2-large@8x1024 bf16": _STEPS,
        },
    ),
    "sweep": Suite(
        (*_RESNETS, *_ENCODERS),
        SWEPT,
        ("65%",),
        _BEST,
    ),
    "savings": Suite(
        (_of("torchvision:resnet50", 16), _of("torchvision:vit_b_16", 16)),
        ("eager", "memfit-cut:40%"),
        (),
    ),
}


def suite_of(name: str) -> Suite:
    """The suite of this name."""
    if name not in SUITES:
        raise UsageError(
            f"unknown suite {name!r}",
            hint=f"{suggest(name, SUITES)}suites are {', '.join(SUITES)}; or name a TARGET",
        )
    return SUITES[name]


def check_target(target: str) -> None:
    """Refuse a target that no cell could build, before any is started."""
    if is_file_target(target):
        path, separator, _ = target.rpartition(":")
        if not separator or not path.endswith(".py"):
            raise UsageError(
                f"{target!r} names a file but no function in it", hint=f"write {target}:FUNCTION"
            )
        if not Path(path).is_file():
            raise UsageError(
                f"there is no file {path!r}", hint="`memfit init` writes a workload file"
            )
        return
    zoo, separator, _ = target.partition(":")
    if target == "encoder" or (separator and zoo in ZOOS):
        if zoo != "transformers" or target in target_names():
            return
    raise UsageError(
        f"unknown target {target!r}",
        hint=f"{suggest(target, target_names())}targets are encoder, torchvision:NAME, timm:NAME, "
        "transformers:NAME or path/to/file.py:function",
    )


def missing_zoo(target: str) -> str | None:
    """The package that a target needs and that is not installed, if any."""
    zoo, separator, _ = target.partition(":")
    needed = separator and zoo in ZOOS and not is_file_target(target)
    return zoo if needed and find_spec(zoo) is None else None


def parse_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from "4,8,16"."""
    try:
        sizes = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(
            f"{text!r} is not a list of batch sizes", hint="write --batch-sizes 4,8,16,32"
        )
    return sizes
