"""`memfit report`: from a fit, from files, and everything that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.ir.run_file import RunFile

GOLDEN = Path(__file__).parents[1] / "golden"
H200 = GOLDEN / "gpt2_large_set_up.profile.json.gz"
TINY = GOLDEN / "tiny_gpt2.profile.json"


@pytest.fixture(scope="module")
def run_json(memfit: Any, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.json"
    result = memfit("fit", *tiny, "--budget", "90%", "--steps", "1", "-o", path)
    assert result.exit_code == 0, result.stderr
    page = path.with_suffix(".html")
    assert result.stdout.splitlines()[-1].endswith(f"memfit report {path} -o {page}")
    return path


def _data(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    inside = text.partition('id="data">')[2].partition("</script>")[0]
    return json.loads(inside)


def test_a_target_is_fitted_and_reported(memfit, tiny, tmp_path):
    page = tmp_path / "report.html"
    words = ("--budget", "90%", "--steps", "1", "--points", "2", "--curve", "optimal,none")
    result = memfit("report", *tiny, *words, "-o", page)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"wrote {page}"
    assert "numbers identical" in lines[-1] and f"open {page} in a browser" in lines[-1]
    data = _data(page)
    before, after = data["memory"]["charts"]
    assert after["measured"] == pytest.approx(after["peak"], rel=0.02)
    assert after["measured"] <= data["memory"]["budget"] < before["measured"]
    assert [s["name"].split()[0] for s in data["curve"]["series"]] == ["optimal", "none"]
    assert data["curve"]["measured"] is not None
    text = page.read_text(encoding="utf-8")
    assert "identical" in text and "memfit " in text


def test_the_file_of_a_fit_is_enough(memfit, run_json, tmp_path):
    page = tmp_path / "report.html"
    result = memfit("report", run_json, "--no-curve", "-o", page)
    assert result.exit_code == 0, result.stderr
    run = RunFile.load(run_json)
    after = _data(page)["memory"]["charts"][1]
    assert after["peak"] == run.plan.predicted.peak_bytes
    assert after["measured"] == run.result.measured.peak_bytes
    assert _data(page)["curve"] is None


def test_a_profile_is_planned_and_written_in_every_form(memfit, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    words = ["--profile", H200, "--budget", "16GB", "--strategy", "ratio", "--no-curve"]
    outputs = {name: tmp_path / name for name in ("r.html", "t.json", "f.json", "plots")}
    options = zip(("-o", "--trace", "--flame", "--plots"), outputs.values(), strict=True)
    result = memfit("report", *words, *(w for pair in options for w in pair), "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["verdict"] is None and said["after"]["measured_peak_bytes"] is None
    before = said["before"]
    assert sum(before["categories"].values()) == before["peak_bytes"]
    assert before["peak_bytes"] == pytest.approx(before["measured_peak_bytes"], rel=0.02)
    assert [Path(p).exists() for p in said["written"]] == [True] * 7
    assert json.loads(outputs["t.json"].read_text())["traceEvents"]
    assert json.loads(outputs["f.json"].read_text())["profiles"]


def test_a_profile_and_its_plan_need_no_target(memfit, tmp_path):
    words = ["--profile", TINY, "--budget", "90%", "--no-curve"]
    plan = tmp_path / "plan.json"
    from memfit import api
    from memfit.ir.profile import Profile

    api.plan(Profile.load(TINY), "90%").save(plan)
    made = memfit("report", *words, "--json", "-o", tmp_path / "made.html")
    read = memfit(
        "report",
        "--profile",
        TINY,
        "--plan",
        plan,
        "--no-curve",
        "--json",
        "-o",
        tmp_path / "r.html",
    )
    assert (made.exit_code, read.exit_code) == (0, 0), made.stderr + read.stderr
    assert json.loads(made.stdout)["after"] == json.loads(read.stdout)["after"]


def test_the_last_line_names_the_viewer_of_what_was_written(memfit, tmp_path):
    words = ("report", "--profile", TINY, "--budget", "90%", "--no-curve")
    for option, viewer in (("--trace", "ui.perfetto.dev"), ("--flame", "speedscope.app")):
        result = memfit(*words, option, tmp_path / "out.json")
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines()[-1].endswith(f"open {tmp_path / 'out.json'} in {viewer}")


def refused(result: Any, *words: str) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "hint: " in result.stderr
    for word in words:
        assert word in " ".join(result.stderr.split()), result.stderr
    return result.stderr


def test_nothing_to_write_or_to_report_on_is_refused(memfit, tiny, tmp_path):
    page = tmp_path / "r.html"
    refused(memfit("report", *tiny, "--budget", "90%"), "nothing to write", "-o report.html")
    refused(memfit("report", "-o", page), "nothing to report on")
    refused(memfit("report", *tiny, "-o", page), "no budget", "--budget B")
    refused(memfit("report", "--profile", TINY, "-o", page), "neither a plan nor a budget")
    refused(memfit("report", *tiny, "--profile", TINY, "-o", page), "exclude each other")
    refused(memfit("report", "a.json", "--result", "b.json", "-o", page), "exclude each other")
    batch = ("--batch", "3", "--budget", "90%")
    refused(memfit("report", "--profile", TINY, *batch, "-o", page), "no TARGET")
    assert not page.exists()


def test_missing_and_wrong_files_are_named(memfit, plan_file, run_json, tmp_path):
    page = tmp_path / "r.html"
    missing = tmp_path / "no.json"
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"schema_version": 1}')
    for option in ("--profile", "--result"):
        refused(memfit("report", option, missing, "-o", page), "cannot read", "no.json")
        refused(memfit("report", option, wrong, "-o", page), "wrong.json", "is not")
    refused(memfit("report", "--plan", plan_file, "-o", page), "profile is missing")
    both = ("--profile", TINY, "--plan", plan_file)
    refused(memfit("report", *both, "-o", page), "another model", "of one fit")
    both = ("--profile", TINY, "--result", run_json)
    refused(memfit("report", *both, "-o", page), "name encoder", "of transformers:gpt2")
    assert not page.exists()


def test_a_run_file_of_another_name_was_taken_for_a_target(memfit, run_json, tmp_path, monkeypatch):
    """The hint then was a list of models."""
    other, page = tmp_path / "run.result", tmp_path / "report.html"
    other.write_bytes(run_json.read_bytes())
    for words in ([], ["--budget", "1GB"]):
        said = refused(memfit("report", other, *words, "-o", page), "neither Python nor called")
        assert f"--result {other}" in said and "--profile" in said
    result = memfit("report", "--result", other, "--no-curve", "-o", page)
    assert result.exit_code == 0 and page.exists(), result.stderr
    monkeypatch.chdir(tmp_path)
    Path("encoder").write_text("a file that is called like a target")
    refused(memfit("report", "encoder", "-o", page), "no budget to fit into")


def test_a_plan_for_another_profile_of_the_same_model_is_refused(memfit, tmp_path):
    from dataclasses import replace

    from memfit import api
    from memfit.ir.profile import Profile

    profile = Profile.load(TINY)
    plan = api.plan(profile, "90%")
    other = replace(plan, predicted=replace(plan.predicted, peak_bytes=10**6))
    for name, changed, said in (
        ("peak", other, "another profile"),
        ("workload", replace(plan, workload={**plan.workload, "batch": "b"}), "another workload"),
        ("set-up", replace(plan, techniques=("tiled_loss",)), "another set-up"),
        ("segments", replace(plan, segments=plan.segments[1:], route_key=""), "another segments"),
    ):
        path = tmp_path / f"{name}.json"
        changed.save(path)
        words = ("--profile", TINY, "--plan", path, "--no-curve", "-o", tmp_path / "r.html")
        refused(memfit("report", *words), said)


def test_options_of_planning_beside_a_plan_are_refused(memfit, run_json, tmp_path):
    words = ("--result", run_json, "--budget", "90%", "-o", tmp_path / "r.html")
    refused(memfit("report", *words), "--budget", "a file gives one")


def test_an_older_result_without_profile_says_what_is_missing(memfit, run_json, tmp_path):
    data = json.loads(run_json.read_text())
    old = tmp_path / "old.json"
    old.write_text(json.dumps({k: v for k, v in data.items() if k != "profile"}))
    refused(memfit("report", "--result", old, "-o", tmp_path / "r.html"), "no profile", "--profile")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(data["profile"]))
    words = ("--result", old, "--profile", profile, "--no-curve", "-o", tmp_path / "r.html")
    result = memfit("report", *words)
    assert result.exit_code == 0, result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_an_error_with_a_hint(memfit):
    words = ("--profile", TINY, "--budget", "90%", "--no-curve", "-o", "/dev/full")
    refused(memfit("report", *words), "cannot be written", "No space left")


def test_outputs_that_cannot_be_written_are_refused_first(memfit, tmp_path):
    words = ("report", "--profile", TINY, "--budget", "90%")
    refused(memfit(*words, "-o", tmp_path), "is a folder")
    refused(memfit(*words, "-o", tmp_path / "no" / "r.html"), "there is no folder")
    refused(memfit(*words, "--trace", tmp_path / "no" / "t.json"), "there is no folder")
    file = tmp_path / "file"
    file.write_text("")
    refused(memfit(*words, "--plots", file / "plots"), "cannot be made")


def test_an_unknown_strategy_of_the_curve_is_refused(memfit, tmp_path):
    words = ("report", "--profile", TINY, "--budget", "90%", "-o", tmp_path / "r.html")
    refused(memfit(*words, "--curve", "optimal,best"), "unknown strategy 'best'", "interval")


def test_an_impossible_budget_is_the_answer_no(memfit, tmp_path):
    words = ("report", "--profile", TINY, "--budget", "1MB", "-o", tmp_path / "r.html")
    result = memfit(*words)
    assert result.exit_code == 1 and "hint: " in result.stderr
    assert not (tmp_path / "r.html").exists()


def test_a_budget_that_nothing_holds_is_reported_all_the_same(memfit, tiny, tmp_path):
    page = tmp_path / "report.html"
    words = ("--budget", "100KiB", "--allow", "recompute", "--no-curve")
    result = memfit("report", *tiny, *words, "-o", page)
    assert result.exit_code == 1
    assert "no plan holds the budget: no plan fits into 100.00 KiB" in result.stdout
    text = page.read_text(encoding="utf-8")
    assert "No plan holds the budget:" in text and "the smallest possible is" in text
    before, after = _data(page)["memory"]["charts"]
    assert _data(page)["memory"]["budget"] == 100 * 2**10 < after["peak"] < before["peak"]


def test_before_is_the_plain_step_whatever_the_plan_does_to_it(memfit, tiny, tmp_path):
    run, page = tmp_path / "run.json", tmp_path / "r.html"
    words = ("--budget", "40%", "--allow", "+microbatch", "--steps", "1", "-o", run)
    result = memfit("fit", *tiny, "--batch", "32", *words)
    assert result.exit_code == 0, result.stderr
    made = RunFile.load(run)
    assert made.profile.split > 1 and made.plain.split == 1, "nothing else fits"
    result = memfit("report", "--result", run, "--no-curve", "-o", page)
    assert result.exit_code == 0, result.stderr
    before, after = _data(page)["memory"]["charts"]
    assert before["title"] == "before: everything kept"
    assert after["title"].endswith(f"one of the {made.profile.accumulate} parts of a step)")
    assert before["measured"] == made.result.baseline.peak_bytes
    assert before["peak"] == pytest.approx(before["measured"], rel=0.02)
