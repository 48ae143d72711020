"""Head and loss in tiles for causal language models of transformers, as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.runtime.calls import Forward, replaced_forward
from memfit.runtime.reversible import Reversible
from memfit.runtime.tiled_loss.cross_entropy import tiled_cross_entropy
from memfit.runtime.tiled_loss.stand_ins import StandIns
from memfit.workload import refuse_compiled, unwrap

_HINT = (
    "compute the loss yourself with memfit.tiled_cross_entropy(hidden, weight, labels), "
    "or leave tiled_loss out"
)


class TiledLoss(Reversible):
    """A model that makes its loss in tiles, when called with labels; its `logits` are None then.

    A context manager: leaving it restores the model. Parameters, hooks and state_dict stay as they
    are throughout. The head's weight is read when the loss is made, after the head's own call.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        tile: int | None = None,
        tile_bytes: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        """`tile`, `tile_bytes` and `compiled` as in tiled_cross_entropy."""
        refuse_compiled(model)
        self.model = unwrap(model)
        self.head = find_head(self.model)
        self._tiling = {"tile": tile, "tile_bytes": tile_bytes, "compiled": compiled}
        self._logits: StandIns | None = None  # in a call with labels
        self._replay_labelled = False  # had the call that backward replays parts of labels?
        self._plain_loss: Callable[..., Any] = self.model.loss_function  # type: ignore[assignment]
        self._stack: ExitStack | None = None

    @property
    def at_work(self) -> bool:
        """Whether the model makes its loss in tiles now."""
        return self._stack is not None

    def install(self) -> TiledLoss:
        """Start making the loss in tiles."""
        assert self._stack is None, "the loss is made in tiles already"
        with ExitStack() as stack:
            stack.enter_context(replaced_forward(self.model, self._watch_labels))
            stack.enter_context(replaced_forward(self.head, self._pass_on))
            stack.enter_context(_replaced_loss(self.model, self._loss))
            self._stack = stack.pop_all()
        return self

    def undo(self) -> None:
        """Restore the model; harmless when done twice."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.close()

    def _watch_labels(self, forward: Forward) -> Forward:
        position = list(inspect.signature(forward).parameters).index("labels")

        def call(*args: Any, **kwargs: Any) -> Any:
            labels = args[position] if position < len(args) else kwargs.get("labels")
            if torch.is_grad_enabled():
                self._replay_labelled = labels is not None
            if labels is None:
                return forward(*args, **kwargs)
            self._logits = StandIns(scalable=self.head.bias is None)
            try:
                return _without(self._logits, forward(*args, **kwargs))
            finally:
                self._logits.close()
                self._logits = None

        return call

    def _pass_on(self, forward: Forward) -> Forward:
        def call(hidden: torch.Tensor) -> torch.Tensor:
            if self._logits is not None:
                return self._logits.make(hidden)
            in_backward = torch._C._current_graph_task_id() != -1
            if in_backward and self._replay_labelled:
                return hidden.view_as(hidden)
            return forward(hidden)

        return call

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """What transformers' ForCausalLMLoss returns, which reads no other arguments either."""
        if self._logits is None:
            return self._plain_loss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others
            )
        if logits not in self._logits or vocab_size != self.head.out_features:
            raise UsageError(
                f"{type(self.model).__name__} gives its loss something else than its head's "
                f"{self.head.out_features} logits (vocabulary: {vocab_size})",
                hint=_HINT,
            )
        with self._logits.taken():
            return tiled_cross_entropy(
                logits,  # in truth the head's input
                self.head.weight,
                (labels if shift_labels is None else shift_labels).to(logits.device),
                bias=self.head.bias,
                ignore_index=ignore_index,
                num_items=num_items_in_batch,
                shift=shift_labels is None,
                **self._tiling,  # type: ignore[arg-type]
            )


def find_head(model: torch.nn.Module) -> torch.nn.Linear:
    """The linear head of a causal language model; UsageError when its loss cannot be tiled."""
    find = getattr(model, "get_output_embeddings", None)
    has_loss = isinstance(getattr(type(model), "loss_function", None), property)
    head = find() if callable(find) and has_loss else None
    if not isinstance(head, torch.nn.Linear) or type(head).forward is not torch.nn.Linear.forward:
        found = "no head" if head is None else f"the head {type(head).__name__}"
        raise _refusal(model, f"has {found}, not a linear one of a transformers model")
    loss = getattr(model.loss_function, "__name__", "")
    if loss != "ForCausalLMLoss":
        raise _refusal(model, f"computes its loss by {loss or 'code of its own'}")
    if "labels" not in inspect.signature(model.forward).parameters:
        raise _refusal(model, "takes no labels")
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    if cap is not None:
        raise _refusal(model, f"caps its logits (final_logit_softcapping={cap})")
    if head._backward_hooks or head._backward_pre_hooks:
        raise _refusal(model, "has hooks that ask for the gradient of its logits")
    return head


def _refusal(model: torch.nn.Module, reason: str) -> UsageError:
    return UsageError(
        f"the loss of {type(model).__name__} cannot be made in tiles: it {reason}", hint=_HINT
    )


@contextmanager
def _replaced_loss(model: torch.nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    own = "_loss_function"  # where transformers keeps a loss that was set
    had, before = own in model.__dict__, model.__dict__.get(own)
    model.__dict__[own] = loss
    try:
        yield
    finally:
        if had:
            model.__dict__[own] = before
        else:
            del model.__dict__[own]


def _without(logits: StandIns, output: Any) -> Any:
    """The output with None in the place of what stood for logits."""
    if isinstance(output, Mapping):
        kept = {name: None if value in logits else value for name, value in output.items()}
        return type(output)(**kept)
    if isinstance(output, tuple):
        return tuple(None if value in logits else value for value in output)
    return output
