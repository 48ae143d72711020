"""`memfit profile --components`: where the seconds of the plain step go."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from memfit import api


def test_components_of_the_plain_step_are_shown_after_its_profile(memfit, tiny):
    result = memfit("profile", *tiny, "--executor", "module", "--components", "--steps", "3")
    assert result.exit_code == 0, result.stderr
    profiled, timed = result.stdout.split("component ")
    assert "peak of the step" in profiled
    for words in ("middle half of 3 steps", "no loader was given", "outside of segments"):
        assert words in " ".join(timed.split())
    assert result.stdout.splitlines()[-1].startswith("next: memfit plan encoder")


def test_components_are_in_the_json(memfit, tiny):
    words = ["--executor", "module", "--segments", "layers.*", "--json"]
    result = memfit("profile", *tiny, *words, "--components", "--steps", "2")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    times = data["components"]
    assert times["steps"] == 2
    assert sum(times["components"].values()) == pytest.approx(times["step_s"], rel=0.2)
    assert [row["name"] for row in times["segments"]] == ["layers.0", "layers.1", ""]
    assert json.loads(memfit("profile", *tiny, *words).stdout)["components"] is None


def test_components_of_a_step_that_does_not_fit_are_said_to_be_unknown(memfit, tiny, monkeypatch):
    measure = api.profile
    monkeypatch.setattr(api, "profile", lambda *a, **k: replace(measure(*a, **k), baseline=None))
    result = memfit("profile", *tiny, "--executor", "module", "--components", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["components"] is None
    assert "components are not timed: the plain step does not fit" in data["notes"][-1]


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (["--steps", "3"], "none are asked for", "add --components"),
        (["--components", "--accumulate", "2"], "of one batch", "leave --accumulate out"),
        (["--components", "--steps", "0"], "--steps", "greater than or equal to 1"),
    ],
)
def test_components_that_cannot_be_given_are_refused_at_once(memfit, tiny, words, said, hint):
    result = memfit("profile", *tiny, *words)
    assert result.exit_code == 2
    assert said in result.stderr and hint in result.stderr
