"""Text -> value of the field's type."""

from typing import Any

import pytest

from memfit.errors import UsageError
from memfit.targets.overrides import parse_fields, parse_literal


@pytest.mark.parametrize(
    ("current", "text", "value"),
    [
        (12, "4", 4),
        (0.1, "0", 0.0),
        (0.1, "1e-3", 1e-3),
        (True, "false", False),
        (False, "Yes", True),
        ("gelu", "relu", "relu"),
        ("gelu", "4", "4"),
        ([3, 4], "1,2", [1, 2]),
        ([3, 4], "[1, 2]", [1, 2]),
        (["a"], "b,c", ["b", "c"]),
        ((1, 2), "3,4", (3, 4)),
        ({"a": 1}, '{"a": 2}', {"a": 2}),
        (None, "7", 7),
        (None, "none", None),
        (None, "gelu", "gelu"),
    ],
)
def test_value_takes_the_type_of_the_field(current: Any, text: str, value: Any) -> None:
    parsed = parse_fields("t", {"field": text}, {"field": current})["field"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("current", "text"),
    [(12, "4.5"), (12, "four"), (0.1, "x"), (True, "2"), ([1], "[1"), ({}, "[1]"), (12, "none")],
)
def test_value_of_another_type_is_refused(current: Any, text: str) -> None:
    with pytest.raises(UsageError, match=f"is not of type {type(current).__name__}") as caught:
        parse_fields("t", {"field": text}, {"field": current})
    assert "--set field=" in caught.value.hint


def test_optional_fields_can_be_none() -> None:
    assert parse_fields("t", {"a": "None"}, {"a": 4096}, optional=True) == {"a": None}


def test_unknown_field_gets_close_matches() -> None:
    with pytest.raises(UsageError, match="t has no field 'n_layr'") as caught:
        parse_fields("t", {"n_layr": "4"}, {"n_layer": 12, "vocab": 3})
    assert "did you mean n_layer?" in caught.value.hint
    assert "its fields are n_layer, vocab" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("0.5", 0.5), (".5", 0.5), ("True", True), ("null", None), ("avg", "avg")],
)
def test_literal(text: str, value: Any) -> None:
    assert parse_literal(text) == value
    assert type(parse_literal(text)) is type(value)
