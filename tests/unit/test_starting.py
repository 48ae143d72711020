"""Presets and configurations from Python: what a verb is not given comes from them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import memfit
from memfit import Workload
from memfit.config import PRESETS, Config
from memfit.errors import UsageError
from memfit.ir.profile import Profile
from memfit.starting import GOALS, OF_A_TARGET, OPTIONS, started

Asked = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def workload() -> Workload:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda model, batch: model(batch).mean(), optimizer, torch.ones(8, 16))


@pytest.fixture(scope="module")
def profile(workload: Workload) -> Profile:
    return memfit.profile(workload, executor="module", accumulate=2)


@pytest.fixture
def asked(workload: Workload) -> Asked:
    """What a verb is called with."""

    @started
    def verb(
        workload: Workload,
        budget: Any = "auto",
        *,
        preset: str | None = None,
        config: Any = None,
        plan: Any = None,
        allow: Any = None,
        strategy: str = "optimal",
        interval: int | None = None,
        segments: Any = None,
        force: Any = (),
        max_slowdown: float | None = None,
        activation_reduction: float | None = None,
        host_budget: Any = None,
        executor: str | None = None,
        min_tensor_bytes: Any = 0,
        accumulate: int = 1,
    ) -> dict[str, Any]:
        found = dict(locals())
        return {k: v for k, v in found.items() if k not in ("workload", "preset", "config", "plan")}

    return lambda *args, **options: verb(workload, *args, **options)


def test_a_preset_says_how_far_a_fit_may_go(asked: Asked) -> None:
    found, balanced = asked("60%", preset="balanced"), PRESETS["balanced"]
    assert (found["budget"], found["allow"]) == ("60%", balanced.allow)
    assert found["max_slowdown"] == balanced.max_slowdown
    found = asked(preset="balanced", allow="+tiled_loss", max_slowdown=3.0)
    assert found["allow"] == (*balanced.allow, "tiled_loss") and found["max_slowdown"] == 3.0
    assert asked(preset="balanced", allow=["recompute"])["allow"] == ("recompute",)
    assert asked(preset="balanced", allow=[])["allow"] == []


def test_every_field_reaches_the_verb_or_is_told(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    values: dict[str, Any] = {
        "budget": "2GiB",
        "activation_reduction": 0.4,
        "max_slowdown": 1.5,
        "strategy": "ratio",
        "interval": 3,
        "segments": ("1",),
        "force": ("microbatch",),
        "host_budget": "1GiB",
        "executor": "module",
        "min_tensor_bytes": "1KB",
        "allow": ("recompute", "offload"),
        "accumulate": 4,
    }
    known = {*values, "utilization", *OF_A_TARGET}
    assert (
        known
        == {f.name for f in fields(Config)}
        == {*GOALS, *OPTIONS, *OF_A_TARGET}
        | {
            "allow",
            "accumulate",
        }
    )
    for name, value in values.items():
        assert asked(config=Config(**{name: value}))[name] == value
    half, whole = (asked(config=Config(utilization=u))["budget"] for u in (0.5, 1.0))
    assert half == whole // 2
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        asked(preset="124m-4gib")
    assert "batch=8, seq=1024" in caplog.text and "left out" in caplog.text


def test_a_configuration_for_a_target_was_used_in_part(asked: Asked, tmp_path: Path) -> None:
    """What it said of the batch was left out, with a warning, of a workload that has one."""
    config = Config(batch=8, seq=4, dtype="bf16", optimizer="sgd")
    config.save(tmp_path / "mine.toml")
    for given in (config, tmp_path / "mine.toml", str(tmp_path / "mine.toml")):
        with pytest.raises(UsageError, match="batch=8, seq=4, dtype='bf16', optimizer='sgd'"):
            asked(config=given)


def test_what_is_given_goes_before_a_file_and_the_file_before_a_preset(
    asked: Asked, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    Config(budget="1GiB", max_slowdown=1.2, strategy="interval", interval=2).save(file)
    found = asked(preset="aggressive", config=str(file))
    assert (found["budget"], found["max_slowdown"], found["interval"]) == ("1GiB", 1.2, 2)
    assert found["allow"] == PRESETS["aggressive"].allow
    found = asked(512, preset="aggressive", config=file, strategy="optimal")
    assert (found["budget"], found["strategy"], found["interval"]) == (512, "optimal", None)
    assert asked(config=file, activation_reduction=0.5)["budget"] == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "huge"}, "unknown preset 'huge'"),
        ({"config": 3}, "config is a int"),
        ({"config": "none.toml"}, "cannot be read"),
        ({"preset": "balanced", "plan": object()}, "but plan gives one"),
        ({"preset": "balanced", "allow": "magic"}, "unknown technique 'magic'"),
    ],
)
def test_what_is_no_preset_is_refused(asked: Asked, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        asked(**options)
    assert refused.value.hint


def test_presets_are_for_plan_fit_and_fit_workload(workload: Workload, profile: Profile) -> None:
    config = Config(allow=("recompute",), executor="module", budget="1GiB", accumulate=2)
    made = memfit.plan(profile, preset="conservative", config=replace(config, executor=None))
    assert (made.budget_bytes, made.techniques) == (2**30, ())
    with pytest.raises(UsageError, match="accumulate is 2") as refused:
        memfit.plan(workload, config=config)
    assert "profile(workload, accumulate=2)" in (refused.value.hint or "")
    parts = workload.model, workload.loss_fn, workload.optimizer, workload.batch
    with memfit.fit(*parts, config=config, steps=1) as fitted:
        assert (fitted.plan.budget_bytes, fitted.plan.executor) == (2**30, "module")
        assert fitted.profile.accumulate == 2
    with pytest.raises(UsageError, match="unknown preset"):
        memfit.fit_workload(workload, preset="huge")
