"""Segments that torch cannot trace: the fit works all the same and says which and why."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import PlanFileError, UsageError
from memfit.fitted import Fitted
from memfit.report.plan import uncaptured_notes
from memfit.workload import Workload

WIDTH = 16
Build = Callable[[], nn.Module]


class Block(nn.Module):
    """A residual block with dropout; `odd` is what its kinds do to the hidden values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.odd(self.up(x)))))


class Branching(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 1e9 else 2 * x


class Selecting(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return x * x[x == x].mean()


class Printing(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        print("seen")
        return x


class Untraceable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(x.tolist())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Listing(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return Untraceable.apply(x)


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.saved_tensors[0].exp()


class OwnFunction(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return Exponential.apply(torch.tanh(x))


class Complex(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * (1 + 0.5j)).real


class Sparse(Block):
    def odd(self, x: torch.Tensor) -> torch.Tensor:
        mixing = torch.eye(x.shape[-1]).to_sparse()
        return torch.sparse.mm(mixing, x.flatten(0, 1).t()).t().reshape(x.shape)


class OtherLayout(Block):
    """torch traces a batch norm of a transposed input with strides that no kernel gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Counting(Block):
    """Compiled at every call: it changes a number of its own."""

    calls = 0

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


class Growing(Block):
    """Compiled at every call: it reads the length of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def odd(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(0)
        return x + 0 * len(self.seen)


class Net(nn.Module):
    """Three plain blocks and an odd one between a stem and a head."""

    def __init__(self, odd: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([Block(), odd, Block(), Block()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BranchingNet(Net):
    """The model itself branches on data: only its segments are traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 1e9 else super().forward(x)


def doubled(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 2 * Block.forward(block, x)


def _with_forward(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    block = Block()
    block.forward = wrap(block)
    return block


def _twins(zoo: SimpleNamespace, build: Build) -> tuple[Workload, Workload]:
    batch = functools.partial(zoo.sequences, 8)
    plain, planned = (zoo.workload(build, batch, optimizer=torch.optim.SGD) for _ in range(2))
    return plain, planned


def _fit(workload: Workload) -> Fitted:
    return memfit.fit_workload(workload, 10**9, strategy="all", executor="graph", steps=1)


def _train(workload: Workload, step: Callable[[Any], torch.Tensor]) -> list[Any]:
    torch.manual_seed(3)
    losses = [step(workload.batch) for _ in range(3)]
    return [losses, workload.model.state_dict(), torch.get_rng_state()]


def _plain_step(workload: Workload) -> Callable[[Any], torch.Tensor]:
    def step(batch: Any) -> torch.Tensor:
        loss = workload.compute_loss(batch)
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        return loss.detach()

    return step


def _check(zoo: SimpleNamespace, build: Build) -> memfit.Plan:
    """Fit, train, and compare with plain training; the plan."""
    plain, planned = _twins(zoo, build)
    with _fit(planned) as fitted:
        assert fitted.result.numerics.bitwise_vs_unplanned
        actual = _train(planned, fitted.step)
        plan = fitted.plan
    torch.testing.assert_close(actual, _train(plain, _plain_step(plain)), rtol=0, atol=0)
    return plan


NAMED = {
    "a branch on data": (Branching, "it branches on the value of a tensor (test_uncaptured.py:"),
    "a size from data": (Selecting, "(test_uncaptured.py:"),
    "a print": (Printing, "(test_uncaptured.py:"),
    "an untraceable function": (Listing, "tolist() with non-integer tensor (test_uncaptured.py:"),
    "sparse tensors": (Sparse, "parse Tensor"),
    "a wrong layout": (OtherLayout, "OtherLayout: its compiled code fails: view size is not"),
    "a count of calls": (Counting, "Counting: its forward changes calls, a number of a Counting"),
    "a list that grows": (Growing, "its code reads a value that changes from call to call"),
    "a lambda": (
        functools.partial(_with_forward, lambda b: lambda x: doubled(b, x)),
        "the forward is no method of a module",
    ),
    "a partial": (
        functools.partial(_with_forward, lambda b: functools.partial(doubled, b)),
        "the forward is no method of a module: partial",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_segment_that_is_no_graph_runs_as_its_module_and_is_named(
    zoo: SimpleNamespace, name: str
) -> None:
    odd, text = NAMED[name]
    plan = _check(zoo, lambda: Net(odd()))
    why = {s.name: s.uncaptured for s in plan.segments if s.kind != "Linear"}
    assert text in str(why.pop("blocks.1"))
    assert why == {"blocks.0": None, "blocks.2": None, "blocks.3": None}
    [note] = uncaptured_notes(plan)
    assert note.startswith("not captured, run by module: blocks.1: ")
    assert "\n" not in note


def _in_eval_mode(kind: type[nn.Module]) -> nn.Module:
    return kind().eval()


CAPTURED: dict[str, Build] = {
    "a function with a derivative of its own": lambda: Net(OwnFunction()),
    "complex tensors": lambda: Net(Complex()),
    "a block in eval mode": lambda: Net(_in_eval_mode(Block)),
    "a model that branches on data": lambda: BranchingNet(Block()),
    "a method put in by the user": lambda: Net(
        _with_forward(lambda block: types.MethodType(doubled, block))
    ),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_what_looks_odd_and_is_captured(zoo: SimpleNamespace, name: str) -> None:
    assert uncaptured_notes(_check(zoo, CAPTURED[name])) == []


def _compiled(how: str) -> nn.Module:
    model = Net(Block())
    if how == "the model":
        return torch.compile(model, backend="eager")
    if how == "a block":
        model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    elif how == "a block in place":
        model.blocks[1].compile(backend="eager")
    else:
        model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="eager")
    return model


@pytest.mark.parametrize("how", ["the model", "a block", "a block in place", "a forward"])
def test_what_was_given_to_torch_compile_is_refused(zoo: SimpleNamespace, how: str) -> None:
    name = "the model" if how == "the model" else "blocks.1"
    with pytest.raises(UsageError, match=f"{name} was given to torch.compile.*\nhint: "):
        _fit(zoo.workload(functools.partial(_compiled, how)))


def test_a_plan_for_other_operators_is_refused(zoo: SimpleNamespace) -> None:
    """Modules and shapes are the same; only the code differs."""
    _, planned = _twins(zoo, lambda: Net(Block()))
    with _fit(planned) as fitted:
        plan = fitted.plan
    edited = type("Block", (Block,), {"odd": lambda self, x: torch.relu(x)})
    other, _ = _twins(zoo, lambda: Net(edited()))
    with (
        memfit.apply(plan, other.model),
        pytest.raises(PlanFileError, match=r"Block no longer runs the operators .*\nhint: "),
    ):
        other.compute_loss()


def test_a_plan_for_a_forward_that_was_replaced_is_refused(zoo: SimpleNamespace) -> None:
    plain, planned = _twins(zoo, lambda: Net(Block()))
    with _fit(planned) as fitted:
        plan = fitted.plan
    block = plain.model.blocks[2]
    block.forward = functools.partial(doubled, block)
    with (
        memfit.apply(plan, plain.model),
        pytest.raises(PlanFileError, match=r"no method of a module: partial\nhint: "),
    ):
        plain.compute_loss()
