"""Files and folders that a command writes, checked before the slow part begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memfit.errors import UsageError

_HINT = "choose a place that exists and is yours to write to"


def check_file(path: Path | None) -> None:
    """Raise UsageError if the file could not be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise UsageError(f"{str(path)!r} is a folder, not a file", hint=f"try {path / 'out.json'}")
    if not folder.is_dir():
        raise UsageError(f"there is no folder {str(folder)!r} to write into", hint=_HINT)
    if path.exists():
        if not os.access(path, os.W_OK):
            raise UsageError(f"{str(path)!r} cannot be written", hint=_HINT)
        return
    with writing(path):  # some folders, such as /proc, may be written to but take no files
        beside = path.with_name(f"{path.name}.part")  # nobody takes it for the file itself
        beside.touch()
        beside.unlink()


def make_folder(path: Path | None) -> None:
    """Make the folder if it is not there; raise UsageError if it cannot be."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder {str(path)!r} cannot be made: {error.strerror}", hint=_HINT
        ) from error


def write_json(path: Path, data: dict[str, Any], indent: int | None = 1) -> None:
    """Write the object; `schema_version` is in it already, if it has one."""
    write_text(path, json.dumps(data, indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write the file, or raise UsageError."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise UsageError where the file cannot be written inside."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {error.strerror}", hint=_HINT
        ) from error
