"""Frozen dataclasses to plain data and back, checked against their type hints."""

from __future__ import annotations

import dataclasses
import gzip
import types
import zlib
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_GZIP = b"\x1f\x8b"


def unpacked(path: str | Path) -> bytes:
    """What a file holds, which may be packed by gzip; OSError where it cannot be read."""
    content = Path(path).read_bytes()
    if not content.startswith(_GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, zlib.error) as error:
        raise OSError(str(error)) from error


def to_data(value: Any) -> Any:
    """Return `value` as dicts, lists and plain values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_data(item) for item in value]
    return value


def from_data(kind: type[T], data: Any) -> T:
    """Build a `kind` from what `to_data` gave; ValueError names what does not fit."""
    result: T = _read(kind, data, kind.__name__)
    return result


def _read(kind: Any, data: Any, where: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        rest = [a for a in args if a is not type(None)]
        return _read(rest[0], data, where)
    if origin is tuple:
        _expect(isinstance(data, list), where, "a list", data)
        return tuple(_read(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), where, "an object", data)
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    if kind is float:
        _expect(
            isinstance(data, (int, float)) and not isinstance(data, bool), where, "a number", data
        )
        return float(data)
    _expect(type(data) is kind, where, f"a {kind.__name__}", data)
    return data


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), where, "an object", data)
    hints = get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in data:
            values[field.name] = _read(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where} has no {field.name!r}")
    unknown = set(data) - set(values)
    if unknown:
        raise ValueError(f"{where} has an unknown field {sorted(unknown)[0]!r}")
    return kind(**values)


def _expect(holds: bool, where: str, wanted: str, data: Any) -> None:
    if not holds:
        raise ValueError(f"{where} should be {wanted}, not {type(data).__name__}")
