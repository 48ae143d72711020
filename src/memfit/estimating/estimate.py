"""What a step would need on a GPU, from its trace on fake tensors."""

from __future__ import annotations

import logging
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from memfit.capture.discover import discover
from memfit.capture.segments import Segment, choose_segments
from memfit.errors import MemfitError, UsageError
from memfit.estimating.cuda_operators import cuda_operators, step_as_on_cuda
from memfit.estimating.eager import eager_note
from memfit.estimating.fakes import (
    What,
    check_what,
    fake_workload,
    refused_without_data,
    unnoticed_by_transformers,
    without_memory,
)
from memfit.estimating.history import History
from memfit.estimating.needs import needs_of, runs_by_length
from memfit.estimating.trace import trace_step
from memfit.estimating.work import Work
from memfit.ir.cards import CARDS, CUBLAS_BYTES, CUBLAS_THREADS, Card, find_card
from memfit.ir.estimate import CardEstimate, Estimate, Needs, SegmentEstimate, first_way
from memfit.measure.step import explained_errors, run_step
from memfit.runtime.signature import describe
from memfit.runtime.tiled_loss.in_model import TiledLoss
from memfit.targets import is_file_target
from memfit.units import format_bytes, parse_bytes
from memfit.workload import Workload, refuse_compiled, unwrap

log = logging.getLogger(__name__)
CUDA_GRAIN = 512
_LEAST_BYTES = 10**6  # a number from here on is no card's
_WORKSPACES = CUBLAS_THREADS * CUBLAS_BYTES


def estimate(
    what: What,
    device: str | int | None = None,
    *,
    as_on_cuda: bool = True,
    of_target: bool | None = None,
    **target_options: Any,
) -> Estimate:
    """Estimate a step on a card ("rtx4090"), in so many bytes ("24GiB"), or on every card.

    `what` is a workload, a target with its options (batch, seq, dtype, optimizer, overrides), or a
    function that builds a workload. Nothing is allocated and no GPU is needed. `as_on_cuda=False`
    takes the operators as they are on the workload's own device. `of_target` says whether the
    optimizer is a target's own, whose Adam is fused on CUDA; None: where `what` names one that is
    not in a file. The step is the eager one: what compiled code takes is not estimated.
    """
    cards = _asked(device)
    check_what(what, target_options)
    if of_target is None:
        of_target = isinstance(what, str) and not is_file_target(what)
    with without_memory(what) as fakes, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workload = fake_workload(what, fakes, target_options)
        # A copy is not compiled any more.
        refuse_compiled(what.model if isinstance(what, Workload) else workload.model)
        on_cuda = as_on_cuda or workload.device.type == "cuda"
        with (
            cuda_operators() if as_on_cuda else nullcontext(),
            unnoticed_by_transformers(),
            explained_errors(workload),
            refused_without_data(workload),
        ):
            if as_on_cuda:
                step_as_on_cuda(workload.optimizer, of_target=of_target)
            run_step(workload)  # makes the optimizer's state
            segments = choose_segments(discover(workload))
            calls = [(s.visit.module, s.visit.number) for s in segments]
            grain = CUDA_GRAIN if on_cuda else 1
            history, work = trace_step(workload, calls, grain)
            tiled = _traced_in_tiles(workload, calls, grain)
        made = _estimate(workload, history, tiled, work, segments, cards, on_cuda=on_cuda)
        return replace(made, notes=made.notes + fakes.values.notes())


def _traced_in_tiles(
    workload: Workload, calls: list[tuple[str, int]], grain: int
) -> History | None:
    """The step with its loss in tiles; None where the model's cannot be made so."""
    try:
        with TiledLoss(workload.model), explained_errors(workload):
            return trace_step(workload, calls, grain)[0]
    except MemfitError as refusal:
        log.info("the loss was not traced in tiles: %s", refusal.message)
        return None


def _asked(device: str | int | None) -> list[Card | int]:
    """The cards, or the bytes, that the step is to be held against."""
    if device is None:
        return list(CARDS)
    if isinstance(device, str) and not _is_size(device):
        return [find_card(device)]
    size = parse_bytes(device)
    if size <= 0:
        raise UsageError(
            f"a budget of {size} bytes is not a budget", hint='for example "24GiB" or "rtx4090"'
        )
    return [size]


def _is_size(text: str) -> bool:
    """Whether a text names bytes; a short number alone, such as "4090", is a card."""
    bare = text.strip()
    named = bare.upper().endswith("B") or (bare.isdecimal() and int(bare) >= _LEAST_BYTES)
    return named and _can_be_parsed(text)


def _can_be_parsed(text: str) -> bool:
    try:
        parse_bytes(text)
    except UsageError:
        return False
    return True


def _estimate(
    workload: Workload,
    history: History,
    tiled: History | None,
    work: Work,
    segments: tuple[Segment, ...],
    cards: list[Card | int],
    *,
    on_cuda: bool,
) -> Estimate:
    peak = int(history.total.argmax())
    categories = {name: int(curve[peak]) for name, curve in history.categories.items()}
    rows = _segment_rows(workload, history, segments)
    largest = max((row.parameter_bytes for row in rows), default=0)
    lengths = runs_by_length([bool(segment.linked) for segment in segments])
    needs = needs_of(history, tiled, lengths, largest)
    sizes = {name: int(curve.max()) for name, curve in history.categories.items()}
    state = sum(sizes[name] for name in ("parameters", "gradients", "optimizer_state"))
    workspace = 0
    if on_cuda:
        only = cards[0] if len(cards) == 1 else None
        workspace = only.workspace_bytes if isinstance(only, Card) else _WORKSPACES
        categories["other"] = workspace
    moment = history.moments[peak]
    where = moment.phase
    if moment.segment >= 0:
        where += f" of {rows[moment.segment].name}"
    parameters = list(unwrap(workload.model).parameters())
    made = Estimate(
        workload=describe(workload),
        peak_bytes=sum(categories.values()),
        categories=categories,
        where=where,
        static_bytes=state + sizes["buffers"] + sizes["batch"],
        state_bytes_per_parameter=state / sum(p.numel() for p in parameters),
        needs=_add(needs, workspace),
        segments=rows,
        flops=work.flops,
        moved_bytes=work.moved_bytes,
        cards=tuple(_on(card, needs, work) for card in cards),
        notes=_notes(workspace, moment.phase),
        trained_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
    )
    return replace(made, notes=(*made.notes, *_hopeless_note(made)))


def _segment_rows(
    workload: Workload, history: History, segments: tuple[Segment, ...]
) -> tuple[SegmentEstimate, ...]:
    modules = dict(unwrap(workload.model).named_modules())
    return tuple(
        SegmentEstimate(
            name=s.visit.module + (f"#{s.visit.number + 1}" if s.visits > 1 else ""),
            saved_bytes=history.saved_bytes(index),
            parameter_bytes=sum(
                p.numel() * p.element_size() for p in modules[s.visit.module].parameters()
            ),
        )
        for index, s in enumerate(segments)
    )


def _on(card: Card | int, needs: Needs, work: Work) -> CardEstimate:
    if isinstance(card, int):
        there = _add(needs, _WORKSPACES)
        return CardEstimate(format_bytes(card), card, there, first_way(there, card))
    there = _add(needs, card.workspace_bytes)
    way = first_way(there, card.usable_bytes)
    return CardEstimate(card.name, card.usable_bytes, there, way, work.guessed_seconds(card))


def _add(needs: Needs, size: int) -> Needs:
    return Needs(*(need + size for need in needs.in_order()))


def _hopeless_note(made: Estimate) -> list[str]:
    if not made.hopeless:
        return []
    largest = max(card.usable_bytes for card in made.cards)
    return [
        f"nothing memfit has now makes it fit: the parameters alone take "
        f"{format_bytes(made.trained_bytes)}, more than the {format_bytes(largest)} there are"
    ]


def _notes(workspace: int, phase: str) -> tuple[str, ...]:
    notes = []
    if workspace:
        notes.append(eager_note())
        notes.append(
            f"other is {format_bytes(workspace)} that cuBLAS keeps on two threads; what a kernel "
            "takes and gives back inside, such as a convolution's workspace, is not seen"
        )
    if phase == "optimizer":
        notes.append(
            "the peak is in the optimizer's step, which copies what it works on: an optimizer made "
            "with fused=True does not, and stepping in backward copies one segment's at a time"
        )
    return tuple(notes)
