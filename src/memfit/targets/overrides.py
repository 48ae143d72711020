"""Fields given as text ("n_layer=4") -> values of the type the field has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memfit.errors import UsageError
from memfit.targets.options import suggest

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_NONES = ("none", "null")


def parse_fields(
    target: str,
    overrides: Mapping[str, str],
    current: Mapping[str, Any],
    *,
    optional: bool = False,
) -> dict[str, Any]:
    """Return `overrides` parsed to the types of the `current` values.

    A name that `current` lacks is a UsageError with close matches. `optional` lets every field
    be set to none.
    """
    values: dict[str, Any] = {}
    for name, text in overrides.items():
        if name not in current:
            raise UsageError(
                f"{target} has no field {name!r}",
                hint=f"{suggest(name, current)}its fields are {', '.join(sorted(current))}",
            )
        if optional and text.strip().lower() in _NONES:
            values[name] = None
        else:
            values[name] = _parse_as(name, text, current[name])
    return values


def parse_literal(text: str) -> Any:
    """Return the none, bool, number, list or dict that `text` writes, else the text itself."""
    word = text.strip()
    if word.lower() in _NONES:
        return None
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return json.loads(word)
    except json.JSONDecodeError:
        pass
    try:
        return float(word)  # JSON has no ".5" and no "1."
    except ValueError:
        return text


def _parse_as(name: str, text: str, current: Any) -> Any:
    try:
        if isinstance(current, bool):
            return _BOOLS[text.strip().lower()]
        if isinstance(current, (int, float, str)):
            return type(current)(text)
        if isinstance(current, (list, tuple)):
            return type(current)(_parse_list(text))
        if isinstance(current, dict):
            return _parse_dict(text)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{name}={text!r} is not of type {type(current).__name__}",
            hint=f"the value now is {current!r}; write it as --set {name}={_example(current)}",
        ) from error
    return parse_literal(text)


def _parse_list(text: str) -> list[Any]:
    value = json.loads(text) if text.strip().startswith("[") else text.split(",")
    return [parse_literal(item) if isinstance(item, str) else item for item in value]


def _parse_dict(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _example(current: Any) -> str:
    if isinstance(current, bool):
        return "true"
    if isinstance(current, (list, tuple)):
        return ",".join(map(str, current))
    return f"'{json.dumps(current)}'" if isinstance(current, dict) else str(current)
