"""What a proof adds to a result in words: time over the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memfit import proof
from memfit.api import fit_workload
from memfit.measure.timing import Timing
from memfit.verify.speed import Speed
from memfit.workload import Workload


def net() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 4))
    return Workload(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.randn(16, 32), torch.randint(4, (16,))),
        name="net",
    )


PLAIN = Timing(1.0, 0.05, (1.0,))


@pytest.mark.parametrize(
    ("limit", "median_s", "spread_s", "plain", "told"),
    [
        (2.0, 2.902, 0.1, PLAIN, True),
        (2.0, 2.15, 0.1, PLAIN, False),  # it may be noise
        (2.0, 1.5, 0.1, PLAIN, False),
        (None, 2.902, 0.1, PLAIN, False),
        (2.0, 1e6, 0.1, None, True),  # the plain step does not fit: as it was profiled
    ],
)
def test_a_step_that_took_longer_than_allowed_went_unmentioned(
    monkeypatch: pytest.MonkeyPatch,
    limit: float | None,
    median_s: float,
    spread_s: float,
    plain: Timing | None,
    told: bool,
) -> None:
    speed = Speed(Timing(median_s, spread_s, (median_s,)), plain, plain)
    monkeypatch.setattr(proof, "compare_speed", lambda *given, **options: speed)
    options: dict[str, Any] = {"max_slowdown": limit, "executor": "module", "steps": 1}
    with fit_workload(net(), "100%", **options) as fitted:
        notes = [note for note in fitted.result.notes if note.startswith("slower than allowed")]
        assert len(notes) == told
        if plain is not None and told:
            assert "takes 2.902x the plain step's time (2.669x or more" in notes[0]
            assert "2x was the limit; 1.000x was predicted" in notes[0]
