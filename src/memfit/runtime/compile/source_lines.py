"""Where a traced tensor comes from: the module that makes it and the line of code behind it.

dynamo leaves frames of torch.nn out, so that users see their own code. Of a segment that is one of
torch's own modules nothing is left then: the frames are kept while a segment is traced, and looked
at where there are no others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import fx

from memfit.ir.source import Source

_OWN_CODE = str(Path(__file__).parents[2]) + os.sep  # calls segments: makes no tensor of theirs
_TARGETS = _OWN_CODE + "targets" + os.sep  # but these are models like a user's own
_TORCH_MODULES = os.path.join(os.path.dirname(torch.__file__), "nn", "modules") + os.sep
_LEAVES_OUT = "is_co_filename_from_nn_modules"


class _Frame(NamedTuple):
    path: str
    line: int
    code: str


@contextmanager
def lines_of_torch() -> Iterator[None]:
    """Let what is traced meanwhile know the frames of torch's own modules, too."""
    from torch._dynamo import symbolic_convert  # takes seconds to load

    translator = symbolic_convert.InstructionTranslatorBase
    if not hasattr(translator, _LEAVES_OUT):
        yield
        return
    with patch.object(translator, _LEAVES_OUT, lambda self: False):
        yield


def source_of(node: fx.Node) -> Source:
    """Module path and source line behind a node, without folders."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(modules[-1][0]) if modules else ""
    frame = _frame(node.meta.get("stack_trace") or "")
    path = path.rpartition("]")[2].lstrip(".")
    if frame is None:
        return Source(path)
    return Source(path, frame.path.replace("\\", "/").rpartition("/")[2], frame.line, frame.code)


def is_own(path: str) -> bool:
    """Whether a file is memfit's, and no model that comes with it."""
    return path.startswith(_OWN_CODE) and not path.startswith(_TARGETS)


def _frame(trace: str) -> _Frame | None:
    """The innermost frame of a user's code; else the innermost of the first file of torch.nn.

    That file is the segment's: what it calls are single layers, which the module's path tells.
    """
    frames = [frame for frame in _frames(trace) if not is_own(frame.path)]
    others = [frame for frame in frames if not frame.path.startswith(_TORCH_MODULES)]
    if others:
        return others[-1]
    return next((frame for frame in reversed(frames) if frame.path == frames[0].path), None)


def _frames(trace: str) -> Iterator[_Frame]:
    """The frames of a formatted traceback, outermost first."""
    lines = [line.strip() for line in trace.splitlines()]
    for number, line in enumerate(lines):
        if line.startswith('File "'):
            path, _, rest = line.removeprefix('File "').rpartition('", line ')
            code = lines[number + 1] if number + 1 < len(lines) else ""
            yield _Frame(path, int(rest.partition(",")[0]), "" if code.startswith("File") else code)
