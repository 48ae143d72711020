"""Benchmark cells on a GPU: peers that move memory, a cap; each in its own process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from memfit.bench.cell import CellSpec
from memfit.bench.machine import machine_facts
from memfit.bench.process import cell_processes, shared_folder
from memfit.bench.systems.catalogue import PEERS
from memfit.bench.workloads import named
from memfit.ir.bench import OK, OUT_OF_MEMORY, UNAVAILABLE, Cell, WorkloadSpec

FIELDS = ("n_layer=4", "n_embd=256", "n_head=4", "vocab_size=8000")
GPT2 = named(
    WorkloadSpec("", "transformers:gpt2", 8, 256, dtype="bf16", device="cuda", fields=FIELDS)
)
MIB = 2**20
LONGEST_S = 600  # a cell that compiles, on a busy machine
Run = Callable[..., Cell]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a cell, forked from a process that has imported everything and no CUDA."""
    cells = [CellSpec(GPT2, system, 10) for system in (*PEERS, "memfit:70%")]
    said: list[str] = []
    with shared_folder() as folder, cell_processes(cells, folder, said.append) as start:

        def one(system: str, cap_bytes: int | None = None, workload: WorkloadSpec = GPT2) -> Cell:
            cell = start(CellSpec(workload, system, 10, cap_bytes), LONGEST_S, None)
            assert not said
            return cell

        yield one


@pytest.fixture(scope="module")
def eager(run: Run) -> Cell:
    return run("eager")


def test_cells_are_forked_and_have_a_device(eager):
    assert eager.forked and eager.device == "cuda"


def test_parts_of_the_peak_add_up_to_it_within_five_percent(eager):
    assert eager.status == OK, eager.reason
    assert sum(eager.breakdown.values()) == pytest.approx(eager.peak_bytes, rel=0.02)
    assert eager.breakdown["optimizer_state"] > 0 and eager.retries == 0


def test_the_eager_step_against_itself_is_within_three_percent(eager):
    assert abs(eager.same_code_ratio - 1) < 0.03


@pytest.mark.parametrize("system", [*PEERS[1:], "offload-flags:async", "hf-checkpoint:every=2"])
def test_every_peer_runs_or_says_why_it_cannot(run, eager, system):
    cell = run(system)
    if cell.status == UNAVAILABLE:
        pytest.skip(f"{system}: {cell.reason}")
    if "'to_dealloc'" in (cell.reason or ""):
        pytest.xfail("torch 2.11 registers a wrong fake of streams::record_stream, which it uses")
    assert cell.status == OK, cell.reason
    assert cell.reference.kind == "eager" and cell.retries == 0
    assert cell.reference.peak_bytes == pytest.approx(eager.peak_bytes, rel=0.02)
    if system.startswith(("save-on-cpu", "checkpoint", "hf-checkpoint", "fsdp2", "torchao")):
        assert cell.peak_bytes < eager.peak_bytes


def test_a_plan_holds_its_budget_and_is_predicted(run, eager):
    cell = run("memfit:70% allow=+step_in_backward+tiled_loss")
    assert cell.status == OK, cell.reason
    plan = cell.planned
    assert plan.numbers_agree and plan.measured_reserved_bytes <= plan.budget_bytes
    assert cell.peak_bytes == pytest.approx(plan.measured_peak_bytes, rel=0.05)
    assert cell.peak_bytes < eager.peak_bytes


def test_a_plan_is_launched_as_cuda_graphs_where_the_host_holds_it_up(run):
    pytest.importorskip("torchvision")
    resnet = named(WorkloadSpec("", "torchvision:resnet18", 8, device="cuda"))
    cells = [run(f"memfit:80%{how}", workload=resnet) for how in ("", " launch=graphs")]
    assert [cell.status for cell in cells] == [OK, OK], [cell.reason for cell in cells]
    _, graphed = cells
    assert graphed.planned.numbers_agree
    assert graphed.planned.measured_reserved_bytes <= graphed.planned.budget_bytes
    assert not any("not launched" in note for note in graphed.planned.notes)
    assert graphed.ratio < cells[0].ratio


def test_under_a_cap_the_eager_step_is_out_of_memory_and_a_plan_is_not(run, eager):
    cap = int(0.7 * eager.reserved_bytes)
    assert run("eager", cap).status == OUT_OF_MEMORY
    cell = run(f"memfit:{cap - 64 * MIB}", cap)
    assert cell.status == OK, cell.reason
    assert cell.reserved_bytes <= cap
    assert any("the eager step does not fit" in note for note in cell.notes)


def test_a_second_budget_is_planned_from_the_first_ones_profile(run):
    other = named(replace(GPT2, batch=6))  # of which no other test left a profile
    first, second = (run(f"memfit:{budget}", workload=other) for budget in ("80%", "75%"))
    assert first.status == second.status == OK, (first.reason, second.reason)
    assert first.planned.profile_of is None and "recording memory" in first.stages
    assert second.planned.profile_of is not None and "recording memory" not in second.stages
    assert second.planned.measured_reserved_bytes <= second.planned.budget_bytes
    assert second.seconds < first.seconds


def test_this_process_takes_nothing_of_the_device():
    """Facts come from the driver: a CUDA context here would cost the cells memory."""
    facts = machine_facts("cuda")
    assert facts["name"] == torch.cuda.get_device_name(0)
    json.dumps(facts)


def test_the_same_cell_has_the_same_peak_twice(run, eager):
    again = run("eager")
    assert replace(again, breakdown={}).peak_bytes == pytest.approx(eager.peak_bytes, rel=0.001)
