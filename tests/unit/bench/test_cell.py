"""Cells as they run: what they measure, and how they end when something goes wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from memfit.bench.cell import CellSpec, build, run_cell
from memfit.bench.process import run_in_process
from memfit.bench.workloads import named
from memfit.ir.bench import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    UNAVAILABLE,
    Cell,
    WorkloadSpec,
)
from memfit.measure.memory import static_bytes
from memfit.measure.step import run_step

FIELDS = ("n_layer=3", "n_embd=32", "n_head=2", "n_ff=64", "vocab_size=50")
TINY = named(WorkloadSpec("", "encoder", 4, 16, device="cpu", fields=FIELDS))


def run(system: str, workload: WorkloadSpec = TINY) -> Cell:
    return run_cell(CellSpec(workload, system, steps=3))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of their own take as many threads as this one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def eager() -> Cell:
    return run("eager")


def test_the_eager_cell_is_its_own_reference_and_knows_its_parts(eager):
    assert eager.status == OK and eager.reference is not None
    assert eager.reference.kind == "eager" and 3 <= eager.samples <= 15
    for found in (eager.by_rounds, eager.reference.again_by_rounds):
        assert found.low <= found.ratio <= found.high
    assert eager.ratio == eager.by_rounds.ratio
    # Nothing of the step is left over, so its peak is the recorded one to some bytes.
    assert abs(eager.peak_bytes - eager.reference.peak_bytes) < 1024
    assert abs(sum(eager.breakdown.values()) - eager.peak_bytes) < 0.01 * eager.peak_bytes
    assert eager.breakdown["optimizer_state"] > eager.breakdown["parameters"] > 0


def test_checkpointed_blocks_take_less_than_the_eager_step():
    cell = run("checkpoint")
    half = run("checkpoint:half")
    assert cell.status == half.status == OK
    assert cell.peak_bytes < half.peak_bytes < cell.reference.peak_bytes


def test_a_plan_has_promise_and_measurement():
    cell = run("memfit:85% executor=module")
    assert cell.status == OK, cell.reason
    plan = cell.planned
    assert plan.executor == "module" and plan.numbers_agree and plan.bitwise
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.predicted_peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.02)
    assert cell.peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.02)
    assert 0 < len(plan.chosen) <= plan.segments
    assert plan.measured_added_s == pytest.approx((plan.measured_ratio - 1) * plan.unplanned_step_s)


def test_a_cut_of_activations_and_the_unplanned_step():
    cut = run("memfit-cut:30% executor=module")
    assert cut.status == OK, cut.reason
    plan = cut.planned
    activations = plan.unplanned_peak_bytes - plan.static_bytes
    assert plan.measured_saved_bytes >= 0.3 * activations
    unplanned = run("memfit:none executor=module")
    assert unplanned.planned.chosen == ()
    assert unplanned.planned.estimated_saved_bytes == 0


def test_an_impossible_budget_is_refused_with_its_minimum():
    cell = run("memfit:1000 executor=module")
    assert cell.status == REFUSED and cell.reason.startswith("the minimum is ")


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        ("save-on-cpu", "nothing to move it from"),
        ("offload-flags", "nothing to offload it from"),
        ("hf-checkpoint", "Encoder has no gradient checkpointing"),
    ],
)
def test_a_system_that_cannot_run_says_why(system, reason):
    cell = run(system)
    assert cell.status == UNAVAILABLE and reason in cell.reason


def test_a_system_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr("memfit.bench.systems.catalogue.find_spec", lambda name: None)
    assert run("torchao-offload").reason == "torchao is not installed"
    assert run("deepspeed-offload").reason == "deepspeed is not installed"


def test_a_workload_whose_package_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr("memfit.bench.workloads.find_spec", lambda name: None)
    cell = run("eager", named(WorkloadSpec("", "torchvision:resnet50", 2, device="cpu")))
    assert cell.status == UNAVAILABLE and cell.reason == "torchvision is not installed"


def test_transformers_own_checkpointing_comes_and_goes():
    pytest.importorskip("transformers")
    fields = ("n_layer=3", "n_embd=32", "n_head=2", "vocab_size=50", "n_positions=32")
    gpt2 = named(WorkloadSpec("", "transformers:gpt2", 2, 16, device="cpu", fields=fields))
    every = run("hf-checkpoint", gpt2)
    assert every.status == OK, every.reason
    assert every.peak_bytes < every.reference.peak_bytes
    some = run("hf-checkpoint:every=2", gpt2)
    if some.status == UNAVAILABLE:
        assert "has no every_n_layers" in some.reason
    else:
        assert every.peak_bytes < some.peak_bytes < every.reference.peak_bytes


def test_the_largest_batch_is_larger_with_a_plan():
    cell = run("largest-batch:6MiB executor=module")
    assert cell.status == OK, cell.reason
    assert cell.largest.planned_size > cell.largest.plain_size > 4


def test_fsdp2_on_one_rank_keeps_what_the_model_has(eager):
    """In a process of its own: a process group can be joined once."""
    cell = run_in_process(CellSpec(TINY, "fsdp2-offload", steps=3), 120)
    assert cell.status == OK, cell.reason
    assert cell.reference.peak_bytes == pytest.approx(eager.peak_bytes, rel=0.01)
    static = sum(static_bytes(build(TINY)).values())  # before there is optimizer state
    assert cell.peak_bytes > 3 * static * 0.9  # parameters and two states of Adam
    assert cell.ratio > 0


@pytest.mark.slow
def test_compiled_systems():
    """Real compilations, of a model small enough for seconds."""
    whole, blocks = run("compile"), run("blocks:0.2")
    both = run("checkpoint-compiled")
    for cell in (whole, blocks, both):
        assert cell.status == OK, cell.reason
        assert cell.first_steps_s > cell.step_s
    assert both.peak_bytes < both.reference.peak_bytes


@pytest.mark.slow
def test_torch_offloads_the_tensors_that_are_marked(monkeypatch):
    """On the CPU there is nowhere to move them, but torch takes the same marks and flags."""
    pytest.importorskip("torch._functorch._activation_offloading")
    from torch._functorch import config as functorch_config
    from torch._functorch._activation_offloading import activation_offloading

    from memfit.bench.systems.peers import offload_flags

    monkeypatch.setattr(offload_flags, "SMALLEST_BYTES", 1024)
    chosen: list[int] = []
    choose = activation_offloading.choose_offload_sets

    def watched(forward, *rest):
        moves = choose(forward, *rest)
        marked = [n for n in forward.graph.nodes if n.meta.get("saved_for_offloading")]
        chosen.append(len(marked) if moves else 0)
        return moves

    monkeypatch.setattr(activation_offloading, "choose_offload_sets", watched)
    spec = replace(TINY, fields=(*FIELDS, "dropout=0"))
    plain, moved = build(spec), build(spec)
    run_step(plain)
    with functorch_config.patch(enable_autograd_cache=False):  # or an earlier run's is taken
        offload_flags.compiled_with_flags(moved, "").step()
    assert chosen and min(chosen) > 0
    for name, parameter in plain.model.named_parameters():
        assert torch.allclose(parameter, moved.model.get_parameter(name), atol=1e-4), name


def test_out_of_memory_is_marked(file_target):
    spec = file_target("raise torch.OutOfMemoryError('CUDA out of memory. Tried 9 GiB')")
    cell = run("eager", spec)
    assert cell.status == OUT_OF_MEMORY and "does not fit" in cell.reason


def test_where_the_eager_step_does_not_fit_the_unplanned_one_stands_in(monkeypatch):
    from memfit.bench import cell as module

    monkeypatch.setattr(module, "_eager", lambda run, workload: None)
    cell = run("checkpoint")
    assert cell.status == OK, cell.reason
    assert cell.reference.kind == "unplanned" and cell.ratio > 0


def test_an_error_in_the_step_is_a_row_with_its_message(file_target):
    cell = run("eager", file_target("raise ValueError('no such thing')"))
    assert cell.status == FAILED and cell.reason == "ValueError: no such thing"


def test_a_model_without_blocks_cannot_be_checkpointed(file_target):
    cell = run("checkpoint", file_target("pass"))
    assert cell.status == UNAVAILABLE and "no blocks" in cell.reason


@pytest.mark.parametrize(
    ("on_disk", "counted", "label"),
    [
        ((0, 4), {"miss": 4}, "cold"),
        ((0, 4), {"hit": 4}, "cold"),  # compiled by other processes of this cell
        ((9, 9), {"hit": 4}, "cached: 4 of 4 graphs were on disk"),
        ((9, 10), {"hit": 3, "miss": 1}, "cached: 3 of 4 graphs were on disk"),
        ((9, 12), {"hit": 4}, "cached: 1 of 4 graphs were on disk"),
        ((9, 13), {"miss": 4}, "compiled, but kernels of earlier cells may be on disk"),
    ],
)
def test_compiled_code_says_where_it_came_from(tmp_path, monkeypatch, on_disk, counted, label):
    from torch._dynamo.utils import counters

    from memfit.bench.cell import COMPILED_CODE, _compiled, _graphs_on_disk

    monkeypatch.setenv(COMPILED_CODE, str(tmp_path))
    counts = {f"fxgraph_cache_{name}": number for name, number in counted.items()}
    monkeypatch.setitem(counters, "inductor", counts)
    for number in range(on_disk[0]):
        (tmp_path / "fxgraph" / "xy" / str(number)).mkdir(parents=True)
    before = _graphs_on_disk()
    for number in range(*on_disk):
        (tmp_path / "fxgraph" / "xy" / str(number)).mkdir(parents=True)
    assert _compiled(before).label == label
    counts.clear()
    assert _compiled(before) is None
