"""Which frame of a traceback is named: a user's before torch's, and never memfit's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import memfit
from memfit.ir.source import Source
from memfit.runtime.compile.source_lines import source_of

OWN = Path(memfit.__file__).parent
NN = Path(torch.__file__).parent / "nn" / "modules"


def _node(*frames: tuple[Path | str, int, str]) -> Any:
    lines = [
        f'  File "{path}", line {line}, in f\n    {code}\n    ^^^^\n' for path, line, code in frames
    ]
    return SimpleNamespace(meta={"stack_trace": "".join(lines), "nn_module_stack": {}})


def test_the_package_itself_is_no_place() -> None:
    """Of a loss the line was `return function(*args, **kwargs)` of memfit's own."""
    own = (OWN / "runtime" / "loss_calls.py", 83, "return function(*args, **kwargs)")
    assert source_of(_node(own)) == Source()
    mine = ("/somewhere/memfit/train.py", 3, "y = f(x)")
    assert source_of(_node(mine, own)) == Source("", "train.py", 3, "y = f(x)")


def test_models_that_come_with_it_are_places() -> None:
    own = (OWN / "runtime" / "compile" / "backend.py", 1, "return target(x)")
    model = (OWN / "targets" / "encoder.py", 68, "hidden = layer(hidden)")
    assert source_of(_node(own, model)).place == "encoder.py:68"


def test_torchs_layers_are_named_where_there_is_no_other_code() -> None:
    block = (NN / "transformer.py", 977, "x = self.linear1(x)")
    layer = (NN / "linear.py", 134, "return F.linear(x, self.weight)")
    assert source_of(_node(block, layer)).place == "transformer.py:977"
    user = ("C:\\mine\\net work.py", 5, "return self.block(x)")
    assert source_of(_node(user, block, layer)).place == "net work.py:5"
    assert source_of(_node()) == Source()
