"""Steps a few of an optimizer's parameters with its own code, hyper-parameters and state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.runtime.optimizer.accepted import Parameters, own_step


class Parts:
    """An optimizer's step in parts.

    A part is a second object of the optimizer's class, made for one call: it shares the state and
    reads the hyper-parameters as they are then. Schedulers and step hooks see only whole steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._step = own_step(optimizer)
        self._group_of: dict[int, int] = {}

    def step(self, parameters: Parameters) -> None:
        """Step those of the parameters that have a gradient."""
        self.run(self.part(parameters))

    def run(self, part: torch.optim.Optimizer) -> None:
        """Step a part."""
        self._step(part)

    def part(
        self,
        parameters: Parameters,
        stand_ins: Mapping[int, torch.nn.Parameter] | None = None,
        **options: Any,
    ) -> torch.optim.Optimizer:
        """The optimizer of only these parameters.

        `stand_ins` replace parameters, by id; `options` replace hyper-parameters that groups have.
        """
        chosen: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            stand_in = parameter if stand_ins is None else stand_ins[id(parameter)]
            chosen.setdefault(self._group(parameter), []).append(stand_in)
        groups = self.optimizer.param_groups
        part = object.__new__(type(self.optimizer))
        part.__dict__.update(self.optimizer.__dict__)
        part.param_groups = [
            groups[i] | {k: v for k, v in options.items() if k in groups[i]} | {"params": members}
            for i, members in sorted(chosen.items())
        ]
        return part

    def group(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The hyper-parameters of a parameter."""
        return self.optimizer.param_groups[self._group(parameter)]

    def _group(self, parameter: torch.nn.Parameter) -> int:
        if id(parameter) not in self._group_of:  # at first, and after add_param_group
            for index, group in enumerate(self.optimizer.param_groups):
                self._group_of.update((id(p), index) for p in group["params"])
        return self._group_of[id(parameter)]
