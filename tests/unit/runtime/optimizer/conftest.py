"""Two models that start alike: one trained by a plain loop, one by the technique under test."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STEPS = 20
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=2e-3, momentum=0.9),
    "sgd_foreach": partial(torch.optim.SGD, lr=2e-3, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": partial(torch.optim.SGD, lr=2e-3, momentum=0.9, fused=True),
    "adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "adam_fused": partial(torch.optim.Adam, lr=1e-2, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
}


class Tied(torch.nn.Module):
    """An embedding that is also the head, two blocks, and a branch that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
            for _ in range(2)
        )
        self.branch = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, use_branch: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        if use_branch:
            x = x + self.branch(x)
        return self.head(self.norm(x))


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    """The loss of a step; every third one uses the branch."""
    random = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (4, 6), generator=random)
    logits = model(tokens, number % 3 == 0)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.flatten(), reduction="sum"
    )


def build(
    optimizer: str = "adamw", decay_groups: bool = False
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same at every call."""
    torch.manual_seed(3)
    model = Tied()
    parameters: Any = model.parameters()
    if decay_groups:
        parameters = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    return model, OPTIMIZERS[optimizer](parameters)


def groups_of(model: Any) -> list[list[torch.nn.Parameter]]:
    """One group per block, one with the branch; the norm and the embedding in none."""
    groups = [list(block.parameters()) for block in model.blocks]
    return [*groups, list(model.branch.parameters())]


def train_plainly(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range = range(STEPS),
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
) -> list[torch.Tensor]:
    """The plain loop."""
    losses = []
    for step in steps:
        for part in range(accumulate):
            loss = loss_of(model, step * accumulate + part) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.detach())
        if clip_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def train_in_backward(
    stepper: Any,
    model: torch.nn.Module,
    steps: range = range(STEPS),
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    scheduler: Any = None,
    anew: bool = False,
) -> list[torch.Tensor]:
    """The same loop by a StepInBackward; `anew` computes the loss of the second pass again."""
    losses = []
    for step in steps:
        for part in range(accumulate):
            number = step * accumulate + part
            loss = loss_of(model, number) / accumulate
            norm = stepper.backward(
                loss,
                last=part == accumulate - 1,
                clip_norm=clip_norm,
                scaler=scaler,
                again=partial(loss_of, model, number) if anew else None,
            )
            losses.append(loss.detach())
            if norm is not None:
                losses.append(norm)
        assert all(p.grad is None for p in model.parameters())
        if scaler is not None:
            scaler.update()
        if scheduler is not None:
            scheduler.step()
    return losses


def snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Weights and state as they are now."""
    state = optimizer.state_dict()
    return torch.utils._pytree.tree_map(
        lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v,
        {"model": dict(model.state_dict()), "optimizer": state},
    )


def same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Two trees of tensors are equal, bit for bit unless a tolerance is given."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def scenario(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a loop is given besides model and optimizer."""
    if name == "schedule":
        return {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)}
    # Some steps overflow, some do not.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=3)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulate": {"accumulate": 3},
        "clip": {"clip_norm": 8.0},
        "scaler": {"scaler": scaler},
        "clip_scaler": {"clip_norm": 8.0, "scaler": scaler},
        "clip_accumulate": {"clip_norm": 8.0, "accumulate": 2},
        "scaler_accumulate": {"scaler": scaler, "accumulate": 2},
        "clip_scaler_accumulate": {"clip_norm": 8.0, "scaler": scaler, "accumulate": 2},
    }
    return options[name]


def expect(optimizer: str, name: str = "plain", decay_groups: bool = False) -> tuple[Any, Any]:
    """Losses of the plain loop, and weights and state at its end."""
    model, plain = build(optimizer, decay_groups)
    losses = train_plainly(model, plain, **scenario(name, plain))
    return losses, snapshot(model, plain)


@pytest.fixture(scope="session")
def training() -> SimpleNamespace:
    """The functions of this file."""
    functions = (
        build,
        expect,
        groups_of,
        loss_of,
        same,
        scenario,
        snapshot,
        train_in_backward,
        train_plainly,
    )
    return SimpleNamespace(steps=STEPS, **{f.__name__: f for f in functions})


@pytest.fixture(params=OPTIMIZERS)
def any_optimizer(request: pytest.FixtureRequest) -> str:
    """Each optimizer in turn."""
    return request.param


@pytest.fixture(params=["sgd_foreach", "adam_fused", "adamw"])
def some_optimizer(request: pytest.FixtureRequest) -> str:
    """One optimizer of each kind of kernel."""
    return request.param


@pytest.fixture(
    params=[
        "accumulate",
        "schedule",
        "clip",
        "scaler",
        "clip_scaler",
        "clip_accumulate",
        "scaler_accumulate",
        "clip_scaler_accumulate",
    ]
)
def some_scenario(request: pytest.FixtureRequest) -> str:
    """Each way to train but the plain one."""
    return request.param
