"""Where tensors come from: modules and lines of real steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from memfit.ir.profile import Profile
from memfit.ir.replay import LiveTensor
from memfit.ir.source import Source
from memfit.planning.replay import replay
from memfit.planning.simulate import Simulator
from memfit.targets import resolve_target

FILE = "my work load.py"
CODE = """
import torch, memfit
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 64)
        self.out = torch.nn.Linear(64, 8)
    def forward(self, x):
        h = torch.sigmoid(self.fc(x))
        return self.out(h * h)
def workload():
    model = torch.nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, x: model(x).square().mean()
    return memfit.Workload(model, loss, optimizer, torch.ones(16, 8))
"""
SMALL = {"n_layer": "2", "n_embd": "32", "n_head": "2", "n_ff": "64", "vocab_size": "50"}


def _tensors(profile: Profile) -> list[LiveTensor]:
    made = replay(Simulator(profile), [])
    return [t for t in made.tensors if t.end - t.start < made.length]


@pytest.fixture
def spaced(tmp_path: Path) -> memfit.Workload:
    """A workload in a file whose name has spaces."""
    path = tmp_path / FILE
    path.write_text(CODE)
    return resolve_target(f"{path}:workload")


def test_lines_in_a_file_whose_name_has_spaces(spaced: memfit.Workload) -> None:
    """The last word of the name was the file, and the rest of it a module."""
    tensors = _tensors(memfit.profile(spaced, executor="graph"))
    (made, *_) = [t for t in tensors if t.name == "sigmoid" and t.module == "0"]
    assert (made.file, made.line) == (FILE, 9)
    assert made.source == f"{FILE}:9 h = torch.sigmoid(self.fc(x))"
    assert {t.module for t in tensors if t.file} <= {
        f"{i}{m}" for i in "01" for m in ("", ".fc", ".out")
    }


def test_tensors_that_no_graph_knows_have_the_line_of_their_module(
    spaced: memfit.Workload,
) -> None:
    """By the executor `module` none had any."""
    tensors = _tensors(memfit.profile(spaced, executor="module"))
    inside = [t for t in tensors if t.module]
    assert {t.module for t in inside} == {"0", "1"}
    assert all(t.source == f"{FILE}:8 forward of Block" for t in inside)
    assert all((t.file, t.line) == (FILE, 8) for t in inside)


def test_torchs_own_layers_have_lines_and_no_line_is_memfits() -> None:
    """No tensor of the built-in encoder had a line: dynamo leaves frames of torch.nn out."""
    workload = resolve_target("encoder", device="cpu", batch=2, seq=16, overrides=SMALL)
    profile = memfit.profile(workload, executor="graph")
    (graph,) = profile.graphs
    made = [Source.read(node.source) for node in graph.nodes if node.role == "forward"]
    assert all(source.file == "transformer.py" for source in made)
    (relu,) = [node for node in graph.nodes if node.name == "relu"]
    assert "self.activation(self.linear1(x))" in Source.read(relu.source).code
    activations = [t for t in _tensors(profile) if t.category == "activations" and t.module]
    lines = sum(bool(t.line) for t in activations)
    assert lines > 0.9 * len(activations) > 10
