"""The file `memfit init` writes resolves, trains and is never overwritten."""

from pathlib import Path

import pytest

import memfit
from memfit.errors import UsageError
from memfit.targets import resolve_target
from memfit.targets.starter import write_starter
from memfit.workload import Workload


def test_starter_resolves_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfit, "Workload", Workload, raising=False)
    path = tmp_path / "train_workload.py"
    write_starter(path)
    assert "memfit fit train_workload.py:workload" in path.read_text()
    workload = resolve_target(f"{path}:workload", batch=4, device="cpu", overrides={"width": "32"})
    assert workload.batch[0].shape == (4, 32)
    losses = []
    for _ in range(5):
        loss = workload.compute_loss()
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_existing_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("mine")
    with pytest.raises(UsageError, match="exists already") as caught:
        write_starter(path)
    assert "another name" in caught.value.hint
    assert path.read_text() == "mine"


def test_other_names_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not end in \.py"):
        write_starter(tmp_path / "train")
    with pytest.raises(UsageError, match="cannot be written"):
        write_starter(tmp_path / "missing" / "train.py")
