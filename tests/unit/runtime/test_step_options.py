"""What a fitted step is given beside its batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memfit import Workload, fit_workload
from memfit.errors import UsageError
from memfit.runtime.step_options import check_step_options

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"clip_norm": -1}, "clip_norm is -1"),
    ({"clip_norm": float("nan")}, "clip_norm is nan"),
    ({"clip_norm": "1"}, "clip_norm is '1'"),
    ({"clip_norm": True}, "clip_norm is True"),
    ({"scaler": 3}, "scaler is a int"),
    ({"scheduler": 3}, "scheduler is a int"),
]


def test_options_that_are_none_are_refused_before_anything_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, 4)
    made = Workload(model, lambda model, batch: model(batch).mean(), optimizer, batch)
    fitted = fit_workload(made, "1GiB", steps=1, executor="module", accumulate=2)
    before = [p.detach().clone() for p in model.parameters()]
    for wrong, message in WRONG:
        for call in (
            lambda wrong=wrong: fitted.step(batch, **wrong),
            lambda w=wrong: fitted.flush(**w),
        ):
            with pytest.raises(UsageError, match=message) as refused:
                call()
            assert refused.value.hint
    assert fitted.waiting == 0 and all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_what_is_a_norm_and_a_scaler_is_taken() -> None:
    scaled = SimpleNamespace(scale=0, unscale_=0, step=0, update=0)
    for norm in (None, 0, 1.5, float("inf"), np.float32(1), torch.tensor(1.0)):
        check_step_options(norm, scaled, SimpleNamespace(step=0))
    check_step_options(None, torch.amp.GradScaler("cpu"), None)
