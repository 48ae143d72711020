"""Swapping on a GPU: pinned copies at their full rate, the plain step's numbers, less memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memfit
from memfit.errors import HostMemoryError
from memfit.measure.bandwidth import device_copy_bandwidth
from memfit.measure.memory import measure_peak, memory_cap
from memfit.measure.step import drop_gradients, run_step, untouched
from memfit.planning.make_plan import Goal, make_plan
from memfit.runtime.apply import Applied
from memfit.runtime.swap import arena as arenas
from memfit.runtime.swap.arena import Arena, free_host_bytes
from memfit.runtime.swap.lanes import CudaLanes
from memfit.targets import resolve_target
from memfit.verify.numerics import check_numerics
from memfit.workload import Workload

MIB = 2**20
WIDTH = 64
ENCODER = {"n_layer": "8", "n_embd": "256", "n_head": "4", "n_ff": "1024", "vocab_size": "2000"}
GPT2 = {"n_layer": "4", "n_embd": "256", "n_head": "4", "vocab_size": "4000"}


class Block(nn.Module):
    """Convolution, batch-norm, ReLU in place, dropout, and a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.relu(self.norm(self.conv(x))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def conv_net() -> Workload:
    torch.manual_seed(0)
    model = ConvNet().cuda()
    batch = torch.randn(16, 3, 96, 96, device="cuda"), torch.randint(10, (16,), device="cuda")
    return Workload(model, _loss, torch.optim.SGD(model.parameters(), lr=0.01), batch)


def encoder() -> Workload:
    return resolve_target("encoder", device="cuda", batch=32, seq=256, overrides=ENCODER)


def gpt2() -> Workload:
    """Tied weights, bf16 autocast, attention dropout."""
    return resolve_target(
        "transformers:gpt2", device="cuda", batch=8, seq=512, dtype="bf16", overrides=GPT2
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "batch-norm and dropout": conv_net,
    "encoder": encoder,
    "tied weights under autocast": gpt2,
}


# The other targets of the core, small but with tensors that are worth a copy.
_WIDE = {
    "hidden_size": "256",
    "intermediate_size": "1024",
    "num_hidden_layers": "4",
    "num_attention_heads": "4",
}
_TEXT = {"batch": 16, "seq": 256}
TARGETS: dict[str, dict[str, Any]] = {
    "transformers:llama-160m": {
        **_TEXT,
        "overrides": {**_WIDE, "num_key_value_heads": "4", "vocab_size": "2000"},
    },
    "transformers:vit-base": {"batch": 32, "overrides": {**_WIDE, "num_labels": "100"}},
    "transformers:resnet-50": {"batch": 16, "overrides": {"num_labels": "100"}},
    "transformers:bert-base": {**_TEXT, "overrides": {**_WIDE, "vocab_size": "2000"}},
    "transformers:t5-small": {
        **_TEXT,
        "overrides": {"num_layers": "3", "num_decoder_layers": "3", "vocab_size": "2000"},
    },
}


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def swapping(workload: Workload, executor: str) -> Applied:
    """All that can be moved is moved."""
    profile = memfit.profile(workload, executor=executor)
    return Applied(memfit.plan(profile, strategy="swap", allow="offload"), workload.model)


def steps(workload: Workload, applied: Applied, number: int) -> None:
    with applied:
        for _ in range(number):
            run_step(workload)


# -- what it is made of ---------------------------------------------------------------------------


def test_the_private_parts_of_torch_are_there() -> None:
    autograd = torch._C._autograd
    assert hasattr(autograd, "_unsafe_set_version_counter")  # storages.py
    assert hasattr(autograd, "_top_saved_tensors_default_hooks")  # hooks.py
    assert hasattr(torch._C, "_current_graph_task_id")  # engine.py
    assert hasattr(torch._C, "_storage_Use_Count")  # gauge.py
    assert isinstance(torch.ones(1).untyped_storage()._cdata, int)
    one, other = torch.ones(2), torch.ones(2)
    autograd._unsafe_set_version_counter((one,), (5,))
    assert (one._version, other._version) == (5, 0)
    assert autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._current_graph_task_id() == -1


def test_an_arena_is_pinned_and_unpinned(device: torch.device) -> None:
    arena = Arena(64 * MIB, pinned=True)
    slot = arena.take(MIB)
    assert slot.view.is_pinned()
    address = slot.view.data_ptr()
    arena.close()
    arenas._pin(address, MIB)  # refused if it were still pinned
    arenas._unpin(address)


def test_copies_run_beside_the_host_at_the_pinned_rate(device: torch.device) -> None:
    size, number = 128 * MIB, 8
    arena, lanes = Arena(number * size, pinned=True), CudaLanes(device)
    here = torch.arange(size // 8, device=device).view(torch.uint8)
    slots = [arena.take(size) for _ in range(number)]
    back = torch.empty_like(here)
    for slot in slots:  # the first copies touch the pages
        lanes.copy_out(here, slot)
    lanes.synchronize()
    lanes.reset_traffic()
    begun = time.perf_counter()
    copies = [lanes.copy_out(here, slot) for slot in slots]
    asked_s = time.perf_counter() - begun
    assert not lanes.done(copies[-1])
    lanes.synchronize()
    took_s = time.perf_counter() - begun
    assert asked_s < took_s / 2
    for slot in slots:
        lanes.wait(lanes.copy_in(slot, back))
    torch.cuda.synchronize()
    assert torch.equal(here, back)
    out, in_ = lanes.traffic()
    assert (out.copies, in_.copies, out.bytes) == (number, number, number * size)
    rates = device_copy_bandwidth(device)
    assert out.gb_per_s * 1e9 > 0.85 * rates.pinned_to_host
    assert in_.gb_per_s * 1e9 > 0.85 * rates.pinned_to_device
    arena.close()


def test_memory_that_cannot_be_had_is_refused_and_the_next_kernel_runs() -> None:
    with pytest.raises(HostMemoryError, match="cannot allocate"):
        Arena(4 * free_host_bytes(), pinned=True)
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_pinning_that_fails_is_refused_and_the_next_kernel_runs() -> None:
    arena = Arena(4 * MIB, pinned=True)
    view = arena.take(MIB).view
    with pytest.raises(HostMemoryError, match="cannot pin"):  # it is pinned already
        arenas._pin(view.data_ptr(), MIB)
    assert float(torch.ones(4, device="cuda").sum()) == 4
    torch.cuda.synchronize()
    arena.close()


# -- whole steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", ["module", "graph"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_everything_swapped_gives_the_same_numbers(name: str, executor: str) -> None:
    check_everything_swapped(WORKLOADS[name](), executor)


@pytest.mark.parametrize("executor", ["module", "graph"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_other_target_of_the_core_does_so_too(name: str, executor: str) -> None:
    check_everything_swapped(resolve_target(name, device="cuda", **TARGETS[name]), executor)


def check_everything_swapped(workload: Workload, executor: str) -> None:
    """The numbers are those of the plain step where that repeats itself, and everything moved."""
    planned = swapping(workload, executor)
    unplanned = None
    if executor != "module":
        unplanned = Applied(planned.plan.unplanned(), workload.model)
    numerics = check_numerics(workload, planned, unplanned)
    assert numerics.bitwise_vs_unplanned or not numerics.repeatable, numerics
    assert planned.swap is not None
    done = planned.swap.statistics()
    assert done.moves > 0 and done.moves == done.retrievals + done.stayed


@pytest.mark.parametrize("executor", ["module", "graph"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_the_peak_falls_as_predicted(name: str, executor: str) -> None:
    workload = WORKLOADS[name]()
    planned = swapping(workload, executor)
    plan = planned.plan
    with untouched(workload):
        run_step(workload)
        plain = measure_peak(workload, lambda: run_step(workload)).bytes
        steps(workload, planned, 2)
        peak = measure_peak(workload, lambda: steps(workload, planned, 2)).bytes
    assert peak - plan.static_bytes < 0.75 * (plain - plan.static_bytes)
    assert abs(plan.predicted.peak_bytes / peak - 1) < 0.03


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_budget_with_offload_alone_holds(executor: str) -> None:
    workload = encoder()
    profile = memfit.profile(workload, executor=executor)
    assert profile.baseline is not None
    static = profile.graph.fixed_bytes
    budget = int(static + 0.7 * (profile.baseline.peak_bytes - static))
    with memfit.fit_workload(
        workload, budget, profiled=profile, allow="offload", steps=5
    ) as fitted:
        result = fitted.result
        assert result.measured.peak_reserved_bytes <= budget
        assert result.measured.retries == 0
        assert abs(result.peak_error) < 0.03
        assert result.numerics.bitwise_vs_unplanned, result.numerics
        assert result.swap is not None and result.swap.moves > 0
        with memory_cap(workload.device, budget):
            fitted.step(workload.batch)


def test_fused_code_swaps_too() -> None:
    workload = encoder()
    planned = swapping(workload, "inductor")
    with untouched(workload):
        steps(workload, planned, 3)
    assert planned.swap is not None
    done = planned.swap.statistics()
    assert done.moves == done.retrievals + done.stayed > 0
    unplanned = Applied(planned.plan.unplanned(), workload.model)
    assert check_numerics(workload, planned, unplanned).agree


def test_copies_hide_behind_the_computation() -> None:
    workload = encoder()
    planned = swapping(workload, "module")
    with untouched(workload):
        steps(workload, planned, 5)
        assert planned.swap is not None
        planned.swap.reset_statistics()
        steps(workload, planned, 5)
    done = planned.swap.statistics()
    assert done.steps == 5
    assert done.hidden_share > 0
    assert done.late < done.moves / 2


def test_fifty_steps_are_flat(device: torch.device) -> None:
    workload = conv_net()
    planned = swapping(workload, "module")
    process = psutil.Process()
    seen = []
    with planned:
        for _ in range(60):
            run_step(workload)
            torch.cuda.synchronize()
            assert planned.swap is not None
            held = planned.swap.statistics().host_bytes
            seen.append((torch.cuda.memory_allocated(device), held, process.memory_info().rss))
    late = seen[10:]
    assert len({(allocated, held) for allocated, held, _ in late}) == 1
    assert late[-1][2] - late[0][2] < 16 * MIB


@pytest.mark.parametrize("executor", ["module", "graph"])
def test_a_backward_that_fails_gives_everything_up(executor: str) -> None:
    workload = conv_net()
    planned = swapping(workload, executor)
    fails = True

    def fail(*_: object) -> None:
        if fails:
            raise ValueError("on purpose")

    with untouched(workload), planned:
        run_step(workload)
        run_step(workload)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        handle = workload.model.get_submodule("blocks.2").register_full_backward_pre_hook(fail)
        for _ in range(3):
            with pytest.raises(ValueError, match="on purpose"):
                workload.compute_loss().backward()
            drop_gradients(workload)
        fails = False
        handle.remove()
        run_step(workload)
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + MIB
        assert planned.swap is not None
    numerics = check_numerics(
        workload,
        planned,
        None if executor == "module" else Applied(planned.plan.unplanned(), workload.model),
    )
    assert numerics.bitwise_vs_unplanned, numerics


def test_recompute_by_plan_and_the_valve_on_top() -> None:
    workload = conv_net()
    profile = memfit.profile(workload, executor="module")
    plan = make_plan(profile, Goal(strategy="all"))
    applied = Applied(plan, workload.model)

    def peak() -> int:
        run_step(workload)
        return measure_peak(workload, lambda: run_step(workload)).bytes

    with untouched(workload):
        plain = peak()
        with applied:
            planned = peak()
        with memfit.pressure(0) as valve, applied:
            both = peak()
            assert applied.router is not None
            engine = applied.router.engine
            assert getattr(engine, "replays", 0) > 0
    assert valve.statistics.swaps == valve.statistics.retrievals > 0
    assert both < planned < plain
