"""ResNet-50 at batch 32: trained under a plan it is the network that plain training gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.measure.step import run_step
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target
from memfit.workload import Workload

pytestmark = pytest.mark.slow

STEPS = 2


def resnet(*, inplace: bool) -> Workload:
    pytest.importorskip("transformers")
    workload = resolve_target("transformers:resnet-50", batch=32, overrides={"image_size": "64"})
    for module in workload.model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = inplace
    return workload


@pytest.mark.parametrize("inplace", [False, True])
def test_parameters_and_batch_norm_statistics_are_those_of_plain_training(inplace: bool) -> None:
    workload = resnet(inplace=inplace)
    profile = memfit.profile(workload, executor="module")
    assert profile.baseline is not None
    static, peak = profile.graph.fixed_bytes, profile.baseline.peak_bytes
    plan = make_plan(profile, Goal(budget_bytes=int(static + 0.6 * (peak - static))))
    assert any(segment.decision == "recompute" for segment in plan.segments)

    def trained(planned: bool) -> dict[str, torch.Tensor]:
        again = copy.deepcopy(workload)
        if planned:
            with Applied(plan, again.model):
                losses = [run_step(again) for _ in range(STEPS)]
        else:
            losses = [run_step(again) for _ in range(STEPS)]
        return {**again.model.state_dict(), "losses": torch.stack(losses)}

    plain, fitted = trained(False), trained(True)
    assert plain.keys() == fitted.keys()
    assert all(torch.equal(plain[name], fitted[name]) for name in plain)
    moved = [n for n in plain if n.endswith("running_mean")]
    assert moved and all(plain[n].abs().max() > 0 for n in moved)
