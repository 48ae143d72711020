"""Dataclasses to plain data and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.ir.codec import from_data, to_data
from memfit.ir.plan import Plan
from memfit.ir.profile import (
    AllocatorStart,
    Baseline,
    CallTime,
    DeviceFacts,
    Profile,
)
from memfit.ir.result import (
    BaselineResult,
    Decisions,
    Measured,
    Numerics,
    Predicted,
    ReferenceResult,
    Result,
)
from memfit.ir.step_graph import Block, Call, Hold, StepGraph

_names = st.text(max_size=8)
_ints = st.integers(-1, 2**50)
_floats = st.floats(allow_nan=False, allow_infinity=False)
# from_type builds every dataclass from its own hints, whatever fields it will have.
for _kind, _strategy in ((int, _ints), (float, _floats), (str, _names)):
    st.register_type_strategy(_kind, _strategy)


def _round_trip(value: Any) -> Any:
    return from_data(type(value), json.loads(json.dumps(to_data(value))))


@settings(max_examples=40, deadline=None)
@given(st.from_type(Plan))
def test_plans(plan: Plan) -> None:
    assert _round_trip(plan) == plan


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Profile,
        graph=st.builds(
            StepGraph,
            calls=st.lists(st.from_type(Call), max_size=3).map(tuple),
            blocks=st.lists(
                st.builds(Block, holds=st.lists(st.from_type(Hold), max_size=2).map(tuple)),
                max_size=3,
            ).map(tuple),
        ),
    )
)
def test_profiles(profile: Profile) -> None:
    assert _round_trip(profile) == profile


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Result,
        device=st.dictionaries(_names, st.one_of(st.none(), _ints, _names), max_size=3),
        references=st.one_of(
            st.none(),
            st.dictionaries(
                _names, st.one_of(st.none(), st.from_type(ReferenceResult)), max_size=2
            ),
        ),
    )
)
def test_results(result: Result) -> None:
    assert _round_trip(result) == result
    data = result.to_json()
    assert next(iter(data)) == "schema_version"
    assert set(data) == {f.name for f in fields(Result)}


@pytest.mark.parametrize(
    "kind",
    [
        AllocatorStart,
        Baseline,
        BaselineResult,
        CallTime,
        Decisions,
        DeviceFacts,
        Measured,
        Numerics,
        Predicted,
    ],
)
@settings(max_examples=5, deadline=None)
@given(draws=st.data())
def test_a_missing_or_unknown_field_is_named(draws: st.DataObject, kind: Any) -> None:
    data = to_data(draws.draw(st.from_type(kind)))
    first = fields(kind)[0].name
    with pytest.raises(ValueError, match=f"has no '{first}'"):
        from_data(kind, {k: v for k, v in data.items() if k != first})
    with pytest.raises(ValueError, match="unknown field 'colour'"):
        from_data(kind, {**data, "colour": "red"})


@dataclass(frozen=True)
class _Sample:
    count: int
    share: float
    names: tuple[str, ...]
    sizes: dict[str, int]
    maybe: int | None = None


GOOD = {"count": 1, "share": 0.5, "names": ["a"], "sizes": {"b": 2}}


def test_a_sample() -> None:
    assert from_data(_Sample, GOOD) == _Sample(1, 0.5, ("a",), {"b": 2})
    assert from_data(_Sample, {**GOOD, "share": 1, "maybe": 3}).share == 1.0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("count", 1.0, "_Sample.count should be a int, not float"),
        ("count", True, "should be a int, not bool"),
        ("share", "much", "should be a number, not str"),
        ("share", True, "should be a number, not bool"),
        ("names", "a", "should be a list, not str"),
        ("names", [1], r"_Sample.names\[0\] should be a str, not int"),
        ("sizes", [], "should be an object, not list"),
        ("sizes", {"b": None}, "_Sample.sizes.b should be a int, not NoneType"),
        ("maybe", "x", "_Sample.maybe should be a int, not str"),
    ],
)
def test_values_of_another_type_are_refused(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_data(_Sample, {**GOOD, field: value})


def test_a_list_is_no_dataclass() -> None:
    with pytest.raises(ValueError, match="_Sample should be an object, not list"):
        from_data(_Sample, [])
