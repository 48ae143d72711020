"""memfit fits a PyTorch training step into a memory budget in bytes, and proves that it did."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.api import apply, fit, fit_workload, plan, profile
    from memfit.errors import InfeasibleError, MemfitError
    from memfit.fitted import Fitted
    from memfit.ir.plan import Plan
    from memfit.ir.profile import Profile
    from memfit.runtime.pressure.valve import pressure
    from memfit.workload import Workload

__version__ = "0.1.0"
__all__ = [
    "Fitted",
    "InfeasibleError",
    "MemfitError",
    "Plan",
    "Profile",
    "Workload",
    "apply",
    "fit",
    "fit_workload",
    "plan",
    "pressure",
    "profile",
]
_MODULES = {
    "Fitted": "memfit.fitted",
    "InfeasibleError": "memfit.errors",
    "MemfitError": "memfit.errors",
    "Plan": "memfit.ir.plan",
    "Profile": "memfit.ir.profile",
    "Workload": "memfit.workload",
    "pressure": "memfit.runtime.pressure.valve",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `memfit --help` need not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES.get(name, "memfit.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
