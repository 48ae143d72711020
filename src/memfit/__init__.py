"""memfit fits a PyTorch training step into a memory budget in bytes, and proves that it did."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit import observe as observe
    from memfit.api import apply, fit, fit_workload, plan, profile
    from memfit.errors import InfeasibleError
    from memfit.estimating.estimate import estimate
    from memfit.ir.plan import Plan
    from memfit.runtime.pressure.valve import pressure
    from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy
    from memfit.train.batch_size.find import find_batch_size
    from memfit.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "InfeasibleError",
    "Plan",
    "Workload",
    "apply",
    "estimate",
    "find_batch_size",
    "fit",
    "fit_workload",
    "plan",
    "pressure",
    "profile",
    "tiled_cross_entropy",
]
_MODULES = {
    "InfeasibleError": "memfit.errors",
    "Plan": "memfit.ir.plan",
    "Workload": "memfit.workload",
    "estimate": "memfit.estimating.estimate",
    "find_batch_size": "memfit.train.batch_size.find",
    "pressure": "memfit.runtime.pressure.valve",
    "tiled_cross_entropy": "memfit.runtime.tiled_loss.cross_entropy",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `memfit --help` need not wait for torch."""
    from importlib import import_module

    if name == "observe":  # a folder with names of its own
        return import_module("memfit.observe")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "memfit.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
