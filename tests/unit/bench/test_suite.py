"""Which cells there are, what is missing, and what is kept."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from memfit.bench.cell import NO_ROOM
from memfit.bench.suite import Settings, in_order, missing_cells, open_report, plan_cells, run_cells
from memfit.bench.systems.catalogue import (
    FAMILIES,
    check_system,
    memfit_name,
    memfit_options,
)
from memfit.bench.workloads import SUITES, check_target, named, parse_sizes, suite_of
from memfit.errors import UsageError
from memfit.ir.bench import CRASHED, OK, TIMED_OUT, BenchReport, Cell, WorkloadSpec

MACHINE = {"device": "cpu", "torch": "2.13.0"}
SETTINGS = Settings(steps=10)


def specs(*batches: int) -> list[WorkloadSpec]:
    return [named(WorkloadSpec("", "encoder", batch, 32)) for batch in batches]


def run_all(report, cells, path, run, end=None):
    return run_cells(
        report, cells, SETTINGS, lambda r, _: r.save(path), started=lambda s: None, run=run, end=end
    )


def test_the_suites_are_those_of_the_specification():
    names = [w.name for w in SUITES["peers"].workloads]
    assert names == [
        "resnet50@64",
        "resnet152@64",
        "vit_b_16@64",
        "encoder@256x128",
        "gpt2-large@8x1024 bf16",
    ]
    sweep = SUITES["sweep"].workloads
    assert [w.batch for w in sweep if "resnet" in w.name] == [4, 8, 16, 32, 64]
    assert [w.batch for w in sweep if "encoder" in w.name] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert [w.name for w in SUITES["savings"].workloads] == ["resnet50@16", "vit_b_16@16"]
    for suite in SUITES.values():
        cells = plan_cells(suite.workloads, suite.systems, SETTINGS, also=suite.also)
        more = [(c.workload.name, c.system) for c in cells if c.system not in suite.systems]
        assert more == [(name, system) for name in suite.also for system in suite.also[name]]
    with pytest.raises(UsageError, match="did you mean peers"):
        suite_of("peer")


@pytest.mark.parametrize(
    ("system", "stored"),
    [
        ("eager", "eager"),
        (" compile:0.5 ", "compile:0.5"),
        ("compile:graphs", "compile:graphs"),
        ("checkpoint:half", "checkpoint:half"),
        ("hf-checkpoint:every=2", "hf-checkpoint:every=2"),
        ("memfit: 60%", "memfit:60%"),
        ("memfit:none", "memfit:none"),
        ("memfit:16GiB allow=+offload+tiled_loss executor=graph",) * 2,
        ("memfit-cut:40%", "memfit-cut:40%"),
        ("memfit:60% launch=graphs", "memfit:60% launch=graphs"),
        ("largest-batch:8GiB", "largest-batch:8GiB"),
    ],
)
def test_systems_by_name(system, stored):
    assert check_system(system) == stored


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("eagre", "did you mean eager"),
        ("", "unknown system ''"),
        ("eager:1", "it takes no argument"),
        ("compile:2", "between 0 and 1"),
        ("compile:half", "means nothing"),
        ("checkpoint:third", "after the colon stands half"),
        ("hf-checkpoint:every=0", "every=N"),
        ("memfit:lots", "not a number of bytes"),
        ("memfit:", "not a number of bytes"),
        ("memfit:0%", "is not a budget"),
        ("memfit:60% allow=magic", "unknown technique 'magic'"),
        ("memfit:60% hurry=1", "neither allow="),
        ("memfit-cut:40", "share of activation memory"),
        ("memfit-cut:140%", "share of activation memory"),
        ("memfit:60% launch=all", "nor launch=graphs"),
        ("largest-batch:8GiB launch=graphs", "not launched as CUDA graphs"),
        ("largest-batch:60%", "means nothing while the batch size is open"),
    ],
)
def test_wrong_systems_are_refused_with_a_hint(system, message):
    with pytest.raises(UsageError, match=message) as error:
        check_system(system)
    assert error.value.hint


def test_memfit_systems_carry_their_options():
    name = memfit_name("60%", "+offload+tiled_loss", "graph")
    assert name == "memfit:60% allow=+offload+tiled_loss executor=graph"
    assert memfit_options(name.partition(":")[2]) == (
        "60%",
        {"allow": "+offload,+tiled_loss", "executor": "graph"},
    )
    assert memfit_options("60% allow=recompute+offload")[1]["allow"] == "recompute,offload"


def test_every_family_has_a_file():
    import importlib

    for family in FAMILIES.values():
        module = importlib.import_module(f"memfit.bench.systems.{family.module}")
        assert hasattr(module, "prepare") or family.module == "largest_batch"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("encodr", "did you mean encoder"),
        ("transformers:gpt9", "unknown target"),
        ("zoo:resnet", "unknown target"),
        ("nowhere.py:workload", "there is no file"),
        ("nowhere.py", "no function in it"),
    ],
)
def test_targets_that_no_cell_could_build_are_refused(target, message):
    with pytest.raises(UsageError, match=message):
        check_target(target)


def test_only_takes_cells_by_pattern():
    def keys(*only: str) -> list[tuple[int | None, str]]:
        cells = plan_cells(specs(4, 8), ["eager", "memfit:60%"], SETTINGS, only)
        return [(c.workload.batch, c.system) for c in cells]

    assert keys() == [(4, "eager"), (4, "memfit:60%"), (8, "eager"), (8, "memfit:60%")]
    assert keys("*|memfit*") == [(4, "memfit:60%"), (8, "memfit:60%")]
    assert keys("encoder@8* | eager", "encoder@4x32") == [
        (4, "eager"),
        (4, "memfit:60%"),
        (8, "eager"),
    ]
    with pytest.raises(UsageError, match="nothing to run: no cell is like 'x'"):
        keys("x")
    with pytest.raises(UsageError, match="nothing to run: there are none"):
        plan_cells([], ["eager"], SETTINGS)


@pytest.mark.parametrize("text", ["", "4,", "0,4", "4,-8", "four"])
def test_wrong_batch_sizes_are_refused(text):
    with pytest.raises(UsageError, match="not a list of batch sizes"):
        parse_sizes(text)


def test_names_tell_workloads_apart():
    odd = WorkloadSpec("", "dir/mine.py:make", 4, dtype="bf16", fields=("n_layer=2",))
    assert named(odd).name == "mine.py:make@4 bf16 n_layer=2"
    assert named(WorkloadSpec("", "torchvision:resnet50")).name == "resnet50"


def test_a_cut_run_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "bench.json"
    cells = plan_cells(specs(4, 8), ["eager", "checkpoint"], SETTINGS)
    ran: list[str] = []

    def run(spec, timeout_s, log):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(spec.system)
        return Cell(spec.workload.name, spec.system, OK)

    report = open_report(path, MACHINE, SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        run_all(report, cells, path, run)
    report = open_report(path, MACHINE, SETTINGS)
    assert [c.key for c in report.cells] == ["encoder@4x32 | eager", "encoder@4x32 | checkpoint"]
    missing = missing_cells(report, cells, SETTINGS)
    assert missing == cells[2:]
    ran.clear()
    whole, left = run_all(report, missing, path, run)
    assert not left and missing_cells(whole, cells, SETTINGS) == []
    assert BenchReport.load(path) == whole


def test_cells_that_would_not_end_in_time_are_left(tmp_path):
    path = tmp_path / "bench.json"
    cells = plan_cells(specs(4, 8), ["eager", "compile", "checkpoint"], SETTINGS)
    report = BenchReport(MACHINE, SETTINGS.stored())
    for spec, seconds in zip(cells[:2], (5.0, 300.0), strict=True):
        cell = Cell(spec.workload.name, spec.system, OK, seconds=seconds)
        report = report.with_cell(spec.workload, cell)
    given: dict[str, float] = {}

    def run(spec, timeout_s, log):
        given[f"{spec.workload.batch} {spec.system}"] = timeout_s
        late = spec.system == "checkpoint" and spec.workload.batch == 8
        return Cell(spec.workload.name, spec.system, TIMED_OUT if late else OK, seconds=9.0)

    missing = missing_cells(report, cells, SETTINGS)
    whole, left = run_all(report, missing, path, run, end=time.monotonic() + 100)
    # compile took 300 s before; the last checkpoint was cut off by the limit, not by its own.
    assert [(c.workload.batch, c.system) for c in left] == [(8, "compile"), (8, "checkpoint")]
    assert list(given) == ["4 checkpoint", "8 eager", "8 checkpoint"]
    assert all(90 < seconds <= 100 for seconds in given.values())
    assert missing_cells(whole, cells, SETTINGS) == left
    again, left = run_all(whole, left, path, run)
    assert not left and again.find("encoder@8x32", "checkpoint").status == TIMED_OUT


def test_what_died_is_kept_unless_it_is_to_be_tried_again(tmp_path):
    (spec,) = specs(4)
    cells = plan_cells([spec], ["eager", "checkpoint"], SETTINGS)
    report = BenchReport(MACHINE, SETTINGS.stored())
    report = report.with_cell(spec, Cell(spec.name, "checkpoint", CRASHED, "signal"))
    report = report.with_cell(spec, Cell(spec.name, "eager", OK))
    assert missing_cells(report, cells, SETTINGS) == []
    again = replace(SETTINGS, retry=True)
    assert [c.system for c in missing_cells(report, cells, again)] == ["checkpoint"]
    report = report.with_cell(spec, Cell(spec.name, "checkpoint", OK))
    assert len(report.cells) == 2 and missing_cells(report, cells, again) == []
    alone = replace(report, cells=(replace(report.cells[0], notes=(f"{NO_ROOM} beside it",)),))
    (eager, tried) = missing_cells(alone, cells, again)
    assert (eager.system, tried.system) == ("eager", "checkpoint")
    capped = [replace(c, cap_bytes=2**30) for c in cells]
    assert [c.system for c in missing_cells(alone, capped, again)] == ["eager"]
    assert [c.system for c in in_order(report, cells).cells] == ["eager", "checkpoint"]


def test_results_of_another_machine_or_setting_are_not_mixed(tmp_path):
    path = tmp_path / "bench.json"
    BenchReport(MACHINE, SETTINGS.stored()).save(path)
    with pytest.raises(UsageError, match=r"torch was '2\.13\.0' and is '2\.11\.0'"):
        open_report(path, MACHINE | {"torch": "2.11.0"}, SETTINGS)
    with pytest.raises(UsageError, match="steps was '10' and is '3'"):
        open_report(path, MACHINE, Settings(steps=3))


def test_two_workloads_of_one_name_are_refused():
    (spec,) = specs(4)
    report = BenchReport(MACHINE, SETTINGS.stored()).with_cell(spec, Cell(spec.name, "eager", OK))
    (cell,) = plan_cells([spec], ["eager"], SETTINGS)
    other = replace(cell, workload=replace(spec, target="other.py:encoder"))
    with pytest.raises(UsageError, match="another workload that is called 'encoder@4x32'"):
        missing_cells(report, [other], SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not a whole memfit benchmark"),
        (lambda text: "[]", "not a JSON object"),
        (lambda text: json.dumps(json.loads(text) | {"schema_version": 0}), "schema_version is 0"),
        (lambda text: json.dumps(json.loads(text) | {"kind": "plan"}), "its kind is 'plan'"),
        (lambda text: json.dumps(json.loads(text) | {"cells": [{"workload": 1}]}), "workload"),
        (lambda text: json.dumps(json.loads(text) | {"extra": 1}), "unknown field 'extra'"),
    ],
)
def test_a_file_that_is_no_whole_benchmark_is_refused(tmp_path, change, message):
    path = tmp_path / "bench.json"
    (spec,) = specs(4)
    BenchReport(MACHINE, SETTINGS.stored()).with_cell(spec, Cell(spec.name, "eager", OK)).save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(UsageError, match=message) as error:
        BenchReport.load(path)
    assert error.value.hint
