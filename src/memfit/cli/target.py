"""From the target options of a command to its workload, and back to a command line."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.workload import Workload


@dataclass(frozen=True)
class Target:
    """A target and its options as they were given."""

    name: str
    batch: int | None
    seq: int | None
    dtype: str | None
    optimizer: str | None
    device: str | None
    fields: Sequence[str]

    def build(self) -> Workload:
        """Return the workload. Without --device it is on CUDA where there is one."""
        import torch

        from memfit.targets import is_file_target, resolve_target

        device = self.device
        if device is None and not is_file_target(self.name):
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return resolve_target(
            self.name,
            batch=self.batch,
            seq=self.seq,
            dtype=self.dtype,
            optimizer=self.optimizer,
            device=device,
            overrides=_overrides(self.fields),
        )

    def takes_batch(self) -> bool:
        """Whether --batch can be given: the function of a file may have no such argument."""
        from memfit.targets import is_file_target

        if self.batch is not None or not is_file_target(self.name):
            return True
        file, _, function = self.name.rpartition(":")
        return any(
            node.args.kwarg is not None
            or "batch" in (a.arg for a in (*node.args.args, *node.args.kwonlyargs))
            for node in ast.parse(Path(file).read_bytes()).body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )

    def command(self, verb: str, *more: str) -> str:
        """Return the command line that does `verb` to the same target."""
        words = ["memfit", verb, self.name]
        given = {
            "--batch": self.batch,
            "--seq": self.seq,
            "--dtype": self.dtype,
            "--optimizer": self.optimizer,
            "--device": self.device,
        }
        for option, value in given.items():
            words += [] if value is None else [option, str(value)]
        for field in self.fields:
            words += ["--set", field]
        return shlex.join([*words, *more])


def accumulating(batches: int) -> list[str]:
    """The words that ask for this many batches per optimizer step."""
    return [] if batches == 1 else ["--accumulate", str(batches)]


def _overrides(fields: Sequence[str]) -> dict[str, str]:
    overrides = {}
    for text in fields:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            raise UsageError(
                f"--set {text!r} is not a field and a value", hint="write --set n_layer=4"
            )
        if name.strip() in overrides:
            raise UsageError(f"--set {name.strip()} is given twice", hint="give it once")
        overrides[name.strip()] = value
    return overrides
