"""transformers' own gradient checkpointing, with layer inputs on the host or every N layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memfit.bench.systems.prepared import Prepared, Setting, Unavailable, around
from memfit.workload import unwrap


def prepare(setting: Setting, family: str, argument: str) -> Prepared:
    """The model with gradient_checkpointing_enable around every step."""
    model: Any = unwrap(setting.workload.model)
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(model, "supports_gradient_checkpointing", False):
        raise Unavailable(f"{type(model).__name__} has no gradient checkpointing of transformers")
    options: dict[str, Any] = {}
    if argument == "offload":
        options["offload"] = True
        if setting.workload.device.type != "cuda":
            raise Unavailable("the step runs in host memory already: nothing to offload it from")
    elif argument:
        options["every_n_layers"] = int(argument.partition("=")[2])
    unknown = set(options) - set(inspect.signature(enable).parameters)
    if unknown:
        import transformers

        raise Unavailable(f"transformers {transformers.__version__} has no {sorted(unknown)[0]}")

    @contextmanager
    def enabled() -> Iterator[None]:
        enable({"use_reentrant": False}, **options)
        try:
            yield
        finally:
            model.gradient_checkpointing_disable()

    return around(setting.workload, enabled)
