"""Dispatch: which words name which workload, and what unknown ones are answered."""

import os
import subprocess
import sys

import pytest
import torch

from memfit.errors import UsageError
from memfit.targets import is_file_target, resolve_target, target_names

TINY = {"n_layer": "1", "n_embd": "16", "n_head": "2", "n_ff": "32", "vocab_size": "50"}


def test_target_names_lists_builtins_and_table() -> None:
    names = target_names()
    assert names[0] == "encoder"
    assert {"transformers:gpt2", "transformers:llama-8b", "transformers:resnet-50"} <= set(names)


def test_importing_targets_imports_no_zoo() -> None:
    code = (
        "import sys, memfit.targets as t; t.target_names(); "
        "print([m for m in ('transformers', 'torchvision', 'timm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("target", "suggestion"),
    [
        ("encodr", "did you mean encoder?"),
        ("gpt2", "transformers:gpt2"),
        ("transformer:gpt2", "transformers:gpt2"),
        ("transformers/gpt2-xl", "transformers:gpt2-xl"),
        ("timn:", "timm:NAME"),
        ("", "targets are encoder"),
        ("models/train:make", "path/to/file.py:function"),
    ],
)
def test_unknown_target_gets_close_matches_and_forms(target: str, suggestion: str) -> None:
    with pytest.raises(UsageError, match="unknown target") as caught:
        resolve_target(target)
    assert suggestion in caught.value.hint
    assert "path/to/file.py:function" in caught.value.hint


@pytest.mark.parametrize(
    ("target", "is_file"),
    [("a/b.py:f", True), ("b.py", True), ("C:\\x\\b.py:f", True), ("timm:resnet18", False)],
)
def test_is_file_target(target: str, is_file: bool) -> None:
    assert is_file_target(target) is is_file


def test_same_call_gives_same_weights_and_batch_and_leaves_the_rng_alone() -> None:
    before = torch.get_rng_state()
    first = resolve_target("encoder", batch=2, seq=4, overrides=TINY)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    second = resolve_target("encoder", batch=2, seq=4, overrides=TINY)
    other = resolve_target("encoder", batch=2, seq=4, overrides=TINY, seed=1)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(first.batch, second.batch, strict=True))
    assert not torch.equal(first.batch[0], other.batch[0])
    assert not torch.equal(first.model.head.weight, other.model.head.weight)
