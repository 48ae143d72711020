"""Which modules become segments."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.capture.discover import discover
from memfit.capture.find import find_segments
from memfit.errors import ModelError, UsageError
from memfit.workload import Workload


def _names(workload: Workload, patterns: list[str] | None = None) -> list[str]:
    segments, _ = find_segments(workload, patterns)
    return [s.visit.module for s in segments]


def test_repeated_blocks_are_segments_and_single_layers_stay_single(zoo: SimpleNamespace) -> None:
    segments, off = find_segments(zoo.workload(zoo.Stack))
    names = [s.visit.module for s in segments]
    assert names == ["stem", *(f"blocks.{i}" for i in range(4)), "head"]
    assert [s.visit.leaf for s in segments] == [True, False, False, False, False, True]
    assert [bool(s.linked) for s in segments] == [False, True, True, True, True, True]
    assert off == ()


def test_stages_in_sequentials_are_opened(zoo: SimpleNamespace) -> None:
    names = _names(zoo.workload(zoo.ConvNet, zoo.images))
    assert names == ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head"]


def test_a_module_called_twice_gives_two_segments(zoo: SimpleNamespace) -> None:
    segments, _ = find_segments(zoo.workload(lambda: zoo.Reused(blocks=2)))
    calls = [(s.visit.module, s.visit.number, s.visits) for s in segments]
    assert calls == [
        ("stem", 0, 1),
        ("blocks.0", 0, 2),
        ("blocks.1", 0, 2),
        ("blocks.0", 1, 2),
        ("blocks.1", 1, 2),
        ("head", 0, 1),
    ]


def test_a_module_its_parent_bypasses_is_no_segment(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.AttentionNet)
    assert "layers.0.attention.out_proj" in dict(workload.model.named_modules())
    called = {v.module for v in discover(workload).root.walk()}
    assert "layers.0.attention" in called
    assert "layers.0.attention.out_proj" not in called
    assert _names(workload) == ["stem", "layers.0", "layers.1", "layers.2", "head"]


def test_a_block_that_holds_most_is_split(zoo: SimpleNamespace) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = zoo.Stack(blocks=1)
            self.second = nn.Linear(4, 8)
            self.third = zoo.Stack(blocks=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x)))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x))

    names = _names(zoo.workload(Whole))
    # The body holds nearly all, and each of its halves more than a fifth: both are opened.
    assert "body" not in names
    assert names[0] == "body.first.stem"
    assert {"body.first.blocks.0", "body.second", "body.third.blocks.0", "head"} <= set(names)


def test_a_block_without_parts_that_cover_it_stays_whole(zoo: SimpleNamespace) -> None:
    class Heavy(nn.Module):
        """Saves much outside of its children: splitting would lose that."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = zoo.Block(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(20):
                x = torch.tanh(x) * torch.sigmoid(x)
            return self.inner(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.heavy = Heavy()
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.heavy(self.stem(x)))

    assert _names(zoo.workload(Whole)) == ["stem", "heavy", "head"]


def test_patterns_name_the_segments(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    assert _names(workload, ["blocks.*"]) == [f"blocks.{i}" for i in range(4)]
    assert _names(workload, ["head", "blocks.[01]"]) == ["blocks.0", "blocks.1", "head"]
    assert _names(workload, ["blocks.*.up"]) == [f"blocks.{i}.up" for i in range(4)]
    layers = _names(workload, ["**"])
    assert "blocks.0.up" in layers and "blocks.0" not in layers


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["layers.*"], "no module called in the step has a name like 'layers.*'"),
        (["blocks.*", "nothing"], "'nothing'"),
        (["blocks.0", "blocks.*.up"], "'blocks.0.up' lies inside segment 'blocks.0'"),
    ],
)
def test_wrong_patterns_are_refused(zoo: SimpleNamespace, patterns: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        _names(zoo.workload(zoo.Stack), patterns)
    assert says in str(refusal.value)
    assert refusal.value.hint


def test_a_pattern_for_a_module_that_is_never_called_is_refused(zoo: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="no module called in the step"):
        _names(zoo.workload(zoo.AttentionNet), ["layers.*.attention.out_proj"])


def test_inplace_at_the_start_of_a_block_is_switched_off(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.PreActivationNet, zoo.images)
    segments, off = find_segments(workload)
    assert off == tuple(f"blocks.{i}.relu" for i in range(4))
    assert [s.pinned for s in segments if s.visit.module.startswith("blocks")] == [None] * 4
    assert all(block.relu.inplace for block in workload.model.blocks), "restored after looking"


def test_inplace_whose_effect_is_read_is_left_on_and_pins_the_block(zoo: SimpleNamespace) -> None:
    """Without the in-place ReLU the shortcut would add another tensor: other numbers."""
    workload = zoo.workload(lambda: zoo.PreActivationNet(reads_input=True), zoo.images)
    segments, off = find_segments(workload)
    assert off == ()
    blocks = [s for s in segments if s.visit.module.startswith("blocks")]
    assert len(blocks) == 4
    assert all(s.pinned == "changes its input in place" for s in blocks)


def test_inplace_inside_a_block_is_left_alone(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(lambda: zoo.ConvNet(inplace=True), zoo.images)
    segments, off = find_segments(workload)
    assert off == ()
    assert not any(s.pinned for s in segments)


def test_functional_inplace_on_the_input_pins_the_block(zoo: SimpleNamespace) -> None:
    class InPlace(zoo.Block):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(0.5))

    class Net(zoo.Stack):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__(blocks=2)
            self.blocks[1] = InPlace()

    segments, off = find_segments(zoo.workload(Net))
    pinned = {s.visit.module: s.pinned for s in segments}
    assert off == ()
    assert pinned["blocks.1"] == "changes its input in place"
    assert pinned["blocks.0"] is None


def test_code_that_changes_a_blocks_input_after_it_ran_pins_the_block(
    zoo: SimpleNamespace,
) -> None:
    class Net(zoo.Stack):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            y = self.blocks[0](x)
            x.add_(1)
            return self.head(self.blocks[1](y + x))

    segments, _ = find_segments(zoo.workload(lambda: Net(blocks=2)))
    assert {s.visit.module for s in segments if s.pinned} == {"blocks.0"}


def test_saving_between_two_blocks_unlinks_them(zoo: SimpleNamespace) -> None:
    class Net(zoo.Stack):  # type: ignore[name-defined]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.stem(x))
            self.extra = torch.tanh(x).mean()
            x = self.blocks[1](x)
            return self.head(self.blocks[2](x)) + self.extra

    segments, _ = find_segments(zoo.workload(lambda: Net(blocks=3)))
    linked = {s.visit.module: bool(s.linked) for s in segments}
    assert linked == {
        "stem": False,
        "blocks.0": True,
        "blocks.1": False,
        "blocks.2": True,
        "head": True,
    }


def test_buffers_changed_in_forward_are_noticed_but_not_running_statistics(
    zoo: SimpleNamespace,
) -> None:
    segments, _ = find_segments(zoo.workload(zoo.CountingNet))
    changed = {s.visit.module: s.visit.mutated_buffers for s in segments}
    assert changed["blocks.1"] == ("count", "average")
    assert changed["stem"] == ()
    segments, _ = find_segments(zoo.workload(zoo.ConvNet, zoo.images))
    assert not any(s.visit.mutated_buffers for s in segments)


def test_a_step_that_calls_no_module_is_refused(zoo: SimpleNamespace) -> None:
    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return (batch @ model.stem.weight.T).sum()

    with pytest.raises(ModelError, match="calls no module") as refusal:
        find_segments(zoo.workload(zoo.Stack, loss=loss))
    assert refusal.value.hint and refusal.value.exit_code == 3


def _saved_by_hooks(workload: Workload, names: list[str]) -> dict[str, int]:
    """Bytes that each module saves, seen by hooks of its own; weights and the batch left out."""
    static = [*workload.model.parameters(), *workload.model.buffers(), *workload.batch_tensors()]
    known = {t.untyped_storage().data_ptr() for t in static}
    sizes: dict[str, dict[int, int]] = {name: {} for name in names}
    alive = []  # so that no address is used twice

    def watch(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            alive.append(storage)
            if storage.data_ptr() not in known:
                sizes[name][storage.data_ptr()] = storage.nbytes()
            return tensor

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(*args, **kwargs)

        return call

    modules = dict(workload.model.named_modules())
    for name in names:
        modules[name].forward = watch(name, modules[name].forward)
    workload.compute_loss()
    for name in names:
        del modules[name].forward
    return {name: sum(found.values()) for name, found in sizes.items()}


@pytest.mark.parametrize("kind", ["Stack", "ConvNet", "AttentionNet"])
def test_saved_bytes_are_those_that_other_hooks_see(zoo: SimpleNamespace, kind: str) -> None:
    batch = zoo.images if kind == "ConvNet" else zoo.sequences
    workload = zoo.workload(getattr(zoo, kind), batch)
    segments, _ = find_segments(workload)
    found = {s.visit.module: s.visit.saved_bytes for s in segments}
    expected = _saved_by_hooks(workload, list(found))
    assert sum(expected.values()) > 0
    for name, size in found.items():
        assert size == pytest.approx(expected[name], rel=0.05), name


def test_a_model_used_twice_in_one_loss(zoo: SimpleNamespace) -> None:
    def contrast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - model(batch.flip(0))).square().mean()

    segments, _ = find_segments(zoo.workload(zoo.Siamese, loss=contrast))
    calls = [(s.visit.module, s.visit.number) for s in segments if not s.visit.leaf]
    blocks = [f"stack.blocks.{i}" for i in range(3)]
    assert calls == [*((b, 0) for b in blocks), *((b, 1) for b in blocks)]


def _cross_entropy(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch).flatten(0, -2)
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def test_a_loss_outside_of_the_model_is_the_last_segment_if_asked_for(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack, loss=_cross_entropy)
    segments, _ = find_segments(workload, loss=True)
    assert [s.visit.module for s in segments] == [*_names(workload), "loss()"]
    assert not segments[-1].visit.leaf


def test_a_model_without_blocks_is_opened_beside_its_loss(zoo: SimpleNamespace) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    segments, _ = find_segments(zoo.workload(layers, loss=_cross_entropy), loss=True)
    assert [s.visit.module for s in segments] == ["0", "1", "2", "loss()"]


def test_losses_stay_as_they_are_where_one_lies_inside_a_segment(zoo: SimpleNamespace) -> None:
    class Judged(zoo.Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y + nn.functional.cross_entropy(y, torch.zeros_like(y)).detach()

    def judging() -> nn.Module:
        model = zoo.Stack()
        model.blocks = nn.ModuleList(Judged() for _ in range(3))
        return model

    segments, _ = find_segments(zoo.workload(judging, loss=_cross_entropy), loss=True)
    assert "loss()" not in {s.visit.module for s in segments}
