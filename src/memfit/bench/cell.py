"""One cell, in a process of its own: forked, or python -m memfit.bench.cell SPEC.json RESULT.json.

The eager step is measured first, then the system's, then both are timed in turn, the eager one
twice. A system that changes the model for good has a model to itself: only it is there while its
peak is measured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from memfit.bench.machine import code_digest
from memfit.bench.systems.catalogue import FAMILIES, missing_package, prepare, split_name
from memfit.bench.systems.largest_batch import find_largest
from memfit.bench.systems.prepared import (
    Prepared,
    Progress,
    Setting,
    Step,
    Unavailable,
    around,
    total_static,
)
from memfit.bench.systems.shared_profiles import SharedProfiles
from memfit.bench.workloads import missing_zoo
from memfit.errors import DeviceMemoryError, InfeasibleError, MemfitError
from memfit.ir.bench import (
    FAILED,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    UNAVAILABLE,
    ByRounds,
    Cell,
    Compiled,
    Reference,
    WorkloadSpec,
)
from memfit.ir.codec import from_data, to_data
from memfit.measure.cuda_allocator import prefer_expandable_segments, settle_optimizer_state
from memfit.measure.memory import Peak, memory_cap, peak_on
from memfit.measure.ran_out import Stages
from memfit.measure.step import drop_gradients, is_out_of_memory, run_first_steps, run_step
from memfit.measure.timing import Inside, Timing, ratio_by_rounds, time_interleaved
from memfit.planning.make_plan import Goal, make_plan
from memfit.planning.simulate import simulator_of
from memfit.runtime.apply import Applied
from memfit.targets import resolve_target
from memfit.units import format_bytes
from memfit.workload import Workload

WARMUP = 3
# Short steps are timed more often than was asked for: the host's noise is as long as they are.
MORE_ROUNDS, ENOUGH_S = 5, 8.0
COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"
PR_SET_PDEATHSIG = 1
EAGER, UNPLANNED = "eager", "unplanned"
NO_REFERENCE = "neither the eager nor the unplanned step fits, so there is no ratio"
NO_ROOM = "the eager step does not fit"


@dataclass(frozen=True)
class CellSpec:
    """What to run: `cap_bytes` is the most that the CUDA allocator may hold.

    `profiles` is a folder of this run, where cells of one workload leave profiles to each other.
    With `compile_only` the system runs two steps, and nothing is measured.
    """

    workload: WorkloadSpec
    system: str
    steps: int
    cap_bytes: int | None = None
    profiles: str | None = None
    compile_only: bool = False


@dataclass(frozen=True)
class _Beside:
    """The step to compare with: how it runs, what it takes."""

    kind: str
    step: Step
    peak: Peak


@dataclass
class _Run:
    """One cell under way."""

    spec: CellSpec
    device: torch.device
    say: Progress
    notes: list[str] = field(default_factory=list)

    def setting(self, workload: Workload) -> Setting:
        """What a system is given."""
        spec = self.spec
        shared = SharedProfiles(spec.profiles, spec.workload, spec.system)
        return Setting(workload, spec.steps, self.say, shared)


def main(words: list[str], *, forked: bool = False) -> None:
    """Run the cell of the first file and write what became of it to the second."""
    _end_with_parent()
    logging.basicConfig(format="%(relativeCreated)d ms: %(message)s")  # to the log of this cell
    logging.getLogger("memfit").setLevel(logging.INFO)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    spec = from_data(CellSpec, json.loads(Path(words[0]).read_text(encoding="utf-8")))
    before = _graphs_on_disk()
    cell = replace(run_cell(spec), forked=forked, compiled=_compiled(before))
    Path(words[1]).write_text(json.dumps(to_data(cell)), encoding="utf-8")


def run_cell(spec: CellSpec) -> Cell:
    """Run it; whatever Python can tell of its end is in the cell."""
    stages = Stages(partial(print, file=sys.stderr, flush=True))
    stages("building the workload")
    cell = _tried(spec, stages)
    seconds: dict[str, float] = {}
    for stage in stages.so_far():
        seconds[stage.doing] = seconds.get(stage.doing, 0.0) + stage.seconds
    return replace(cell, stages=seconds, code=code_digest())


def had_no_eager(spec: CellSpec, cell: Cell) -> bool:
    """Whether there was no room for the step to compare with, on a device without a cap."""
    return spec.cap_bytes is None and any(note.startswith(NO_ROOM) for note in cell.notes)


def _tried(spec: CellSpec, say: Progress) -> Cell:
    empty = Cell(spec.workload.name, spec.system, OK)
    family, _ = split_name(spec.system)
    package = missing_package(family) or missing_zoo(spec.workload.target)
    if package is not None:
        return replace(empty, status=UNAVAILABLE, reason=f"{package} is not installed")
    try:
        return _measure_cell(spec, empty, say)
    except Unavailable as error:
        return replace(empty, status=UNAVAILABLE, reason=str(error))
    except InfeasibleError as error:
        return replace(empty, status=REFUSED, reason=_refusal(error))
    except (MemoryError, DeviceMemoryError) as error:
        return replace(empty, status=OUT_OF_MEMORY, reason=_first_line(error))
    except Exception as error:  # the other cells are worth having all the same
        if is_out_of_memory(error):
            return replace(empty, status=OUT_OF_MEMORY, reason=_first_line(error))
        if not isinstance(error, MemfitError):
            traceback.print_exc()
        return replace(empty, status=FAILED, reason=_first_line(error))


def build(spec: WorkloadSpec) -> Workload:
    """The workload of a spec."""
    pairs = (text.partition("=") for text in spec.fields)
    return resolve_target(
        spec.target,
        batch=spec.batch,
        seq=spec.seq,
        dtype=spec.dtype,
        optimizer=spec.optimizer,
        device=spec.device,
        overrides={name.strip(): value for name, _, value in pairs},
    )


def _measure_cell(spec: CellSpec, empty: Cell, say: Progress) -> Cell:
    family, argument = split_name(spec.system)
    workload = build(spec.workload)
    run = _Run(spec, workload.device, say)
    # The same allocator for every system; memfit's own verbs would choose it anyway.
    prefer_expandable_segments(workload.device)
    cell = replace(empty, device=workload.device.type)
    with memory_cap(workload.device, spec.cap_bytes):
        if family == "largest-batch":
            return replace(cell, largest=find_largest(run.setting(workload), argument))
        if spec.compile_only:
            prepared = prepare(spec.system, run.setting(workload))
            for _ in range(2):
                prepared.step()
            return cell
        if not FAMILIES[family].own_model:
            return _on_one_model(run, cell, workload)
        eager = _eager(run, workload)
        peak = None if eager is None else eager.peak
        del eager, workload  # its own model is to be alone on the device
        return _on_its_own_model(run, cell, peak)


def _on_one_model(run: _Run, cell: Cell, workload: Workload) -> Cell:
    """Systems that can be put on the model and taken off it."""
    run.say("preparing")
    prepared = prepare(run.spec.system, run.setting(workload))
    eager = _eager(run, workload)
    if eager is None and run.spec.system == EAGER:
        raise DeviceMemoryError(f"the step does not fit{_cap_text(run.spec)}")
    run.say("measuring")
    peak, first_s = _measure(run, prepared, workload.optimizer if eager is None else None)
    cell = _with_times(run, cell, prepared, peak, eager or _unplanned(run, workload))
    cell = _finished(run, cell, prepared, first_s)
    return replace(cell, breakdown=_breakdown(run, workload)) if cell.system == EAGER else cell


def _on_its_own_model(run: _Run, cell: Cell, eager_peak: Peak | None) -> Cell:
    """Systems that change the model for good: the plain one is built again, to be timed beside."""
    _free(run.device)
    run.say("preparing")
    prepared = prepare(run.spec.system, run.setting(build(run.spec.workload)))
    _free(run.device)
    run.say("measuring")
    peak, first_s = _measure(run, prepared, None)
    beside = None
    if eager_peak is not None:
        plain = build(run.spec.workload)
        step = partial(run_step, plain)
        if _fits(run, partial(run_first_steps, plain, 1)):
            settle_optimizer_state(plain.optimizer, run.device)
            beside = _Beside(EAGER, step, eager_peak)
        else:
            run.notes.append(f"{NO_ROOM} beside it, so there is no ratio")
        del plain, step
        _free(run.device)
    cell = _with_times(run, cell, prepared, peak, beside)
    return _finished(run, cell, prepared, first_s)


def _eager(run: _Run, workload: Workload) -> _Beside | None:
    """The plain step, warmed up and measured; None where it goes out of memory."""
    run.say("measuring the eager step")
    plain = partial(run_step, workload)
    peaks: list[Peak] = []

    def warm_up_and_measure() -> None:
        run_first_steps(workload, 1)
        settle_optimizer_state(workload.optimizer, run.device)
        peaks.append(_steady_peak(run, plain, partial(total_static, workload)))

    if _fits(run, warm_up_and_measure):
        return _Beside(EAGER, plain, peaks[0])
    drop_gradients(workload)
    _free(run.device)
    run.notes.append(f"{NO_ROOM}{_cap_text(run.spec)}")
    return None


def _unplanned(run: _Run, workload: Workload) -> _Beside | None:
    """The step by memfit's executor with everything kept, which may fit where eager does not."""
    run.say("measuring the unplanned step")
    profile = run.setting(workload).profile().profile
    plan = make_plan(profile, Goal(strategy="none")).unplanned()
    applied = Applied(plan, workload.model)
    prepared = around(workload, lambda: applied)
    if not _fits(run, prepared.step):
        drop_gradients(workload)
        _free(run.device)
        run.notes.append(NO_REFERENCE)
        return None
    return _Beside(UNPLANNED, prepared.step, _steady_peak(run, prepared.step, prepared.static))


def _measure(
    run: _Run, prepared: Prepared, settle: torch.optim.Optimizer | None
) -> tuple[Peak, float]:
    """Peak of two steps after three to warm up, and the seconds of the first two."""
    begun = time.perf_counter()
    for number in range(WARMUP - 1):
        prepared.step()
        if number == 0 and settle is not None:
            settle_optimizer_state(settle, run.device)
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    first_s = time.perf_counter() - begun
    return prepared.seen(_two_steps(run, prepared.step, prepared.static)), first_s


def _steady_peak(run: _Run, step: Step, static: Callable[[], int]) -> Peak:
    for _ in range(WARMUP - 2):
        step()
    return _two_steps(run, step, static)


def _two_steps(run: _Run, step: Step, static: Callable[[], int]) -> Peak:
    """The peak of two steps; to enter what stands around them is not part of it."""
    inside = step if isinstance(step, Inside) else Inside(nullcontext, step)
    with inside.around():
        inside.work()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        return peak_on(run.device, static, lambda: (inside.work(), inside.work()))


def _fits(run: _Run, step: Step) -> bool:
    """Whether it runs; only memory may stop it."""
    try:
        step()
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or is_out_of_memory(error):
            return False
        raise
    return True


def _with_times(
    run: _Run, cell: Cell, prepared: Prepared, peak: Peak, beside: _Beside | None
) -> Cell:
    """The cell with its peak and the seconds of both steps, timed in turn."""
    run.say("timing")
    works: dict[str, Step] = {"system": prepared.step}
    turns = [works]
    if beside is not None:
        works = {"beside": beside.step, "system": prepared.step, "again": beside.step}
        turns = [works]
        if prepared.apart:
            turns = [{"beside": beside.step, "again": beside.step}, {"system": prepared.step}]
    times: dict[str, Timing] = {}
    for turn in turns:
        times |= time_interleaved(
            turn,
            run.device,
            rounds=run.spec.steps,
            warmup=WARMUP,
            limit_s=float("inf"),
            most_rounds=MORE_ROUNDS * run.spec.steps,
            enough_s=ENOUGH_S,
        )
    timing = times["system"]
    together = beside is not None and not prepared.apart
    return replace(
        cell,
        peak_bytes=peak.bytes,
        reserved_bytes=peak.reserved_bytes,
        retries=peak.retries,
        step_s=timing.median_s,
        spread_s=timing.spread_s,
        samples=len(timing.samples),
        by_rounds=_by_rounds(timing, times["beside"]) if together else None,
        reference=None if beside is None else _reference(beside, times),
    )


def _reference(beside: _Beside, times: dict[str, Timing]) -> Reference:
    return Reference(
        kind=beside.kind,
        peak_bytes=beside.peak.bytes,
        reserved_bytes=beside.peak.reserved_bytes,
        retries=beside.peak.retries,
        step_s=times["beside"].median_s,
        spread_s=times["beside"].spread_s,
        again_s=times["again"].median_s,
        again_by_rounds=_by_rounds(times["again"], times["beside"]),
    )


def _by_rounds(one: Timing, other: Timing) -> ByRounds:
    return ByRounds(*ratio_by_rounds(one.samples, other.samples))


def _finished(run: _Run, cell: Cell, prepared: Prepared, first_s: float) -> Cell:
    return replace(cell, first_steps_s=first_s, notes=tuple(run.notes), **prepared.facts)


def _breakdown(run: _Run, workload: Workload) -> dict[str, int]:
    """The plain step's peak by category, from a recording of every allocation."""
    profile = run.setting(workload).profile("module").profile
    return dict(simulator_of(profile).timeline([]).peak_categories)


def _graphs_on_disk() -> int | None:
    """How many graphs torch's cache of compiled code holds; None if it is not known where it is."""
    folder = os.environ.get(COMPILED_CODE)
    return None if folder is None else sum(1 for _ in Path(folder, "fxgraph").glob("*/*"))


def _compiled(before: int | None) -> Compiled | None:
    """The graphs that torch's compiler was given in this process; None: there were none.

    What was put on disk since does not count as cached: processes of this cell may have compiled
    it for this one, which found it there.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    counted = {} if utils is None else utils.counters["inductor"]
    found, made = (counted.get(f"fxgraph_cache_{name}", 0) for name in ("hit", "miss"))
    graphs, now = found + made, _graphs_on_disk()
    if not graphs:
        return None
    if before is not None and now is not None:
        made = max(made, now - before)
    return Compiled(graphs, max(graphs - made, 0), cold=before == 0)


def _end_with_parent() -> None:
    """Let the system end this process when the benchmark is killed: nobody else would."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _cap_text(spec: CellSpec) -> str:
    return "" if spec.cap_bytes is None else f" into {format_bytes(spec.cap_bytes)}"


def _refusal(error: InfeasibleError) -> str:
    least = error.minimum_bytes
    return _first_line(error) if least is None else f"the minimum is {format_bytes(least)}"


def _first_line(error: BaseException) -> str:
    line = (str(error).splitlines() or [""])[0][:300]
    return line if isinstance(error, MemfitError) else f"{type(error).__name__}: {line}"


if __name__ == "__main__":
    main(sys.argv[1:])
