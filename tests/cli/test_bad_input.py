"""Whatever is wrong with the input: the right exit code, what happened, a hint, no traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.cli.output_file import check_file

BUDGET = {"plan": ["--budget", "1GiB"]}


def assert_refused(result: Any, code: int, *words: str) -> None:
    assert result.exit_code == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "\nhint: " in result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_unknown_target(memfit):
    assert_refused(memfit("fit", "gpt2"), 2, "unknown target 'gpt2'", "transformers:gpt2")
    assert_refused(memfit("plan", "encodr", "--budget", "1GiB"), 2, "did you mean encoder?")
    assert_refused(memfit("profile", "transformers:gpt9"), 2, "gpt2")
    assert_refused(memfit("fit", "missing.py:workload"), 2, "there is no file", "memfit init")


@pytest.mark.parametrize("package, target", [("timm", "timm:x"), ("torchvision", "torchvision:x")])
def test_missing_extra_says_which_to_install(memfit, monkeypatch, package, target):
    monkeypatch.setitem(sys.modules, package, None)
    assert_refused(memfit("fit", target), 2, package, "pip install 'memfit[zoo]'")


@pytest.mark.parametrize(
    "budget, word",
    [
        ("lots", "is not a number of bytes"),
        ("12XiB", "unknown unit"),
        ("0", "is not a budget"),
        ("0GiB", "is not a budget"),
        ("12", "a budget of 12 bytes holds no training step"),
        ("-5", "'-5' is below 0"),
        ("0%", "is not a budget"),
        ("x%", "is not a share"),
    ],
)
@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_budget_that_means_nothing_is_refused_before_anything_is_built(memfit, verb, budget, word):
    assert_refused(memfit(verb, "transformers:llama-8b", "--budget", budget), 2, word)


def test_budget_above_the_device(memfit, tiny):
    assert_refused(memfit("fit", *tiny, "--budget", "1000TiB"), 2, "more than the", '"auto"')


@pytest.mark.parametrize(
    "words, message",
    [
        (["--budget", "1GiB", "--plan", "plan.json"], "--budget and --plan exclude each other"),
        (["--budget", "1GiB", "--utilization", "0.5"], "exclude each other"),
        (["--utilization", "0.5", "--activation-reduction", "0.5"], "exclude each other"),
        (["--plan", "plan.json", "--strategy", "all"], "--plan gives one"),
        (["--plan", "plan.json", "--segments", "layers.*"], "--plan gives one"),
        (["--plan", "plan.json", "--executor", "graph"], "--executor say how to make a plan"),
        (["--plan", "plan.json", "--min-tensor-bytes", "1KB"], "--plan gives one"),
        (["--budget", "90%", "--cuda-graphs", "--device", "cpu"], "there are none on a cpu"),
        (["--executor", "eager"], "unknown executor 'eager'"),
        (["--executor", "Graph"], "one of: auto, graph, inductor, module"),
        (["--plan", "plan.json", "--host-budget", "1GiB"], "--host-budget say how to make a plan"),
        (["--host-budget", "much"], "'much' is not a number of bytes"),
        (["--host-budget", "-5"], "'-5' is below 0"),
        (["--min-tensor-bytes", "small"], "'small' is not a number of bytes"),
        (["--min-tensor-bytes", "-5"], "'-5' is below 0"),
        (["--min-tensor-bytes", "3XB"], "unknown unit"),
        (["--utilization", "80"], "not a share of the device"),
        (["--activation-reduction", "40"], "not between 0 and 1"),
        (["--budget", "1GiB", "--max-slowdown", "0.9"], "not 1 or more"),
        (["--budget", "1GiB", "--max-slowdown", "nan"], "not 1 or more"),
        (["--preset", "conservative", "--max-slowdown", "0", "--budget", "90%"], "not 1 or more"),
        (["--budget", "1GiB", "--interval", "2"], "is for strategy interval"),
        (["--budget", "1GiB", "--strategy", "best"], "unknown strategy"),
        (["--budget", "1GiB", "--allow", "magic"], "unknown technique"),
        (["--set", "n_layer"], "is not a field and a value"),
        (["--set", "n_layer=1", "--set", "n_layer=2"], "given twice"),
        (["--set", "layers=1"], "has no field 'layers'"),
        (["--dtype", "fp8"], "unknown dtype"),
        (["--device", "toaster"], "unknown device"),
        (["--batch", "0"], "must be at least 1"),
        (["--budget", "90%", "--accumulate", "0"], "accumulate is 0"),
    ],
)
def test_options_that_mean_nothing(memfit, words, message):
    assert_refused(memfit("fit", "encoder", *words), 2, message)


@pytest.mark.parametrize("verb", ["plan", "profile"])
def test_unknown_executor_is_refused_before_anything_is_built(memfit, verb):
    result = memfit(verb, "transformers:llama-8b", "--executor", "jit", *BUDGET.get(verb, []))
    assert_refused(result, 2, "unknown executor 'jit'", "graph, inductor, module")


def test_segments_that_no_module_matches(memfit, tiny):
    result = memfit("fit", *tiny, "--budget", "90%", "--segments", "blocks.*")
    assert_refused(result, 2, "blocks.*", "layers.0")


@pytest.mark.parametrize(
    "words", [["fit"], ["fit", "encoder", "--nope"], ["nope"], ["fit", "encoder", "--steps", "x"]]
)
def test_usage_errors_of_the_parser(memfit, words):
    result = memfit(*words)
    assert result.exit_code == 2
    assert "Usage: memfit" in result.stderr


def test_loss_that_is_not_a_scalar(memfit, workload_file):
    target = workload_file(loss="model(batch)")
    assert_refused(memfit("fit", target), 3, "shape (2, 1), not a scalar", ".mean()")


def test_loss_that_is_no_tensor_or_detached(memfit, workload_file):
    assert_refused(memfit("fit", workload_file(loss="1.0")), 3, "returned a float, not a tensor")
    target = workload_file(loss="model(batch).mean().detach()")
    assert_refused(memfit("fit", target), 3, "does not depend on any trainable parameter")


def test_model_without_trainable_parameters(memfit, workload_file):
    target = workload_file(model="torch.nn.Linear(4, 1).requires_grad_(False)")
    assert_refused(memfit("fit", target), 3, "no trainable parameters", "requires_grad=True")


def test_batch_on_the_wrong_device(memfit, workload_file):
    target = workload_file(batch="torch.ones(2, 4, device='meta')")
    assert_refused(memfit("fit", target), 2, "on meta, the model is on cpu", "move the batch")


def test_device_that_is_not_there(memfit):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert_refused(memfit("fit", "encoder", "--device", "cuda"), 2, "CUDA", "--device cpu")


def test_workload_function_that_raises(memfit, workload_file):
    target = workload_file("raise KeyError('my data')")
    assert_refused(memfit("fit", target), 2, "mine.py:6: KeyError: 'my data'")


def test_workload_function_that_exits_or_returns_something_else(memfit, workload_file):
    assert_refused(memfit("fit", workload_file("raise SystemExit(7)")), 2, "SystemExit: 7")
    assert_refused(memfit("fit", workload_file("return 5")), 2, "returned a int")


def test_step_that_raises(memfit, workload_file):
    target = workload_file(batch="torch.ones(2, 5)")
    assert_refused(memfit("fit", target), 3, "the training step of mine.py:workload failed")


def test_option_that_the_function_does_not_take(memfit, workload_file):
    assert_refused(memfit("fit", workload_file(), "--seq", "4"), 2, "takes no argument 'seq'")


def test_no_device_is_chosen_for_a_file(memfit, workload_file):
    result = memfit("fit", workload_file(), "--json")  # its function takes no device
    assert result.exit_code == 0, result.stderr


def test_plan_for_another_model(memfit, tiny, plan_file):
    result = memfit("fit", *tiny, "--set", "max_length=64", "--plan", plan_file)
    assert_refused(result, 2, "modules or parameter shapes differ", "memfit plan")


def test_plan_for_another_shape_and_optimizer(memfit, tiny, plan_file):
    words = ["3" if word == "4" else word for word in tiny]
    result = memfit("fit", *words, "--plan", plan_file)
    assert_refused(result, 2, "made for the batch 'int64[4, 32]", "int64[3, 32]")
    result = memfit("fit", *tiny, "--optimizer", "sgd", "--plan", plan_file)
    assert_refused(result, 2, "made for the optimizer 'Adam', not 'SGD'")


def test_plan_of_another_torch(memfit, tiny, plan_file, tmp_path):
    other = tmp_path / "old.json"
    other.write_text(json.dumps(json.loads(plan_file.read_text()) | {"torch": "2.1.0"}))
    assert_refused(memfit("fit", *tiny, "--plan", other), 2, "made with torch 2.1.0", "plan again")


@pytest.mark.parametrize(
    "edit, word",
    [
        (lambda data: data["segments"][1].update(variant=77), "variant is 77"),
        (lambda data: data.update(variants=[]), "there are 0 variants"),
        (lambda data: data.update(split=0), "split is 0"),
        (lambda data: data["segments"].pop(), "segments and was made with"),
    ],
)
def test_plan_file_that_was_edited(memfit, tiny, plan_file, tmp_path, edit, word):
    data = json.loads(plan_file.read_text())
    edit(data)
    edited = tmp_path / "edited.json"
    edited.write_text(json.dumps(data))
    assert_refused(memfit("fit", *tiny, "--plan", edited), 2, word, "make the plan again")


def test_plan_file_that_is_cut_off_missing_or_something_else(memfit, tiny, plan_file, tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text(plan_file.read_text()[:200])
    assert_refused(memfit("fit", *tiny, "--plan", cut), 2, "not a whole memfit plan", "cut off")
    assert_refused(memfit("fit", *tiny, "--plan", tmp_path / "no.json"), 2, "cannot read the plan")
    cut.write_text(json.dumps({"schema_version": 99}))
    assert_refused(memfit("fit", *tiny, "--plan", cut), 2, "schema_version is 99")


def test_an_error_is_an_object_with_json(memfit):
    result = memfit("fit", "gpt2", "--json")
    assert result.exit_code == 2
    data = json.loads(result.stdout)
    assert data == {"schema_version": 1, "exit_code": 2} | {
        name: data[name] for name in ("error", "hint")
    }
    assert data["error"] == "unknown target 'gpt2'"
    assert "error: unknown target 'gpt2'" in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        MemoryError("no room"),
    ],
)
def test_out_of_memory(memfit, tiny, monkeypatch, error):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("memfit.api.profile", fail)
    assert_refused(memfit("fit", *tiny, "--budget", "90%"), 4, "out of memory", "--batch")


def test_ctrl_c(memfit, tiny, monkeypatch):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.api.profile", interrupted)
    result = memfit("fit", *tiny, "--budget", "90%")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_an_unexpected_error_keeps_its_traceback(memfit, tiny, monkeypatch):
    def bug(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("memfit.api.profile", bug)
    with pytest.raises(RuntimeError, match="a bug"):
        memfit("fit", *tiny, "--budget", "90%")


@pytest.mark.parametrize("words", [["-o", "none/p.json"], ["--decisions", "none/p.csv"]])
def test_a_plan_that_can_no_longer_be_written(memfit, tiny, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memfit.cli.plan.check_file", lambda path: None)
    result = memfit("plan", *tiny, "--budget", "90%", *words)
    assert_refused(result, 2, "cannot be written: No such file", "choose a place")


@pytest.mark.parametrize("verb, file", [("fit", "none/x.json"), ("resources", "none/x.md")])
def test_a_result_that_can_no_longer_be_written(memfit, tiny, monkeypatch, tmp_path, verb, file):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"memfit.cli.{verb}.check_file", lambda path: None)
    result = memfit(verb, *tiny, "--budget", "90%", "--steps", "1", "-o", file)
    assert_refused(result, 2, "cannot be written: No such file", "choose a place")


def test_a_folder_that_takes_no_files_is_known_before_anything_is_built(memfit):
    place = Path("/proc/memfit.json")
    if not place.parent.is_dir():
        pytest.skip("there is no /proc here")
    result = memfit("fit", "transformers:llama-8b", "--budget", "1GiB", "-o", place)
    assert_refused(result, 2, "'/proc/memfit.json' cannot be written", "choose a place")


def test_looking_whether_a_file_can_be_written_leaves_none(tmp_path):
    check_file(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
