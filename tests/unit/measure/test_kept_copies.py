"""Copies from which a workload is restored, and the memory they lie in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from memfit.measure.kept_copies import Copies, fresh, reused
from memfit.measure.step import run_step, untouched


def test_memory_of_a_released_copy_is_used_again() -> None:
    one, other = torch.arange(6.0), torch.arange(6.0, 12.0)
    with reused():
        copies = Copies()
        first = copies.of(one)
        where = first.data_ptr()
        assert copies.of(other).data_ptr() != where, "the first is still needed"
        del first
        copies.release()
        again = Copies()
        kept = [again.of(one), again.of(other)]
        assert where in {copy.data_ptr() for copy in kept}
        assert all(map(torch.equal, kept, (one, other)))


def test_memory_for_a_copy_from_a_device_is_there_before_it_is_written() -> None:
    source: Any = SimpleNamespace(shape=torch.Size([3, 2]), dtype=torch.int16, is_cuda=True)
    assert torch.equal(fresh(source), torch.zeros(3, 2, dtype=torch.int16))


def test_other_shapes_and_dtypes_get_memory_of_their_own() -> None:
    with reused():
        copies = Copies()
        copies.of(torch.zeros(4))
        copies.release()
        for tensor in (torch.ones(2, 2), torch.ones(4, dtype=torch.int32)):
            assert torch.equal(Copies().of(tensor), tensor)


def test_without_reuse_every_copy_is_new() -> None:
    tensor = torch.ones(3)
    copies = Copies()
    copy = copies.of(tensor)
    copies.release()
    tensor.zero_()
    Copies().of(tensor)
    assert torch.equal(copy, torch.ones(3))


def test_a_workload_is_restored_from_memory_that_is_used_again(zoo: SimpleNamespace) -> None:
    workload = zoo.workload(zoo.ConvNet, zoo.images)
    run_step(workload)
    state = workload.optimizer.state_dict()["state"]
    moments = {k: {n: v.clone() for n, v in s.items()} for k, s in state.items()}
    before = [t.clone() for t in workload.model.state_dict().values()]
    with reused():
        for _ in range(3):
            with untouched(workload):
                run_step(workload)
    assert all(map(torch.equal, before, workload.model.state_dict().values()))
    after = workload.optimizer.state_dict()["state"]
    assert all(torch.equal(moments[k][n], v) for k, s in after.items() for n, v in s.items())
