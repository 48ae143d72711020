"""What a proof adds to a result in words: time over the limit, a reference that is no measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memfit import proof
from memfit.api import fit_workload
from memfit.ir.result import Numerics
from memfit.measure.timing import Timing
from memfit.proof import with_reference_judged
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


def test_a_reference_as_far_as_zeros_was_taken_for_a_measure() -> None:
    """ResNet-152: both were 1.39 of the gradients' length from full precision, and agreed."""
    found = Numerics(False, 0.1, 7e-3, {"planned": 1.39, "unplanned": 1.39}, agree=True)
    judged = with_reference_judged(found)
    assert judged.agree and "full precision is no measure here" in str(judged.note)
    assert "1.4 of their length" in str(judged.note)
    also = with_reference_judged(replace(found, note="before"))
    assert str(also.note).startswith("before; full precision")
    near = replace(found, error_vs_reference={"planned": 0.02, "unplanned": 0.02})
    other = replace(found, agree=False)
    none = replace(found, error_vs_reference=None)
    for same in (near, other, none):
        assert with_reference_judged(same) is same
