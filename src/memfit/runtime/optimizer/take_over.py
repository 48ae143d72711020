"""Lets another hand do an optimizer's step and keep its state, while its interface stays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from memfit.errors import UsageError

StateDict = dict[str, Any]


class TakeOver:
    """Hooks on an optimizer that give its step and its state to someone else.

    `step` does what optimizer.step() would; `settle` ends what is under way before the state is
    read; `adopt` takes over state that was just loaded and may lie anywhere.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Callable[[], None],
        settle: Callable[[], None],
        adopt: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._step, self._settle, self._adopt = step, settle, adopt
        self._groups: list[dict[str, Any]] | None = None  # set aside while step() runs empty
        self._loading: StateDict = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def at_work(self) -> bool:
        """Whether the hooks are there."""
        return bool(self._handles)

    def install(self) -> None:
        """Add the hooks."""
        optimizer = self._optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True),
        ]
        # Other hooks are to see the optimizer with its groups.
        after_step: Any = optimizer._optimizer_step_post_hooks
        after_step.move_to_end(self._handles[1].id, last=False)

    def remove(self) -> None:
        """Take the hooks away."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._restore_groups()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise UsageError(
                "optimizer.step() was given a closure, which would run after the planned step",
                hint="call loss.backward() before optimizer.step(), without a closure",
            )
        self._restore_groups()
        self._step()
        self._groups, optimizer.param_groups = optimizer.param_groups, []

    def _after_step(self, *_: object) -> None:
        self._restore_groups()

    def _restore_groups(self) -> None:
        if self._groups is not None:
            self._optimizer.param_groups, self._groups = self._groups, None

    def _before_save(self, _: torch.optim.Optimizer) -> None:
        self._settle()

    def _before_load(self, _: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """Keep the state back: torch would move all of it to the device at once."""
        self._loading = state_dict
        return {**state_dict, "state": {}}

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        loading, self._loading = self._loading, {}
        self._settle()
        groups = zip(loading["param_groups"], optimizer.param_groups, strict=True)
        numbered = {
            number: (parameter, group)
            for saved, group in groups
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }
        state: dict[Any, Any] = defaultdict(dict)
        for number, values in loading["state"].items():
            if number in numbered:
                parameter, group = numbered[number]
                state[parameter] = {k: _cast(k, v, parameter, group) for k, v in values.items()}
            else:
                state[number] = values
        optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})
        self._adopt()


def foreign_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether someone else's hooks run before the optimizer's step."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return any(not isinstance(getattr(hook, "__self__", None), TakeOver) for hook in hooks)


def _cast(key: str, value: Any, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """A loaded value with the type that Optimizer.load_state_dict would give it."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        on_device = group.get("fused") or group.get("capturable")
        return value.to(parameter.device, torch.float32) if on_device else value
    return value.to(parameter.dtype) if parameter.is_floating_point() else value
