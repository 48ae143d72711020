"""Values that a constructor reads are real, or the estimate says that they were guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import ModelError
from memfit.estimating.estimate import estimate
from memfit.estimating.fakes import without_memory
from memfit.workload import Workload


class Drop(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, self.rate)


class Reading(nn.Module):
    """Widths as torchvision's RegNet has them, stages as timm's, rates as timm's ViT."""

    def __init__(self) -> None:
        super().__init__()
        exact = torch.arange(6) * 9.5 + 16
        widths = (torch.round(torch.divide(2.0 ** torch.log2(exact), 8)) * 8).int().tolist()
        stages, depths = torch.unique(torch.tensor(widths), return_counts=True)
        assert len(stages) == len(depths) == len(set(widths))
        rates = [x.item() for x in torch.linspace(0, 0.0, len(widths))]
        self.gates = nn.ModuleList(Drop(rate) if rate else nn.Identity() for rate in rates)
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        if torch.isfinite(torch.ones(4)).all() and int(depths.sum()) == len(widths):
            self.head = nn.Linear(widths[-1], 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = gate(layer(x))
        return self.head(x)


class Drawn(nn.Module):
    """As wide as random numbers, and as large ones, say."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(3, int(torch.randint(2, 9, ()).item()))
        self.wide = nn.Linear(self.narrow.out_features, int(torch.zeros(1 << 20).sum().item()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(x))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(8)
        self.layer = nn.Linear(3, len(drawn[drawn > 0]))


def workload(make: Callable[[], nn.Module]) -> Workload:
    model = make()
    return Workload(
        model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters()), torch.randn(7, 3)
    )


def test_a_model_that_reads_its_widths_is_built_as_it_is() -> None:
    real = Reading()
    made = estimate(lambda: workload(Reading))
    count = sum(p.numel() for p in real.parameters())
    assert f"{count:,} parameters" in made.workload["model"]
    assert made.categories["parameters"] >= 4 * count
    assert not any("may be another" in note for note in made.notes)
    with without_memory("a target") as fakes, fakes.values.building():
        assert repr(Reading()) == repr(real)


def test_a_guessed_number_is_named() -> None:
    made = estimate(lambda: workload(Drawn))
    (note,) = (note for note in made.notes if "may be another" in note)
    assert note.count("test_values.py:") == 2 and "taken as 1" in note
    assert "Drawn with 6 parameters" in made.workload["model"]
    assert note in json.loads(json.dumps(made.to_json()))["notes"]


def test_a_shape_made_of_random_numbers_is_refused() -> None:
    with pytest.raises(ModelError, match=r"test_values\.py:\d+ calls aten\.index") as caught:
        estimate(lambda: workload(Chosen))
    assert caught.value.hint is not None and "memfit profile" in caught.value.hint


def test_guesses_in_the_step_are_not_those_of_building() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made = model(batch).sum()
        return made if made.item() else -made

    made = estimate(lambda: replace(workload(Reading), loss_fn=loss))
    assert not any("may be another" in note for note in made.notes)


def written_through_a_view() -> torch.Tensor:
    x = torch.zeros(2, 3)
    x.view(6)[4] = 7
    x.t()[0].add_(1)
    return x


def moved_in_place() -> torch.Tensor:
    x = torch.arange(3).reshape(1, 3)
    return x.squeeze_(0).unsqueeze_(1).t_()


def filled_afterwards() -> torch.Tensor:
    x = torch.empty(3).normal_()
    nn.init.constant_(x, 2.5)
    return torch.cat([x, torch.ones_like(torch.randn(2)), x.new_full((1,), 3)])


def of_a_parameter() -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(3))
    with torch.no_grad():
        parameter.mul_(4)
    return parameter.detach().bfloat16()


def of_another_device() -> torch.Tensor:
    return torch.eye(2, device="cuda:0").cumsum(0)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (written_through_a_view, [[1, 0, 0], [1, 7, 0]]),
        (moved_in_place, [[0, 1, 2]]),
        (filled_afterwards, [2.5, 2.5, 2.5, 1, 1, 3]),
        (of_a_parameter, [4, 4, 4]),
        (of_another_device, [[1, 0], [1, 1]]),
        (lambda: torch.tensor([1, 2, 1]).unique(), [1, 2]),
        (lambda: torch.tensor([3, 0, 4]).nonzero().flatten().split([1, 1])[1], [2]),
        (lambda: torch.empty(0), []),
    ],
)
def test_small_tensors_have_values(make: Callable[[], torch.Tensor], values: list[Any]) -> None:
    with without_memory("a target") as fakes, fakes.values.building():
        assert make().tolist() == values
    assert not fakes.values.notes()


def overwritten() -> torch.Tensor:
    x = torch.zeros(2)
    x[0] = torch.randn(())
    return x


@pytest.mark.parametrize(
    "make",
    [overwritten, lambda: torch.zeros(2) + torch.rand(2), lambda: torch.empty(2)],
    ids=["overwritten", "added", "empty"],
)
def test_what_is_random_has_none(make: Callable[[], torch.Tensor]) -> None:
    with without_memory("a target") as fakes, fakes.values.building():
        assert make().tolist() == [1, 1]
    assert len(fakes.values.notes()) == 1


def test_values_of_building_are_known_in_the_step_until_they_are_written() -> None:
    with without_memory("a target") as fakes:
        with fakes.values.building():
            x = torch.full((2,), 3)
        assert x.tolist() == [3, 3]
        x.add_(1)
        assert x.tolist() == [1, 1]
    assert not fakes.values.notes()


def test_large_tensors_take_no_memory() -> None:
    with without_memory("a target") as fakes, fakes.values.building():
        row = torch.arange(1 << 13)
        assert int((row[:, None] * row).sum()) == 1
        assert int(torch.ones(1).expand(1 << 40).sum()) == 1
    assert len(fakes.values.notes()) == 1
