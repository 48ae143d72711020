"""Where the forward of each segment begins: what is known of tensors that no joint graph has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

import torch

from memfit.ir.source import Source
from memfit.ir.step_graph import StepGraph


def with_lines(graph: StepGraph, modules: Mapping[int, torch.nn.Module]) -> StepGraph:
    """The graph with the line at which the forward of each call's module begins."""
    calls = (replace(call, source=_begins(modules[call.index]).text) for call in graph.calls)
    return replace(graph, calls=tuple(calls))


def _begins(module: torch.nn.Module) -> Source:
    """The line of a module's forward; empty where it is no Python code."""
    kind = type(module)
    if kind.__module__.startswith("memfit.runtime."):
        return Source()  # stands for a function of the user's, such as the loss
    forward = getattr(kind, "forward", None)  # of a scripted module it cannot be had by its class
    code = None if forward is None else getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return Source()
    file = PurePath(code.co_filename.replace("\\", "/")).name
    return Source("", file, code.co_firstlineno, f"forward of {kind.__name__}")
