"""Every system a benchmark knows, by name. Their files are imported when a cell needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from memfit.errors import UsageError
from memfit.planning.budget import check_budget_text
from memfit.planning.techniques import allowed_techniques
from memfit.targets.options import suggest

if TYPE_CHECKING:
    from memfit.bench.systems.prepared import Prepared, Setting

NEVER_ON_A_GPU = "not yet run on a GPU, tested on a CPU"


def _nothing(argument: str) -> None:
    if argument:
        raise ValueError("it takes no argument")


def _one_of(*words: str) -> Callable[[str], None]:
    def check(argument: str) -> None:
        if argument not in words:
            shown = ", ".join(word for word in words if word) or "nothing"
            raise ValueError(f"after the colon stands {shown}")

    return check


def _compiled(argument: str) -> None:
    if argument != "graphs":
        _memory_budget(argument)


def _memory_budget(argument: str) -> None:
    if argument and not 0 <= float(argument) <= 1:
        raise ValueError("activation_memory_budget lies between 0 and 1")


def _every(argument: str) -> None:
    if argument in ("", "offload"):
        return
    name, _, number = argument.partition("=")
    if name != "every" or int(number) < 1:
        raise ValueError("after the colon stands offload or every=N")


def _budget(argument: str) -> None:
    budget, options = memfit_options(argument)
    if budget != "none":
        check_budget_text(budget)
    allowed_techniques(options.get("allow"))


def _cut(argument: str) -> None:
    share, options = memfit_options(argument)
    if not share.endswith("%") or not 0 < float(share[:-1]) < 100:
        raise ValueError("after the colon stands the share of activation memory to cut: 40%")
    allowed_techniques(options.get("allow"))


def _bytes(argument: str) -> None:
    budget, options = memfit_options(argument)
    if budget.endswith("%"):
        raise ValueError("a share means nothing while the batch size is open: give bytes")
    if "launch" in options:
        raise ValueError("steps of a search are not launched as CUDA graphs")
    check_budget_text(budget)
    allowed_techniques(options.get("allow"))


@dataclass(frozen=True)
class Family:
    """Systems of one kind. With `own_model` they change the model for good, so it is theirs."""

    module: str
    about: str
    check: Callable[[str], None] = _nothing
    package: str | None = None
    own_model: bool = False
    compiles: bool = False  # all of its code by torch.compile, before its first step ends


FAMILIES = {
    "eager": Family("eager", "the step as it is"),
    "compile": Family(
        "peers.compiled",
        "torch.compile; :0.5 activation_memory_budget; :graphs its CUDA graphs",
        _compiled,
        compiles=True,
    ),
    "blocks": Family(
        "peers.compiled",
        "each block compiled; :0.5 with that budget",
        _memory_budget,
        compiles=True,
    ),
    "checkpoint": Family(
        "peers.checkpointed", "torch.utils.checkpoint on every block; :half", _one_of("", "half")
    ),
    "checkpoint-compiled": Family("peers.checkpointed", "the same on compiled blocks"),
    "offload-flags": Family(
        "peers.offload_flags",
        "torch.compile with its activation offloading; :async",
        _one_of("", "async"),
        compiles=True,
    ),
    "save-on-cpu": Family("peers.saved_on_cpu", "torch.autograd.graph.save_on_cpu, pinned"),
    "hf-checkpoint": Family(
        "peers.huggingface",
        "transformers' gradient_checkpointing; :offload, :every=2",
        _every,
        "transformers",
    ),
    "fsdp2-offload": Family("peers.fsdp2", "FSDP2 with CPUOffloadPolicy, one rank", own_model=True),
    "torchao-offload": Family(
        "peers.torchao",
        f"torchao's CPUOffloadOptimizer; {NEVER_ON_A_GPU}",
        package="torchao",
        own_model=True,
    ),
    "deepspeed-offload": Family(
        "peers.deepspeed",
        f"DeepSpeed ZeRO-2, optimizer on the CPU; {NEVER_ON_A_GPU}",
        package="deepspeed",
        own_model=True,
    ),
    "memfit": Family(
        "planned",
        "a plan: :60%, :16GiB, :none; :60% allow=+offload executor=graph launch=graphs",
        _budget,
    ),
    "memfit-cut": Family("planned", "a plan with 40 % less activation memory: :40%", _cut),
    "largest-batch": Family(
        "largest_batch", "the largest batch in :8GiB, plain and planned", _bytes
    ),
}
PEERS = (
    "eager",
    "compile",
    "compile:0.5",
    "compile:0.2",
    "compile:0.05",
    "blocks",
    "checkpoint",
    "checkpoint-compiled",
    "offload-flags",
    "save-on-cpu",
    "hf-checkpoint:offload",
    "fsdp2-offload",
    "torchao-offload",
    "deepspeed-offload",
)
SWEPT = ("eager", "compile", "checkpoint")


def split_name(system: str) -> tuple[str, str]:
    """The family of a system and what stands after the colon."""
    family, _, argument = system.strip().partition(":")
    return family, argument.strip()


def check_system(system: str) -> str:
    """Return the name as it is stored; UsageError for one that there is not."""
    family, argument = split_name(system)
    if family not in FAMILIES:
        raise UsageError(
            f"unknown system {system!r}",
            hint=f"{suggest(family, FAMILIES)}systems are {', '.join(FAMILIES)} "
            "(memfit bench --list says what each is)",
        )
    try:
        FAMILIES[family].check(argument)
    except ValueError as error:
        raise UsageError(
            f"system {system!r} means nothing: {error}", hint=f"{family}: {FAMILIES[family].about}"
        ) from error
    return f"{family}:{argument}" if argument else family


def missing_package(family: str) -> str | None:
    """The package that a family needs and that is not installed, if any."""
    package = FAMILIES[family].package
    return package if package is not None and find_spec(package) is None else None


def prepare(system: str, setting: Setting) -> Prepared:
    """The system's step for this workload; Unavailable where it has none."""
    family, argument = split_name(system)
    module = importlib.import_module(f"memfit.bench.systems.{FAMILIES[family].module}")
    prepared: Prepared = module.prepare(setting, family, argument)
    return prepared


def memfit_name(budget: str, allow: str | None, executor: str | None) -> str:
    """The system for a memfit budget: "memfit:60% allow=+offload executor=graph"."""
    words = [budget.strip()]
    words += [f"allow={allow}"] if allow else []
    words += [f"executor={executor}"] if executor else []
    return f"memfit:{' '.join(words)}"


def memfit_options(argument: str) -> tuple[str, dict[str, str]]:
    """The budget of a memfit system, and its options: allow as the library takes it, executor, and
    launch=graphs: as CUDA graphs, where the host holds the step up."""
    budget, *words = argument.split() or [""]
    options = {}
    for word in words:
        name, separator, value = word.partition("=")
        known = name in ("allow", "executor") or word == "launch=graphs"
        if not separator or not value or not known:
            raise ValueError(
                f"{word!r} is neither allow=TECHNIQUES nor executor=NAME nor launch=graphs"
            )
        options[name] = value
    if "allow" in options:  # in one word without commas, which part systems: +a+b adds, a+b is all
        adds = options["allow"].startswith("+")
        names = options["allow"].removeprefix("+").split("+")
        options["allow"] = ",".join(f"+{n}" if adds else n for n in names)
    return budget, options
