"""Presets, recipes and configuration files."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memfit.config import PRESETS, RECIPES, UNREACHED, Config, from_data, load, named
from memfit.errors import UsageError

FULL: dict[str, Any] = {
    "budget": "12GiB",
    "max_slowdown": 1.5,
    "strategy": "interval",
    "interval": 2,
    "segments": ("layers.*",),
    "allow": ("recompute", "tiled_loss", "microbatch"),
    "force": ("microbatch",),
    "host_budget": "8GiB",
    "executor": "graph",
    "min_tensor_bytes": 1000,
    "accumulate": 4,
    "batch": 8,
    "seq": 512,
    "dtype": "bf16",
    "optimizer": "adamw",
}


@pytest.mark.parametrize("name", ["c.toml", "c.json"])
@pytest.mark.parametrize("config", [Config(**FULL), Config(utilization=0.8), Config()])
def test_a_file_gives_back_what_was_written(tmp_path: Path, name: str, config: Config) -> None:
    config.save(tmp_path / name)
    assert load(tmp_path / name) == config


@pytest.mark.parametrize("name", [*PRESETS, *RECIPES])
def test_every_name_is_a_configuration_that_a_file_can_keep(name: str, tmp_path: Path) -> None:
    named(name).save(tmp_path / "c.toml")
    assert load(tmp_path / "c.toml") == named(name)


def test_presets_go_further_and_further() -> None:
    allowed = [set(PRESETS[n].allow) for n in ("conservative", "balanced", "aggressive", "maximum")]
    assert all(less < more for less, more in pairwise(allowed))
    slower = [PRESETS[n].max_slowdown for n in ("conservative", "balanced", "aggressive")]
    assert slower == sorted(slower) and PRESETS["maximum"].max_slowdown is None


def test_what_is_given_goes_before_the_base() -> None:
    base = Config(utilization=0.8, dtype="bf16", allow=("recompute",), accumulate=2)
    mine = Config(budget="1GiB", allow=("offload",))
    both = mine.over(base)
    assert (both.budget, both.utilization, both.allow) == ("1GiB", None, ("offload",))
    assert (both.dtype, both.accumulate) == ("bf16", 2)


def test_a_strategy_goes_before_the_one_of_the_base_and_its_interval() -> None:
    base = Config(strategy="interval", interval=2, max_slowdown=2.0)
    assert Config(strategy="ratio").over(base) == Config(strategy="ratio", max_slowdown=2.0)
    assert Config(strategy="interval").over(base) == base
    swap = Config(strategy="swap", allow=("+tiled_loss",))  # over something that may move
    assert swap.over(PRESETS["balanced"]).allow[-1] == "tiled_loss"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"budget": "lots"}, "lots"),
    ({"budget": "1GiB", "utilization": 0.5}, "exclude"),
    ({"utilization": 1.5}, "utilization"),
    ({"max_slowdown": 0.5}, "max_slowdown"),
    ({"max_slowdown": "much"}, "max_slowdown"),
    ({"strategy": "best"}, "best"),
    ({"strategy": "swap", "allow": ["recompute"]}, "'swap' is made of offload"),
    ({"strategy": "ratio", "interval": 2}, "interval is for strategy interval"),
    ({"interval": 0}, "interval"),
    ({"activation_reduction": 1.5}, "activation_reduction"),
    ({"activation_reduction": 0.5, "utilization": 0.5}, "exclude"),
    ({"segments": 3}, "segments"),
    ({"force": ["recompute"]}, "recompute cannot be forced"),
    ({"allow": ["magic"]}, "magic"),
    ({"allow": 3}, "allow"),
    ({"host_budget": "8 apples"}, "apples"),
    ({"executor": "fast"}, "executor"),
    ({"dtype": "int4"}, "dtype"),
    ({"optimizer": "lion"}, "optimizer"),
    ({"accumulate": 0}, "accumulate"),
    ({"batch": 1.5}, "batch"),
    ({"batch": True}, "batch is True"),
    ({"accumulate": True}, "accumulate is True"),
    ({"allow": ["recompute", 5]}, "allow is"),
    ({"budgets": "1GiB"}, "unknown field"),
]


@pytest.mark.parametrize(("data", "said"), WRONG, ids=lambda v: str(v)[:30])
def test_what_means_nothing_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        from_data(data)
    assert refused.value.hint


@pytest.mark.parametrize("allow", [("recompute", 5), "recompute", 5, {"recompute"}])
def test_techniques_that_are_no_names_are_refused(allow: Any) -> None:
    with pytest.raises(UsageError, match="allow is") as refused:
        Config(allow=allow)
    assert refused.value.hint


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none/c\.toml' cannot be written: No such") as refused:
        Config(budget="1GiB").save(tmp_path / "none" / "c.toml")
    assert refused.value.hint


def test_every_field_is_written_and_checked() -> None:
    written = {line.split(" = ")[0] for line in Config(**FULL).to_toml().splitlines()}
    others = {"utilization", "activation_reduction"}  # one of these and the budget
    assert written == {f.name for f in fields(Config)} - others


@pytest.mark.parametrize("name", ["huge", *UNREACHED])
def test_names_that_are_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=name) as refused:
        named(name)
    assert refused.value.hint


@pytest.mark.parametrize("text", ["budget = ", "{", "[1, 2]"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    for name in ("c.toml", "c.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            load(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "none.toml")
