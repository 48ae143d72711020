"""memfit fits a PyTorch training step into a memory budget in bytes, and proves that it did."""

from memfit.api import apply, fit, fit_workload, plan, profile
from memfit.errors import InfeasibleError, MemfitError
from memfit.fitted import Fitted
from memfit.ir.plan import Plan
from memfit.ir.profile import Profile
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
    "profile",
]
