"""path/to/file.py:function targets, and what is said when the user's code fails."""

import sys
from pathlib import Path

import pytest
import torch

from memfit.errors import DeviceMemoryError, ModelError, UsageError
from memfit.targets import resolve_target

GOOD = """
import torch
from memfit.workload import Workload

def make(batch=4, device="cpu", width=8, act="gelu"):
    model = torch.nn.Linear(width, 1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = torch.randn(batch, width, device=device)
    return Workload(model, lambda m, x: m(x).mean(), optimizer, example)

def plain():
    return make()

def anything(**options):
    global seen
    seen = options
    return make()

def required(data):
    return make()

number = 3
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.py"
    path.write_text(GOOD)
    return path


def write(folder: Path, text: str, name: str = "bad.py") -> str:
    (folder / name).write_text(text)
    return f"{folder / name}:make"


def test_function_is_called_with_the_options_given(good: Path) -> None:
    workload = resolve_target(f"{good}:make", batch=3, device="cpu", overrides={"width": "5"})
    assert workload.batch.shape == (3, 5)
    assert workload.name == "good.py:make"
    workload.compute_loss().backward()


def test_function_keeps_its_defaults_for_what_was_not_given(good: Path) -> None:
    assert resolve_target(f"{good}:make").batch.shape == (4, 8)
    assert resolve_target(f"{good}:plain").batch.shape == (4, 8)


def test_function_with_any_keywords_gets_options_and_overrides(good: Path) -> None:
    resolve_target(f"{good}:anything", seq=7, dtype="bf16", overrides={"depth": "2", "act": "relu"})
    seen = sys.modules["memfit_workload_good"].seen
    assert seen == {"seq": 7, "dtype": "bf16", "depth": 2, "act": "relu"}


def test_same_call_gives_same_weights_and_leaves_rng_and_path_alone(good: Path) -> None:
    state, path = torch.get_rng_state(), list(sys.path)
    first, second = resolve_target(f"{good}:make"), resolve_target(f"{good}:make")
    assert torch.equal(first.model.weight, second.model.weight)
    assert torch.equal(first.batch, second.batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.path == path


def test_neighbours_are_importable_while_importing_and_calling(tmp_path: Path) -> None:
    (tmp_path / "neighbour_one_of_memfit.py").write_text(GOOD)
    (tmp_path / "neighbour_two_of_memfit.py").write_text("width = 6")
    target = write(
        tmp_path,
        "import neighbour_one_of_memfit as one\n"
        "def make():\n"
        "    import neighbour_two_of_memfit as two\n"
        "    return one.make(width=two.width)\n",
    )
    assert resolve_target(target).batch.shape == (4, 6)
    assert str(tmp_path) not in sys.path


def test_changed_file_is_read_again_and_no_cache_is_left(good: Path) -> None:
    resolve_target(f"{good}:make")
    good.write_text(GOOD.replace("batch=4", "batch=5"))
    assert resolve_target(f"{good}:make").batch.shape == (5, 8)
    assert [p.name for p in good.parent.iterdir()] == ["good.py"]


@pytest.mark.parametrize(
    ("function", "options", "message", "hint"),
    [
        ("plain", {"batch": 2}, "by --batch, a preset or .* takes no argument 'batch'", "leave"),
        ("make", {"seq": 2}, "seq is given, by --seq", "add a parameter 'seq'"),
        ("make", {"optimizer": "sgd"}, "by --optimizer", "leave it out"),
        ("plain", {"device": "cpu"}, "device is given", "add a parameter"),
        ("make", {"overrides": {"widht": "3"}}, "takes no argument 'widht'", "did you mean width"),
        ("make", {"overrides": {"width": "x"}}, "is not of type int", "value now is 8"),
        ("make", {"batch": 2, "overrides": {"batch": "3"}}, "given twice", "once"),
        ("required", {}, "missing a required argument: 'data'", "default"),
        ("mak", {}, "has no function 'mak'", "did you mean make"),
        ("number", {}, "'number' in .* is a int, not a function", "Workload"),
    ],
)
def test_what_the_function_cannot_take_is_refused(
    good: Path, function: str, options: dict, message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve_target(f"{good}:{function}", **options)
    assert hint in caught.value.hint


def test_missing_file_and_missing_function_name(tmp_path: Path, good: Path) -> None:
    with pytest.raises(UsageError, match="there is no file") as caught:
        resolve_target(f"{tmp_path}/none.py:make")
    assert "memfit init" in caught.value.hint
    for target in (f"{good}", f"{good}:"):
        with pytest.raises(UsageError, match="names a file but no function") as caught:
            resolve_target(target)
        assert f"{good}:FUNCTION" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1\ndef make(:\n", 2, "SyntaxError"),
        ("import torch\n\n1 / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("import no_such_module_here\n", 1, "ModuleNotFoundError: No module named"),
        ("def make():\n    return undefined\n", 2, "NameError: name 'undefined'"),
        ("def make():\n    import json\n    json.loads('{')\n", 3, "JSONDecodeError"),
        ("import sys\nsys.exit(2)\n", 2, "SystemExit: 2"),
    ],
)
def test_error_in_the_file_says_type_message_and_line(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    target = write(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolve_target(target)
    assert f"bad.py:{line}: {said}" in caught.value.message
    assert caught.value.hint
    assert type(caught.value.__cause__).__name__ in said
    assert str(tmp_path) not in sys.path


def test_syntax_error_in_a_neighbour_names_the_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour_bad_of_memfit.py").write_text("def (")
    target = write(tmp_path, "import neighbour_bad_of_memfit\n")
    with pytest.raises(UsageError, match=r"neighbour_bad_of_memfit\.py:1: SyntaxError"):
        resolve_target(target)


def test_failed_file_leaves_no_module_behind(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        resolve_target(write(tmp_path, "1 / 0", "failing.py"))
    assert "memfit_workload_failing" not in sys.modules


def test_something_else_than_a_workload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"returned a NoneType, not a memfit\.Workload") as caught:
        resolve_target(write(tmp_path, "def make(): pass"))
    assert "return memfit.Workload" in caught.value.hint


def test_ctrl_c_memory_and_memfit_errors_keep_their_meaning(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        resolve_target(write(tmp_path, "raise KeyboardInterrupt"))
    with pytest.raises(DeviceMemoryError, match="does not fit"):
        resolve_target(write(tmp_path, "def make(): raise MemoryError"))
    frozen = GOOD.replace(
        "device=device)\n    opt", "device=device).requires_grad_(False)\n    opt"
    )
    with pytest.raises(ModelError, match="no trainable parameters"):
        resolve_target(write(tmp_path, frozen))


def test_dataclasses_and_folder_without_py_in_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + GOOD
    text += "\n@dataclass\nclass Sizes:\n    width: int = 3\n"
    text += "\ndef sized():\n    return make(width=Sizes().width)\n"
    write(folder, text)
    assert resolve_target(f"{folder / 'bad.py'}:sized").batch.shape == (4, 3)
