"""See the memory and the seconds of a training loop: profiler, live line, component times."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.ir.memory_series import MemorySeries
    from memfit.observe.components import component_times
    from memfit.observe.live import LiveLine
    from memfit.observe.memory import MemoryProfiler
    from memfit.report.component_times import component_report

__all__ = ["LiveLine", "MemoryProfiler", "MemorySeries", "component_report", "component_times"]
_MODULES = {
    "LiveLine": "memfit.observe.live",
    "MemoryProfiler": "memfit.observe.memory",
    "MemorySeries": "memfit.ir.memory_series",
    "component_report": "memfit.report.component_times",
    "component_times": "memfit.observe.components",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: a profiler needs neither rich nor the planner."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
