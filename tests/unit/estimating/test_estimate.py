"""Estimates: what they hold, how they are asked for, and what they refuse."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import ModelError, UsageError
from memfit.estimating.eager import COMPILED_BESIDE_EAGER, eager_note
from memfit.estimating.estimate import estimate
from memfit.ir.cards import CARDS, GIB, MIB
from memfit.ir.codec import from_data, to_data
from memfit.ir.estimate import TECHNIQUES, WAYS, Estimate, Needs, first_way
from memfit.planning.techniques import AVAILABLE
from memfit.targets import resolve_target
from memfit.workload import Workload

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
SMALL = {"n_layer": "4", "n_embd": "64", "n_head": "2", "n_ff": "256", "vocab_size": "100"}


@pytest.fixture(scope="module")
def small() -> Estimate:
    return estimate("encoder", batch=8, seq=64, overrides=SMALL)


@pytest.fixture(scope="module")
def llama() -> Estimate:
    pytest.importorskip("transformers")
    return estimate("transformers:llama-8b", batch=1, seq=1024, dtype="bf16")


def test_a_llama_of_8b_has_16_bytes_of_state_per_parameter(llama: Estimate) -> None:
    assert llama.state_bytes_per_parameter == pytest.approx(16, rel=0.01)
    assert llama.static_bytes == pytest.approx(16 * 8.03e9, rel=0.01)


def test_a_llama_of_8b_takes_no_memory(llama: Estimate) -> None:
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert highest < 8 * GIB < llama.categories["parameters"] < llama.peak_bytes


def test_a_llama_of_8b_fits_as_it_is_on_the_largest_card_only(llama: Estimate) -> None:
    ways = {card.name: card.way for card in llama.cards}
    assert [name for name, way in ways.items() if way == "plain"] == ["H200"]
    assert ways["RTX 4090"] is None, "the parameters alone are larger"
    assert (
        llama.needs.optimizer_on_host_step_in_backward_bytes
        < 0.7 * llama.needs.optimizer_on_host_bytes
    )
    assert ways["H100"] == "optimizer on host"
    assert not llama.hopeless and "nothing memfit has" not in " ".join(llama.notes)


def test_an_optimizer_that_copies_all_it_works_on_is_told_of_a_fused_one() -> None:
    def wide() -> Workload:
        workload = resolve_target("encoder", batch=1, seq=8, overrides=SMALL)
        return replace(workload, optimizer=torch.optim.AdamW(workload.model.parameters()))

    assert "fused=True" in " ".join(estimate(wide).notes), "its peak is the optimizer's copy"
    assert "fused=True" not in " ".join(estimate("encoder", batch=1, seq=8, overrides=SMALL).notes)


def test_the_optimizer_of_a_file_was_taken_for_a_targets(tmp_path: Path) -> None:
    """A file's own AdamW steps over all tensors at once unless it says fused=True."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch, memfit\n"
        "from memfit.targets import resolve_target\n"
        "def workload():\n"
        f"    made = resolve_target('encoder', batch=1, seq=8, overrides={SMALL})\n"
        "    made.optimizer = torch.optim.AdamW(made.model.parameters())\n"
        "    return made\n"
    )
    of_file = estimate(f"{file}:workload")
    assert of_file.where == "optimizer"
    targets = estimate("encoder", batch=1, seq=8, overrides=SMALL, optimizer="adamw")
    assert targets.peak_bytes < of_file.peak_bytes
    told = estimate(f"{file}:workload", of_target=True)
    assert told.peak_bytes == targets.peak_bytes


def test_an_estimate_did_not_say_that_it_is_of_the_eager_step(small: Estimate) -> None:
    said = small.notes[0]
    assert "the peak is that of the eager step" in said and "is not estimated" in said
    on_cpu = estimate("encoder", as_on_cuda=False, batch=8, seq=64, overrides=SMALL)
    assert not any("eager" in note for note in on_cpu.notes), "compiling is usual on CUDA only"


@pytest.mark.parametrize("name", COMPILED_BESIDE_EAGER)
def test_compiled_peaks_that_are_named_stand_in_the_results(name: str) -> None:
    eager, compiled, files = COMPILED_BESIDE_EAGER[name]
    rows = "\n".join((RESULTS / file).read_text() for file in files)
    assert f"{eager} MB" in rows and f"{compiled} MB" in rows
    assert f"{name} {compiled / eager:.0%} of {eager} MB" in eager_note()
    assert all(file in eager_note() for file in files)


def test_attention_saves_no_scores(llama: Estimate) -> None:
    """32 heads x 1024 x 1024 scores of two bytes would be 64 MiB more in every layer."""
    layer = next(s for s in llama.segments if s.name == "model.layers.0")
    twice_the_tokens = estimate(
        "transformers:llama-8b",
        batch=1,
        seq=2048,
        dtype="bf16",
        overrides={"num_hidden_layers": "12"},
    )
    longer = next(s for s in twice_the_tokens.segments if s.name == "model.layers.0")
    casts = 416 * MIB  # of the layer's weights to bf16, the same for any length
    assert (longer.saved_bytes - casts) / (layer.saved_bytes - casts) == pytest.approx(2, rel=0.02)


def test_autocast_keeps_norms_and_losses_in_fp32() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = self.linear(x)
            seen.append((made.dtype, self.norm(made).dtype, made.softmax(-1).dtype))
            return self.norm(made)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).sum()

    def build() -> Workload:
        model = Net()
        return Workload(model, loss, torch.optim.SGD(model.parameters()), torch.ones(8, 64))

    seen: list[tuple[torch.dtype, ...]] = []
    estimate(build)
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}


def test_categories_sum_to_the_peak_and_ways_need_ever_less(small: Estimate) -> None:
    assert sum(small.categories.values()) == small.peak_bytes == small.needs.plain_bytes
    assert_more_needs_less(small.needs)
    assert small.needs.recompute_bytes < small.needs.plain_bytes
    layers = [s for s in small.segments if s.name.startswith("layers.")]
    assert len(layers) == 4 and len({s.saved_bytes for s in layers}) == 1
    assert small.flops > 0 and small.moved_bytes > small.peak_bytes


def test_no_way_needs_more_than_the_one_before_where_logits_are_the_peak() -> None:
    large = estimate("encoder", batch=8, seq=64, overrides=SMALL | {"vocab_size": "20000"})
    assert_more_needs_less(large.needs)
    assert large.needs.tiled_loss_bytes < large.needs.optimizer_on_host_bytes


def assert_more_needs_less(needs: Needs) -> None:
    """A way with all the techniques of another needs no more."""
    assert needs.recompute_bytes <= needs.plain_bytes
    sizes = dict(zip(WAYS, needs.in_order(), strict=True))
    for more, fewer in product(TECHNIQUES, TECHNIQUES):
        assert sizes[more] <= needs.recompute_bytes
        if set(TECHNIQUES[fewer]) <= set(TECHNIQUES[more]):
            assert sizes[more] <= sizes[fewer]


def test_ways_take_techniques_that_there_are() -> None:
    assert list(TECHNIQUES) == list(WAYS[2:])
    assert all(name in AVAILABLE for names in TECHNIQUES.values() for name in names)


def test_tiles_are_advised_before_state_on_the_host_where_they_suffice() -> None:
    wide = {"vocab_size": "20000"}
    large = estimate("encoder", batch=32, seq=256, overrides=SMALL | wide)
    budget = int(1.05 * large.needs.tiled_loss_bytes)
    assert budget < large.needs.recompute_bytes
    (only,) = estimate("encoder", budget, batch=32, seq=256, overrides=SMALL | wide).cards
    assert only.way == "loss in tiles"


def test_logits_are_not_needed_where_the_loss_is_in_tiles() -> None:
    wide = {"vocab_size": "20000"}
    large = estimate("encoder", batch=32, seq=256, overrides=SMALL | wide)
    logits = 4 * 32 * 256 * 20000
    saved = large.needs.optimizer_on_host_step_in_backward_bytes - large.needs.all_bytes
    assert saved > 1.5 * logits, "they and their gradient"
    budget = int(1.03 * large.needs.all_bytes) + 1
    (only,) = estimate("encoder", budget, batch=32, seq=256, overrides=SMALL | wide).cards
    assert only.way == "all of these"


def test_tensors_on_meta_take_no_memory() -> None:
    """The loss in tiles asks one what shape a view of the logits has: it counted as large."""
    made = estimate("encoder", batch=8, seq=64, overrides=SMALL)

    def asks() -> Workload:
        workload = resolve_target("encoder", batch=8, seq=64, overrides=SMALL)
        workload.optimizer.param_groups[0]["fused"] = True  # as the target's is on CUDA
        loss = workload.loss_fn

        def asking(model: nn.Module, batch: Any) -> torch.Tensor:
            assert torch.empty(1 << 40, device="meta").view(2, -1).shape[0] == 2
            return loss(model, batch)

        return replace(workload, loss_fn=asking)

    assert estimate(asks).needs == made.needs


def test_a_model_without_logits_needs_no_tiles() -> None:
    def build() -> Workload:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters())
        batch = torch.ones(2, 3, 16, 16)
        return Workload(model, lambda model, batch: model(batch).mean(), optimizer, batch)

    needs = estimate(build).needs
    assert needs.tiled_loss_bytes == needs.recompute_bytes
    assert needs.tiled_loss_step_in_backward_bytes == needs.step_in_backward_bytes
    assert needs.all_bytes == needs.optimizer_on_host_step_in_backward_bytes


def test_every_card_is_answered_unless_one_is_named(small: Estimate) -> None:
    assert [card.name for card in small.cards] == [card.name for card in CARDS]
    assert all(card.fits and card.headroom_bytes > 0 for card in small.cards)
    assert all(card.guessed_step_s is not None for card in small.cards)
    one = estimate("encoder", "rtx4090", batch=2, seq=16, overrides=SMALL)
    assert [card.name for card in one.cards] == ["RTX 4090"]


@pytest.mark.parametrize("device", ["2MiB", 2 * MIB, str(2 * MIB)])
def test_a_budget_is_bytes(device: str | int) -> None:
    made = estimate("encoder", device, batch=8, seq=64, overrides=SMALL)
    (only,) = made.cards
    assert (only.usable_bytes, only.way, only.guessed_step_s) == (2 * MIB, None, None)
    assert not made.fits and only.headroom_bytes < 0


def test_parameters_that_are_larger_than_the_budget_are_named() -> None:
    made = estimate("encoder", "200KB", batch=1, seq=8, overrides=SMALL)
    assert 200_000 < made.trained_bytes <= made.categories["parameters"]
    assert made.hopeless and made.cards[0].way is None
    assert "nothing memfit has now makes it fit: the parameters alone take" in made.notes[-1]
    larger = estimate("encoder", made.trained_bytes, batch=1, seq=8, overrides=SMALL)
    assert not larger.hopeless and not any("nothing memfit" in note for note in larger.notes)


def test_frozen_parameters_are_not_counted_as_trained() -> None:
    def frozen() -> Workload:
        workload = resolve_target("encoder", batch=1, seq=8, overrides=SMALL)
        next(workload.model.parameters()).requires_grad_(False)
        return workload

    made = estimate(frozen)
    assert 0 < made.trained_bytes < made.categories["parameters"]


def test_the_first_way_that_fits_is_taken() -> None:
    needs = Needs(800, 700, 600, 500, 400, 300, 200, 100)
    for way, size in zip(WAYS, needs.in_order(), strict=True):
        assert first_way(needs, int(size * 1.03)) == way
    assert first_way(needs, 100) is None, "the allocator needs a little more than its tensors"


def test_json_round_trip(small: Estimate) -> None:
    assert from_data(Estimate, json.loads(json.dumps(to_data(small)))) == small
    printed = json.loads(json.dumps(small.to_json()))
    assert (printed["schema_version"], printed["fits"]) == (2, True)
    assert printed["step"] == "eager" and list(small.notes) == printed["notes"]
    assert printed["cards"][0]["headroom_bytes"] == small.cards[0].headroom_bytes


def test_a_workload_of_fake_tensors_is_taken_as_it_is(small: Estimate) -> None:
    with torch._subclasses.FakeTensorMode():
        workload = resolve_target("encoder", batch=8, seq=64, overrides=SMALL)
    workload.optimizer.param_groups[0]["fused"] = True  # as the target's is on CUDA
    assert estimate(workload) == small


def test_blocks_called_twice_are_two_segments(zoo: SimpleNamespace) -> None:
    made = estimate(lambda: zoo.workload(zoo.Reused))
    assert {"blocks.0#1", "blocks.0#2"} <= {segment.name for segment in made.segments}


def test_unknown_cards_and_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown card"):
        estimate("encoder", "rtx9999")
    with pytest.raises(UsageError, match="not a budget"):
        estimate("encoder", 0)


def test_calls_that_mean_nothing_are_refused() -> None:
    wrong: Any
    for wrong in (None, 5, ["encoder"]):
        with pytest.raises(UsageError, match=f"{type(wrong).__name__} cannot be estimated") as said:
            estimate(wrong)
        assert "memfit.Workload" in (said.value.hint or "")
    with pytest.raises(UsageError, match="no option 'bach'") as said:
        estimate("encoder", "4090", bach=1)
    assert "batch, seq, dtype" in (said.value.hint or "")
    wrong = lambda: None  # noqa: E731
    with pytest.raises(UsageError, match=r"returned a NoneType, not a memfit\.Workload"):
        estimate(wrong)


def test_options_belong_to_a_name(zoo: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match="batch can be given with a target's name only"):
        estimate(zoo.workload(zoo.Stack), batch=4)


def test_a_workload_on_meta_is_refused() -> None:
    workload = resolve_target("encoder", device="meta", overrides=SMALL)
    with pytest.raises(UsageError, match="meta device"):
        estimate(workload)


def test_shapes_that_follow_from_data_are_refused(zoo: SimpleNamespace) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        made = model(batch)
        return made[made > 0].sum()

    with pytest.raises(ModelError, match="shape that depends on the data"):
        estimate(lambda: zoo.workload(zoo.Stack, loss=loss))


@pytest.mark.parametrize(
    ("make", "state_bytes"),
    [
        (lambda parameters: torch.optim.SGD(parameters), 8),
        (lambda parameters: torch.optim.Adagrad(parameters), 12),
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), 16),
        (lambda parameters: torch.optim.Adam(parameters, capturable=True), 16),
    ],
    ids=["sgd", "adagrad", "fused", "capturable"],
)
def test_state_of_optimizers(make: Any, state_bytes: int) -> None:
    def build() -> Workload:
        workload = resolve_target("encoder", batch=2, seq=16)
        workload.optimizer = make(workload.model.parameters())
        return workload

    assert estimate(build).state_bytes_per_parameter == pytest.approx(state_bytes, rel=0.01)


def test_a_compiled_model_is_refused(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.Stack)
    workload.model.head.compile(backend="eager")
    with pytest.raises(UsageError, match=r"torch\.compile"):
        estimate(workload)


def test_the_guess_knows_what_torch_may_use_for_fp32() -> None:
    def guess() -> float | None:
        return estimate("encoder", "a100", batch=64, seq=128).cards[0].guessed_step_s

    plain = guess()
    torch.set_float32_matmul_precision("high")
    try:
        faster = guess()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert faster is not None and plain is not None and faster < plain
