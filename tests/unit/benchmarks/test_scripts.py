"""The benchmarks' scripts: what they would run, small cells of each, tables of results."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from memfit.cli.app import app
from memfit.errors import UsageError

SCRIPTS = (
    *("batch_size", "combinations", "estimates", "inside", "observe", "recipes", "swap"),
    "swap_host",
)
ENCODER, GPT2 = "encoder@256x128", "gpt2@8x1024 bf16"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_long_it_would_take(script, capsys, name):
    path = script(name, "--estimate")
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith("in all") and len(said) > 1
    assert not path.exists()


def test_the_commands_of_the_readme_mean_something(script, capsys, results):
    from run import read_runs

    runs = read_runs((results.parent / "README.md").read_text()).values()
    commands = [run.words for run in runs]
    assert {Path(words[0]).stem for words in commands} == {*SCRIPTS, "memfit"}
    for command, *words in commands:
        if command == "memfit":
            result = CliRunner().invoke(app, [*words, "--list"])
            assert result.exit_code == 0, result.output
        else:
            script(Path(command).stem, *words, "--estimate")
            simulated = "simulated" in words  # from what another part measured
            assert capsys.readouterr().out.endswith("in all\n") != simulated, words


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_refuses_a_name_it_does_not_know(script, capsys, name):
    with pytest.raises(SystemExit):
        script(name, "--only", "resnet51")
    assert "resnet51" in capsys.readouterr().err


def test_every_workload_is_built_by_a_target_and_has_a_tiny_one():
    from workloads import WORKLOADS, build, target_of

    for name in WORKLOADS:
        target, options = target_of(name, tiny=True)
        assert options["batch"] <= 4, f"{name}: {target}"
    assert build(ENCODER, tiny=True).batch_tensors()[0].shape == (4, 32)


def test_plans_beside_peers_go_on_with_the_profile_and_the_plans_of_a_run_that_was_cut_off(
    script, monkeypatch, capsys
):
    import memfit

    words = ["--tiny", "--steps", "1", "--executor", "module", "--only", ENCODER]
    words += [
        "--shares",
        "0.8",
        "--of-peak",
        "0.95",
        "--smallest",
        "--peers",
        "eager",
        "checkpoint",
        "--match",
    ]
    path = script("inside", *words, "--fits-only")
    report = json.loads(path.read_text())
    fits = report["workloads"][ENCODER]["fits"]
    assert list(fits) == ["95% of the peak", "80%", "smallest"]
    assert not report["workloads"][ENCODER]["systems"]
    assert fits["smallest"]["budget_bytes"] == fits["80%"]["minimum_feasible_bytes"]
    assert all(row["measured_peak_bytes"] <= row["budget_bytes"] for row in fits.values())
    monkeypatch.delattr(memfit, "profile")
    monkeypatch.delattr(memfit, "fit_workload")
    rows = json.loads(script("inside", *words).read_text())["workloads"][ENCODER]
    assert rows["fits"] == fits
    systems = rows["systems"]
    assert next(iter(systems)) == "memfit unplanned"
    assert {"memfit 80%", "eager", "checkpoint", "memfit at the peak of: checkpoint"} < set(systems)
    match = systems["memfit at the peak of: checkpoint"]
    assert match["peak_bytes"] <= systems["checkpoint"]["peak_bytes"]
    assert "| checkpoint | " in path.with_suffix(".md").read_text().split("no higher peak")[1]


def test_a_smallest_budget_that_is_refused_is_followed_by_the_one_named_instead(
    script, monkeypatch
):
    import memfit
    from memfit.errors import InfeasibleError

    fit, asked = memfit.fit_workload, []

    def sometimes(workload, budget, **options):
        asked.append(budget)
        if len(asked) == 1:
            more = int(1.05 * budget)
            refusal = InfeasibleError("too small", budget_bytes=budget, minimum_bytes=more, hint="")
            refusal.learned = replace(options["profiled"], notes=("learned",))
            raise refusal
        assert options["profiled"].notes == ("learned",)
        return fit(workload, budget, **options)

    monkeypatch.setattr(memfit, "fit_workload", sometimes)
    words = ["--tiny", "--steps", "1", "--executor", "module", "--only", ENCODER, "--fits-only"]
    path = script("inside", *words, "--shares", "--smallest")
    row = json.loads(path.read_text())["workloads"][ENCODER]["fits"]["smallest"]
    assert row["refused_bytes"] == asked[:1] and row["budget_bytes"] == asked[1] > asked[0]
    assert f"MB ({asked[0] / 2**20:.0f} refused)" in path.with_suffix(".md").read_text()


def test_peaks_that_are_alike_are_matched_once_by_the_lowest():
    from comparing.comparison import lowest_peaks

    peaks = {"eager": 100, "a": 805, "b": 800, "c": 500, "memfit 80%": 700, "d": 1000}
    rows = {name: {"peak_bytes": peak} for name, peak in peaks.items()} | {"e": {"error": "no"}}
    seconds = {"eager": 9.0, "a": 5.0, "b": 5.0, "c": 6.0, "d": 4.0}
    assert lowest_peaks(rows, 1000, seconds) == {"eager": 100, "c": 500, "b": 800}
    seconds["eager"] = 5.0
    assert lowest_peaks(rows, 1000, seconds) == {"eager": 100, "b": 800}, "c is slower, with more"


def test_inside_refuses_peers_that_change_the_model(capsys):
    from inside import parse_arguments

    with pytest.raises(SystemExit):
        parse_arguments(["--peers", "fsdp2-offload"])
    assert "fsdp2-offload is no peer" in capsys.readouterr().err


def test_a_combination_stands_beside_the_plain_step(script, capsys):
    words = ["--tiny", "--steps", "1", "--techniques", "step_in_backward"]
    path = script("combinations", *words, "--activations", "recompute")
    rows = json.loads(path.read_text())["workloads"][f"{GPT2}, module"]["rows"]
    assert list(rows) == ["recompute", "recompute + step_in_backward"]
    both, one = rows["recompute + step_in_backward"], rows["recompute"]
    assert both["peak_bytes"] < one["peak_bytes"] < one["plain"]["peak_bytes"]
    assert all("step_s" in row["plain"] and row["a_a"] >= 0 for row in rows.values())


def test_all_techniques_are_combined_and_int8_has_a_table_of_its_own(script, capsys):
    from combinations import ALL, EVERY, FROZEN, INT8, STATE, sets_of, sets_with_int8

    others = [name for name in EVERY if name != INT8]
    sets = sets_of(others)
    assert len(sets) == 2 * 2 * 2 * (1 + len(STATE)) and set().union(*sets) == {*others}
    assert all(len({*s} & {*STATE}) <= 1 for s in sets)
    with_int8 = sets_with_int8(others)
    assert with_int8[0] == [] and all(s[-1] == INT8 for s in with_int8[1:])
    assert len(with_int8) == 2 + len(others) + len(STATE)
    script("combinations", "--estimate", "--techniques", ALL)
    said = capsys.readouterr().out
    frozen = said.count(FROZEN)
    assert frozen == 3 * len(with_int8) and said.count(f"{GPT2}, module: ") == 3 * len(sets)


@pytest.mark.parametrize("state", ["optim_8bit", "optim_bf16_sr"])
def test_a_combination_with_the_batch_in_parts_runs_the_parts(script, monkeypatch, state):
    import combinations

    from memfit.fitted import Fitted

    batches = []
    step = Fitted.step
    monkeypatch.setattr(Fitted, "step", lambda f, b, **k: (batches.append(b), step(f, b, **k))[1])
    monkeypatch.setattr(combinations, "sets_of", lambda names: [[], [*names]])
    words = ["--tiny", "--steps", "1", "--techniques", "tiled_loss", state, "microbatch"]
    path = script("combinations", *words, "--activations", "kept")
    report = json.loads(path.read_text())
    rows = report["workloads"][f"{GPT2}, module"]["rows"]
    assert list(rows) == ["plain", f"tiled_loss + {state} + microbatch"]
    assert all("error" not in row for row in rows.values()) and batches
    assert rows[f"tiled_loss + {state} + microbatch"]["peak_bytes"] < rows["plain"]["peak_bytes"]
    assert ("seconds are noisy" in path.with_suffix(".md").read_text()) != torch.cuda.is_available()


def test_int8_weights_are_combined_where_half_of_the_blocks_is_frozen(script):
    from combinations import FROZEN, INT8

    words = ["--tiny", "--steps", "1", "--techniques", INT8, "--activations", "offload"]
    report = json.loads(script("combinations", *words).read_text())
    assert list(report["workloads"]) == [f"{GPT2}, module, {FROZEN}"]
    rows = report["workloads"][f"{GPT2}, module, {FROZEN}"]["rows"]
    assert list(rows) == ["offload", f"offload + {INT8}"]
    assert all("error" not in row for row in rows.values())


def test_a_batch_norm_refuses_parts_of_the_batch(monkeypatch):
    import combinations
    from workloads import build

    arguments = argparse.Namespace(executor="module", tiny=True, steps=1)
    monkeypatch.setattr(combinations, "build", lambda name, tiny: build("resnet50@8", tiny=tiny))
    with pytest.raises(UsageError, match="microbatch: batch norm"):
        combinations.Measured(GPT2, arguments).measure("kept", ["microbatch"])


def test_loops_of_one_plan_count_their_own_repetitions(monkeypatch):
    from swapping import valve
    from swapping.session import Session

    monkeypatch.setattr(valve, "NAME", ENCODER)
    monkeypatch.setattr(valve, "THRESHOLDS", (0.0,))
    session = Session(tiny=True, steps=1)
    rows = session.running(valve.run_with_plan)()["systems"]
    assert rows["plain"]["replays"] == 0 < rows["plan"]["replays"]
    assert rows["plan and valve 0"]["replays"] == rows["plan"]["replays"]
    assert rows["plan and valve 0"]["swaps"] > 0 and all(row["bitwise"] for row in rows.values())


def test_a_valve_may_make_the_allocator_hold_more_until_it_settles_a_leak_does_not():
    from swapping.flat import GROWTH, is_flat

    def seen(**changed: list[int]) -> list[dict[str, int]]:
        names = ("allocated", "reserved", "arena", "rss")
        return [{name: changed.get(name, [5] * 5)[look] for name in names} for look in range(5)]

    for settles in (True, False):
        assert is_flat(seen(), settles=settles)
        assert is_flat(seen(reserved=[5, 5, 5, 5, 4]), settles=settles)
        assert not is_flat(seen(reserved=[5, 6, 7, 8, 9]), settles=settles)
        assert not is_flat(seen(allocated=[5, 6, 6, 6, 6]), settles=settles)
        assert not is_flat(seen(arena=[5, 6, 6, 6, 6]), settles=settles)
        assert not is_flat(seen(rss=[5, 5, 5, 5, 6 + GROWTH]), settles=settles)
        assert is_flat(seen(reserved=[5, 6, 7, 7, 7]), settles=settles) == settles


def test_a_loop_of_the_valve_is_looked_at_again_and_again():
    from swapping import flat
    from swapping.session import Session

    row = flat.run(Session(tiny=True, steps=1), flat.VALVE)
    assert [int(step) for step in row["seen"]] == list(flat.TINY_LOOKS)
    assert row["swaps"] > 0 and row["growth_bytes"]["arena"] == 0


def test_after_a_part_that_failed_the_next_builds_its_workload_anew():
    from swapping.session import Session

    session = Session(tiny=True, steps=1)
    first = session.workload(ENCODER)

    def fails(session: Session) -> None:
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError):
        session.running(fails)()
    assert session.workload(ENCODER) is first
    assert session.running(lambda s: {"same": s.workload(ENCODER) is first})() == {"same": False}


def test_a_finder_of_batch_sizes_beside_brute_force(monkeypatch):
    import batch_size

    monkeypatch.setattr(batch_size, "STEPS", 1)
    find = partial(batch_size.search, "encoder@64x128", cap=2**20, tiny=True)
    exact, ours = find(finder="brute force"), find(finder="memfit")
    assert 0.95 * exact["size"] <= ours["size"] <= exact["size"] and ours["runs"] <= 5


TABLES = (
    ("batch-size", "batch_size"),
    ("inside", "comparing.tables"),
    ("observe", "observe"),
    ("swap-host", "swap_host"),
    ("swap", "swapping.tables"),
    ("estimates", "estimates"),
    ("combinations", "combinations"),
    ("recipes", "recipes"),
)


def test_results_are_rendered_as_they_stand(results):
    import importlib

    from memfit.bench.report.markdown import markdown
    from memfit.ir.bench import BenchReport

    paths = [p for p in results.glob("*.json") if not p.name.startswith("foundation")]
    assert len(paths) > 10  # the script of foundation-* is gone
    for path in paths:
        module = next((tables for name, tables in TABLES if path.name.startswith(name)), None)
        if module is None:
            told = markdown(BenchReport.load(path))
        else:
            told = importlib.import_module(module).markdown(json.loads(path.read_text()))
        assert told == path.with_suffix(".md").read_text(), path.name
