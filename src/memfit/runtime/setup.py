"""How a step is run beside its activations: techniques of the loss and of the optimizer.

The optimizer steps in backward, its state lives in host memory, the loss is made in tiles, frozen
weights lie in int8. A plan of activations goes on top: what it finds is measured with the set-up at
work.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch

from memfit.errors import UsageError
from memfit.measure.step import stepping_in_backward
from memfit.runtime.calls import named_modules
from memfit.runtime.lowbit.int8_weights import Int8Weights
from memfit.runtime.lowbit.packed import Bits
from memfit.runtime.lowbit.state import LowBitState
from memfit.runtime.optimizer.in_backward.step_in_backward import StepInBackward
from memfit.runtime.optimizer.in_backward.train import train
from memfit.runtime.optimizer.on_host.state_on_host import StateOnHost
from memfit.runtime.optimizer.on_host.step_on_host import StepOnHost
from memfit.runtime.reversible import Stacked
from memfit.runtime.tiled_loss.in_model import TiledLoss
from memfit.workload import unwrap

Parameters = list[torch.nn.Parameter]
_BITS: dict[str, Bits] = {"optim_bf16_sr": "bf16_sr", "optim_8bit": "8bit"}
_INT8 = {  # symmetric, per channel
    "int8_weights": (True, True),
    "int8_weights_asymmetric": (False, True),
    "int8_weights_per_tensor": (True, False),
    "int8_weights_asymmetric_per_tensor": (False, False),
}


class Setup(Stacked):
    """Techniques at work on a model and its optimizer. A context manager: leaving it restores both.

    `modules` are the segments' names: the parameters of each step together.
    """

    def __init__(
        self,
        techniques: Sequence[str],
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        modules: Iterable[str] = (),
        tile_bytes: int | None = None,
        state_kept_bytes: int = 0,
    ) -> None:
        """`tile_bytes` is the size of a tile of logits; None: the usual one.

        Of optimizer state that goes to the host, `state_kept_bytes` at most stay on the device.
        """
        self.techniques = tuple(techniques)
        self.tile_bytes = tile_bytes
        self.state_kept_bytes = state_kept_bytes if "optimizer_offload" in techniques else 0
        self.in_backward: StepInBackward | None = None
        self._model, self._optimizer, self._modules = model, optimizer, tuple(modules)

    @property
    def what(self) -> tuple[Hashable, ...]:
        """What tells it from other set-ups of the same model and optimizer."""
        return self.techniques, self.tile_bytes, self.state_kept_bytes

    def _make(self, stack: ExitStack) -> None:
        int8 = self._one_of(_INT8, "two forms of the same weights")
        if int8 is not None:
            symmetric, per_channel = _INT8[int8]
            weights = Int8Weights(self._model, symmetric=symmetric, per_channel=per_channel)
            stack.enter_context(weights)
        if "tiled_loss" in self.techniques:
            stack.enter_context(TiledLoss(self._model, tile_bytes=self.tile_bytes))
        stepper = self._stepper()
        if stepper is not None:
            stack.enter_context(stepper)
        if "step_in_backward" in self.techniques:
            step = StepInBackward(
                self._stepped(),
                self._groups(),
                clip="two_pass",
                clipped=unwrap(self._model).parameters(),
                stepper=stepper,
            )
            self.in_backward = stack.enter_context(step)
            stack.callback(setattr, self, "in_backward", None)
            stack.enter_context(stepping_in_backward(self._stepped(), partial(train, step)))

    def holding_gradients(self) -> AbstractContextManager[None]:
        """Within it, gradients stay when backward is over, whatever the techniques."""
        return nullcontext() if self.in_backward is None else self.in_backward.holding()

    def _stepper(self) -> StateOnHost | StepOnHost | LowBitState | None:
        """What keeps the optimizer's state elsewhere or otherwise than it does itself."""
        places = ("optimizer_offload", "step_on_host", *_BITS)
        place = self._one_of(places, "two places for the same optimizer state")
        if place is None:
            return None
        if place == "optimizer_offload":
            return StateOnHost(self._stepped(), self._groups(), kept_bytes=self.state_kept_bytes)
        if place == "step_on_host":
            return StepOnHost(self._stepped(), self._groups())
        return LowBitState(self._stepped(), self._groups(), bits=_BITS[place])

    def _one_of(self, names: Iterable[str], what: str) -> str | None:
        """Which of these techniques is at work, if any; UsageError for more than one."""
        found = [name for name in names if name in self.techniques]
        if len(found) > 1:
            raise UsageError(f"{' and '.join(found)} are {what}", hint="allow one of them")
        return found[0] if found else None

    def _stepped(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise UsageError(
                f"the plan uses {', '.join(self.techniques)}, which needs the optimizer",
                hint="give it: memfit.apply(plan, model, optimizer)",
            )
        return self._optimizer

    def _groups(self) -> list[Parameters]:
        """The optimizer's parameters by segment, and the rest together."""
        own = {id(p) for g in self._stepped().param_groups for p in g["params"]}
        found = [g for g in _by_module(unwrap(self._model), self._modules) if g]
        return [mine for g in found if (mine := [p for p in g if id(p) in own])]


def _by_module(model: torch.nn.Module, names: Sequence[str]) -> Iterator[Parameters]:
    """The parameters of each module, then those of no module; each once."""
    seen: set[int] = set()
    for owner in [*named_modules(model, names).values(), model]:
        group = [p for p in owner.parameters() if id(p) not in seen]
        seen.update(id(p) for p in group)
        yield group
