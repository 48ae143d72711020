"""Does an optimizer that runs otherwise make the same of the parameters?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from memfit.ir.result import Numerics
from memfit.measure.step import run_first_steps, untouched
from memfit.runtime.apply import Applied
from memfit.verify.numerics import Numbers, compare
from memfit.workload import Workload

STEPS = 2  # after which parameters are compared
APPROXIMATE_TOLERANCE = 1e-2  # of a parameter's largest, where optimizer state is rounded
ELSEWHERE_TOLERANCE = 1e-5  # the same, where the CPU steps, which rounds otherwise than the device
NOISE = 2  # times what plain steps differ by from themselves is no more than they might
ALL_ASTRAY = 0.1  # of all updates together, beyond that noise
ASTRAY = 0.5  # of one parameter's: one that is left out is a whole update away
FEW = 16  # numbers in a parameter: with less, whether they flip may be chance


def check_parameters(
    workload: Workload, planned: Applied, plain: Applied, steps: int = STEPS, accumulate: int = 1
) -> Numerics:
    """Compare parameters and buffers after some steps, with and without the set-up's optimizer.

    Where plain steps differ from themselves, that is the measure. An optimizer that rounds
    otherwise is compared after one step, for which all gradients are the same. Steps that a
    GradScaler skips do not count.
    """

    def after(applied: Applied) -> Numbers:
        with untouched(workload, unmeasured=True):
            with applied:
                loss = run_first_steps(workload, steps, accumulate=accumulate)
            assert loss is not None
            parameters = {n: p.detach() for n, p in workload.model.named_parameters()}
            return Numbers.copied(workload, loss, parameters)

    expected, actual = after(plain), after(planned)
    result = compare(expected, actual)
    if result.bitwise_vs_unplanned:
        return result
    again = after(plain)
    if compare(expected, again).bitwise_vs_unplanned:
        return result
    before = {name: p.detach() for name, p in workload.model.named_parameters()}
    return _beside_noise(result, before, expected, actual, again)


@dataclass(frozen=True)
class _Lengths:
    """Of a parameter's update, and how far off it comes out when planned, and when plain again."""

    update: float
    planned: float
    again: float

    @property
    def astray(self) -> bool:
        """Whether it is farther off than noise explains."""
        return self.planned > NOISE * self.again + ASTRAY * self.update


def _beside_noise(
    result: Numerics,
    before: dict[str, torch.Tensor],
    expected: Numbers,
    actual: Numbers,
    again: Numbers,
) -> Numerics:
    """Whether parameters are no farther from those of plain steps than these from themselves.

    Adam makes the noise in a gradient near zero as large as any update, so single numbers say
    nothing: what counts is the length of an update, of each parameter and of all together, but for
    those of a few numbers.
    """
    lengths = {
        name: _Lengths(
            _distance(expected.gradients[name], start),
            _distance(expected.gradients[name], actual.gradients[name]),
            _distance(expected.gradients[name], again.gradients[name]),
        )
        for name, start in before.items()
        if start.numel() >= FEW
    }
    update = _together(found.update for found in lengths.values()) or 1.0
    planned = _together(found.planned for found in lengths.values()) / update
    itself = _together(found.again for found in lengths.values()) / update
    note = (
        f"after plain optimizer steps parameters are {planned:.2g} of their updates' length away; "
        f"plain steps do not repeat themselves: two runs are {itself:.2g} apart"
    )
    astray = [name for name, found in lengths.items() if found.astray]
    if astray:
        note += f"; {len(astray)} of {len(lengths)} are farther off than that: {astray[0]}"
    agree = planned <= NOISE * itself + ALL_ASTRAY and not astray
    return replace(result, agree=agree, repeatable=False, note=note)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other.to(one.device)))


def _together(lengths: Iterable[float]) -> float:
    return sum(length**2 for length in lengths) ** 0.5
