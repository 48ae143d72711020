"""Choose the code that runs a planned segment for each shape of its inputs.

The first shapes get code of their own. After these, one code with symbolic sizes serves all: its
graph runs the planned operators, so that it keeps what the plan says. Where a shape makes torch run
other operators (a size of 1 needs no copies), everything is recomputed that can be; past the bound
on compilations the segment runs as its module does. Both are said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from memfit.runtime.compile.choice import CannotCapture, Choice, OtherShape, no_graph
from memfit.runtime.recompute import Recompute

if TYPE_CHECKING:
    from memfit.runtime.compile.backend import Program
    from memfit.runtime.compile.compiled import CompiledSegments

log = logging.getLogger(__name__)

# Shapes of a planned segment that get code of their own: the planned one and, say, a last batch.
STATIC_SHAPES = 2
# Compilations with symbolic sizes. One serves all shapes, unless an operator treats some of them
# in another way (a size of 1, or one that is not aligned).
SYMBOLIC_COMPILATIONS = 6

Sizes = tuple[Any, ...]
Forward = Callable[..., Any]


class Shapes:
    """The code of one planned segment, by the sizes of its inputs.

    Shared by all modules that run by the same graph and the same choice, so that the bounds count
    for all of them together. What was chosen for a shape stays: a replay must run the same code.
    """

    def __init__(
        self,
        segments: CompiledSegments,
        function: Forward,
        kind: str,
        choice: Choice,
        mutated_buffers: Sequence[str] = (),
    ) -> None:
        self._notes: dict[str, str] = {}  # by what they are about
        self.function, self.kind, self.choice = function, kind, choice
        self._segments, self._mutated_buffers = segments, mutated_buffers
        self._programs: dict[Sizes, Program | None] = {}  # None: as the module does
        self._static = 0
        self._symbolic_compilations = 0
        self._other_ones: set[tuple[bool, ...]] = set()  # where sizes of 1 give another graph
        self._accepted: set[str | None] = {None}

    def __call__(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward of one of the modules."""
        sizes = sizes_of(args, kwargs)
        try:
            program = self._programs[sizes]
        except KeyError:
            return self._first(sizes, module, args, kwargs)
        if program is None:
            return self._as_module(module, args, kwargs)
        before = self._segments.compilations
        try:
            result = program(module, args, kwargs)
        except CannotCapture as reason:  # its code changes from call to call
            self._say("changing", f"{reason}: it runs {self._module_words} from now on")
            self._programs[sizes] = None
            return self._as_module(module, args, kwargs)
        if program.choice.symbolic:
            self._symbolic_compilations += self._segments.compilations - before
        self._check()
        return result

    def _first(
        self,
        sizes: Sizes,
        module: torch.nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call with sizes that were not met before."""
        ones = tuple(size == 1 for shape in sizes for size in _dimensions(shape))
        for choice in self._choices(ones):
            program = self._segments.program(self.function, choice, self.kind)
            before = self._segments.compilations
            try:
                result = program.compiling(module, args, kwargs)
                self._check()
            except OtherShape:
                self._other_ones.add(ones)
                continue
            except CannotCapture as reason:
                if not self._programs:
                    raise no_graph(reason) from reason
                self._say("symbols", f"inputs of many sizes such as {_text(sizes)}: {reason}")
                continue
            finally:
                if choice.symbolic:
                    self._symbolic_compilations += self._segments.compilations - before
            if choice.least:
                self._say(
                    "operators",
                    f"{self.kind} runs other operators than planned for inputs such as "
                    f"{_text(sizes)}: it recomputes all it can there",
                )
            self._static += not choice.symbolic
            self._programs[sizes] = program
            return result
        self._say(
            "bound",
            f"{self.kind} was compiled often enough, inputs such as {_text(sizes)} run "
            f"{self._module_words}",
        )
        self._programs[sizes] = None
        return self._as_module(module, args, kwargs)

    def _choices(self, ones: tuple[bool, ...]) -> Iterator[Choice]:
        """What to try for new sizes, best first."""
        planned, symbolic = self.choice, replace(self.choice, symbolic=True)
        if ones not in self._other_ones and self._static < STATIC_SHAPES:
            yield planned
        if ones not in self._other_ones and self._may_compile:
            yield symbolic
        if planned.saved is not None and self._may_compile:
            yield Choice(planned.plain, symbolic=True, least=True)

    @property
    def _may_compile(self) -> bool:
        return self._symbolic_compilations < SYMBOLIC_COMPILATIONS

    def _check(self) -> None:
        """OtherGraph when an unplanned segment ran another graph than the plan says."""
        key = self._segments.last_key
        if self.choice.saved is None and key not in self._accepted:
            try:
                self._segments.check_key(self.choice, key, self.kind)
            except OtherShape:
                log.debug("%s runs other operators, all kept, for this shape", self.kind)
            self._accepted.add(key)

    @property
    def _module_words(self) -> str:
        return "eagerly" if self.choice.saved is None else "eagerly, recomputed as a whole"

    def _as_module(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        self._segments.last_key = None
        forward = self.function.__get__(module)
        if self.choice.saved is None:
            return forward(*args, **kwargs)
        engine = Recompute([(0, 0)], {0: module}, {0: self._mutated_buffers})
        return engine(0, forward, args, kwargs)

    @property
    def has_code(self) -> bool:
        """Whether some shape was met already."""
        return bool(self._programs)

    @property
    def notes(self) -> list[str]:
        """What was done otherwise than planned, a line for each thing."""
        return list(self._notes.values())

    def _say(self, topic: str, note: str) -> None:
        """Warn of something once; alike segments say it together."""
        if topic in self._notes:
            return
        self._notes[topic] = note
        if note not in self._segments.said:
            self._segments.said.add(note)
            log.warning(note)


def sizes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sizes:
    """The shapes and whole numbers among a call's arguments."""
    found: list[Any] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return tuple(found)


def _collect(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value.shape)
        elif isinstance(value, int):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
        elif isinstance(value, Mapping):
            _collect(value.values(), found)
        elif is_dataclass(value):
            _collect((getattr(value, field.name) for field in fields(value)), found)


def _dimensions(shape: Any) -> Sequence[int]:
    return shape if isinstance(shape, torch.Size) else ()


def _text(sizes: Sizes) -> str:
    return " ".join(str(list(s)) for s in dict.fromkeys(sizes) if isinstance(s, torch.Size))
