"""Compile one segment through dynamo and AOTAutograd, and run it.

torch's compiler backends and their settings are used here; the rest of torch's compiler that is not
public is in the other modules of this folder, so that a new release means this folder to mend.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo import exc as dynamo_errors
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx.experimental import _config as symbol_config
from torch.fx.graph import _BoxedCodeGen

from memfit.errors import MemfitError
from memfit.ir.joint_graph import JointGraph
from memfit.measure.nodes import measure_nodes
from memfit.measure.step import is_out_of_memory
from memfit.runtime.compile import partition
from memfit.runtime.compile.ahead import Workers, looked_for
from memfit.runtime.compile.apart import make_apart
from memfit.runtime.compile.choice import CannotCapture, Choice
from memfit.runtime.compile.compiled import CompiledSegments
from memfit.runtime.compile.dynamo_words import (
    cannot_capture,
    cannot_compile,
    innermost,
    leave_out_our_limits,
)
from memfit.runtime.compile.joint import NotAGraph, Traced, least_saved, read_by_backward, translate
from memfit.runtime.compile.padding import decided_once
from memfit.runtime.compile.read_back import wait_before_reading_back
from memfit.runtime.compile.source_lines import lines_of_torch
from memfit.runtime.random_state import RandomState

log = logging.getLogger(__name__)
_UNLIMITED = 1_000_000
# A module whose code reads a number that changes (a step count) is compiled at every call.
_COMPILATIONS_PER_MODULE = 8
# Past its limits dynamo runs a segment eagerly without a word; here only errors stop it.
_DYNAMO_SETTINGS = {
    "recompile_limit": _UNLIMITED,
    "accumulated_recompile_limit": _UNLIMITED,
    "suppress_errors": False,
    "skip_nnmodule_hook_guards": False,  # modules of one class may differ in their hooks
}
# What torch.compile(dynamic=...) sets too, but at every call.
_STATIC_SETTINGS = _DYNAMO_SETTINGS | {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
}
_SYMBOLIC_SETTINGS = _DYNAMO_SETTINGS | {
    "assume_static_by_default": False,
    "specialize_float": True,  # only sizes become symbols: a float that does makes another graph
}
_AOT_SETTINGS = {
    "force_non_lazy_backward_lowering": True,  # so that errors come at the forward
    "enable_autograd_cache": False,  # a pair from the cache comes without its joint graph
    "graphsafe_rng_functionalization": False,  # draws other numbers than unplanned code would
}
_GRAPH_SETTINGS = _AOT_SETTINGS | {
    "donated_buffer": False,  # nothing is overwritten, so a graph may be retained
}
# Inductor writes what is used twice and reads more tensors than so many, 4 as a rule. To make a
# normalised value again takes a mean, a deviation, a weight and a bias beside it, all small.
_APART_SETTINGS = {"realize_reads_threshold": 12}
_LIMIT_ERROR: type[Exception] = getattr(dynamo_errors, "FailOnRecompileLimitHit", NotAGraph)

Boxed = Callable[[list[Any]], Any]


class _Unsettled(Exception):
    """Something is to be compiled after all, and torch's settings are not made for it."""


class Program:
    """One function of ours for dynamo to compile: a segment's forward under one choice."""

    _numbers = itertools.count()

    def __init__(
        self,
        segments: CompiledSegments,
        function: Callable[..., Any],
        kind: str,
        choice: Choice,
    ) -> None:
        self.segments, self.kind, self.choice = segments, kind, choice
        self._function = _own_function(function, f"segment_{next(self._numbers)}")
        self._backend = self._compile  # one object: dynamo knows backends by identity
        self._module = 0  # identity of the module that runs
        self._ran: set[int] = set()  # identities of modules that ran
        self._settled = False  # whether torch's settings are those to compile with
        self._compiled: Counter[tuple[int, str | None]] = Counter()
        self._run = torch.compile(self._function, backend=self._backend, fullgraph=True)
        leave_out_our_limits()

    def __call__(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a module's forward; CannotCapture when it cannot be compiled."""
        if id(module) not in self._ran:
            return self.compiling(module, args, kwargs)
        runs = self.segments.runs
        try:  # changing torch's settings takes longer than all else here
            result = self._run(module, args, kwargs)
        except (dynamo_errors.TorchDynamoException, _LIMIT_ERROR):
            return self.compiling(module, args, kwargs)
        return result if self.segments.runs > runs else self._found_nothing()

    def compiling(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The same where it is likely that something must be compiled."""
        self._module, runs = id(module), self.segments.runs
        with self._settings():
            try:
                result = self._run(module, args, kwargs)
            except (dynamo_errors.TorchDynamoException, _LIMIT_ERROR) as error:
                inner = innermost(error)
                if isinstance(inner, MemfitError | torch.OutOfMemoryError):
                    raise inner from None  # raised by us, or not by compiling: wrapped for nothing
                raise cannot_capture(self.kind, error, inner) from error
        self._ran.add(id(module))
        return result if self.segments.runs > runs else self._found_nothing()

    @contextmanager
    def _settings(self) -> Iterator[None]:
        symbolic = self.choice.symbolic
        settings = _SYMBOLIC_SETTINGS if symbolic else _STATIC_SETTINGS
        # Sizes that are alike now need not be so in the next batch.
        duck_shape = symbol_config.use_duck_shape and not symbolic
        with (
            lines_of_torch(),
            dynamo_config.patch(settings),
            symbol_config.patch(use_duck_shape=duck_shape),  # type: ignore[attr-defined]
        ):
            self._settled = True
            try:
                yield
            finally:
                self._settled = False

    def _found_nothing(self) -> NoReturn:
        self.segments.last_key = None
        raise CannotCapture(f"{self.kind}: torch.compile found nothing to compile")

    def close(self) -> None:
        """Make dynamo forget the function and the backend."""
        eval_frame.reset_code(self._function.__code__)
        eval_frame.cached_backends.pop(id(self._backend), None)

    def _compile(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not self._settled:
            raise _Unsettled
        compilation, begun = _Compilation(self), time.perf_counter()
        fused = self.segments.executor == "inductor"
        settings = _AOT_SETTINGS if fused else _GRAPH_SETTINGS
        with functorch_config.patch(_known(settings, functorch_config)):
            compiled = (_with_inductor if fused else _as_traced)(module, inputs, compilation)
        compilation.log_seconds(time.perf_counter() - begun)
        self.segments.compilations += 1
        self._refuse_endless(compilation.key)
        return compiled

    def _refuse_endless(self, key: str | None) -> None:
        self._compiled[self._module, key] += 1
        if self._compiled[self._module, key] > _COMPILATIONS_PER_MODULE:
            raise CannotCapture(
                f"{self.kind}: one module was compiled {_COMPILATIONS_PER_MODULE} times for the "
                "same graph: its code reads a value that changes from call to call"
            )


class _Compilation:
    """One graph being compiled: cuts it in two, then wraps its forward."""

    def __init__(self, program: Program) -> None:
        self.segments, self.kind, self.choice = program.segments, program.kind, program.choice
        self.key: str | None = None  # known once the graph is cut; none without gradients
        self.pair: partition.Pair | None = None
        self.code_s = 0.0  # for which inductor compiled, or looked for code that is on disk
        self.made_apart = 0  # operators of the backward that fused code has for itself
        self._planned_names: dict[str, str] = {}  # of chosen nodes that have other names here

    def cut(
        self,
        module: fx.GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The partition function that AOTAutograd calls."""
        fused = self.segments.executor == "inductor"
        traced = partition.prepare(
            module,
            num_fwd_outputs,
            static_lifetime_input_indices,
            tags_tell_backward=not fused,
        )
        graph = translate(traced, self.kind)
        saved = self._saved(traced, graph)
        if saved is None:
            self.pair = partition.default_min_cut(traced, graph, inputs)
        else:
            self.pair = partition.split(traced, graph, saved)
        if fused and saved is not None and not self.choice.symbolic:  # else sizes are not known
            self.made_apart = make_apart(self.pair.backward, self.pair.again)
        self.key = graph.key
        if not self.choice.symbolic:
            self._take_note(graph, self.pair)
        return self.pair.forward, self.pair.backward

    def _saved(self, traced: Traced, graph: JointGraph) -> tuple[str, ...] | None:
        """What to hand over; None leaves it to torch."""
        choice = self.choice
        if choice.least:
            return least_saved(graph)
        if choice.saved is None:
            fused = self.segments.executor == "inductor"
            return None if fused else read_by_backward(graph, traced.recompute_asked)
        if choice.symbolic:
            names = self.segments.symbolic_names(choice, graph, self.kind)
            self._planned_names = dict(zip(names, choice.saved, strict=True))
            return names
        self.segments.check(choice, graph, self.kind)
        return choice.saved

    def _take_note(self, graph: JointGraph, pair: partition.Pair) -> None:
        if self.choice.saved is None:
            kept = (graph.index[name] for name in pair.saved)
            graph = replace(graph, unplanned=tuple(sorted(kept)))
        self.segments.found(graph)

    def forward(self, names: Sequence[str], compiled: Boxed) -> Boxed:
        """The compiled forward, which tells the segments that it runs; `names` of its inputs."""
        segments, key = self.segments, self.key
        planned = self._planned_names
        names = [planned.get(name, name) for name in names]
        results = () if self.pair is None else self.pair.results
        results = tuple(planned.get(name, name) for name in results)
        unplanned = self.choice.saved is None and not self.choice.symbolic
        measure = self._measure if self.choice.plain and unplanned else None

        def run(args: list[Any]) -> Any:
            segments.begins(key)
            if key is not None and measure is not None and segments.wants_costs(key):
                measure(args)
            watch = segments.watch
            if watch is None:
                return compiled(args)
            _show(watch, names, args)
            returned = compiled(args)
            _show(watch, results, returned)
            return returned

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backward(self, compiled: Boxed) -> Boxed:
        """The compiled backward, which tells the segments when it returns."""
        segments = self.segments

        def run(args: list[Any]) -> Any:
            returned = compiled(args)
            tell = segments.returned
            if tell is not None:
                tell()
            return returned

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def log_seconds(self, seconds: float) -> None:
        """Tell how long compiling took, dynamo's part left out."""
        choice = self.choice
        what = "unplanned" if choice.saved is None else f"keeping {len(choice.saved)} tensors"
        log.info(
            "compiled %s, %s%s: %.1f s, %.1f s of these for code",
            *(self.kind, what, ", operators one by one" if choice.plain else ""),
            *(seconds, self.code_s),
        )

    def _measure(self, args: Sequence[Any]) -> None:
        assert self.pair is not None and self.key is not None
        devices = {a.device for a in args if isinstance(a, torch.Tensor)}
        with RandomState.of(devices).replayed(), torch.no_grad():
            costs = measure_nodes(
                self.pair.forward,
                self.pair.backward,
                args,
                num_outputs=self.pair.num_outputs,
                fused=self.segments.executor == "inductor",
            )
        self.segments.measured(self.key, costs)


class _Partitioner(CustomPartitionerFn):  # type: ignore[misc]
    """The cut of one compilation for inductor, whose settings it is a part of."""

    def __init__(self, compilation: _Compilation) -> None:
        self._compilation: _Compilation | None = compilation

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        assert self._compilation is not None, "a cut that was forgotten"
        return self._compilation.cut(gm, joint_inputs, **options)

    def uuid(self) -> Any:
        """What compiled code depends on beside its own graph, for inductor's cache of code."""
        return ("memfit", "waits before reading back")

    def __deepcopy__(self, memo: Any) -> _Partitioner:
        return self  # inductor copies its settings; a compilation is not to be copied

    def __getstate__(self) -> Any:
        return self.uuid()  # the cache's key is a hash of the settings' pickle as well

    def forget(self) -> None:
        """Let go of the compilation, whoever holds a copy of the settings."""
        self._compilation = None


def _as_traced(module: fx.GraphModule, inputs: list[Any], compilation: _Compilation) -> Any:
    """Compile into the traced operators themselves."""

    def compile_forward(half: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        _allow_retaining()
        return compilation.forward(_input_names(half), _boxed(half))

    def compile_backward(half: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        return compilation.backward(_boxed(half))

    backend = aot_autograd(
        fw_compiler=compile_forward, bw_compiler=compile_backward, partition_fn=compilation.cut
    )
    return backend(module, inputs)


def _allow_retaining() -> None:
    """Say that the graph being compiled overwrites no saved tensor: torch takes no word for yes."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def _with_inductor(module: fx.GraphModule, inputs: list[Any], compilation: _Compilation) -> Any:
    """Compile with inductor; a plain choice stops before code is made, which workers may make."""
    plain, segments = compilation.choice.plain, compilation.segments
    workers = segments.workers if plain else Workers(0)

    def compile_half(half: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        backward = bool(options.get("is_backward"))
        names, strides = _input_names(half), _output_strides(half)  # compiling changes the graph
        work = (compilation.key, compilation.choice.saved, backward)
        if compilation.key is not None and workers.worker is None:
            workers.fork(work)
        if plain and workers.worker is None:
            compiled = _boxed(half)
        else:
            misses, begun = _cache_misses(), time.perf_counter()
            settings = _APART_SETTINGS if backward and compilation.made_apart else {}
            with wait_before_reading_back(), inductor_config.patch(settings):
                compiled = _code(half, inputs, compilation.kind, options)
            compilation.code_s += time.perf_counter() - begun
            if work in segments.made_ahead:
                looked_for(compilation.kind, found=_cache_misses() == misses)
        if not plain:
            segments.made_ahead.discard(work)  # other settings may need other code later
        if workers.worker is not None and (backward or _keeps_strides(strides)):
            workers.worker.end()
        # Where fused code lays out what it saves in another way than the traced operators, the
        # worker that knows this goes on with the backward; the other one's is for nothing.
        if backward:
            return compilation.backward(compiled)
        return compilation.forward(names, compiled)

    partitioner = _Partitioner(compilation)
    try:
        with workers.guarded(), decided_once():
            return compile_fx(
                module,
                inputs,
                inner_compile=compile_half,
                config_patches={"custom_partitioner_fn": partitioner},
            )
    finally:
        partitioner.forget()


def _code(
    half: fx.GraphModule, inputs: Sequence[Any], kind: str, options: Mapping[str, Any]
) -> Any:
    """Inductor's code; CannotCompile where it makes none: there is no compiler, say."""
    try:
        return compile_fx_inner(half, inputs, **options)
    except Exception as error:
        inner = innermost(error)
        if isinstance(inner, MemfitError) or is_out_of_memory(inner):
            raise
        raise cannot_compile(kind, inner) from error


def _cache_misses() -> int:
    """How often inductor's cache had no code, or was not asked."""
    found = counters["inductor"]
    return int(found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"])


def _input_names(half: fx.GraphModule) -> list[str]:
    return [n.name for n in half.graph.find_nodes(op="placeholder")]


def _output_strides(half: fx.GraphModule) -> list[tuple[int, ...] | None]:
    """How the results lie in memory, as traced."""
    values = [getattr(node, "meta", {}).get("val") for node in half.graph.output_node().args[0]]  # type: ignore[union-attr]
    return [tuple(v.stride()) if isinstance(v, torch.Tensor) else None for v in values]


def _keeps_strides(traced: Sequence[tuple[int, ...] | None]) -> bool:
    """Whether the code that was just compiled leaves its results as they were traced.

    Inductor says so to whoever compiles a forward.
    """
    context = TracingContext.try_get()
    compiled = None if context is None else context.output_strides
    pairs = zip(traced, compiled or (), strict=False)
    return all(t is None or c is None or t == tuple(map(int, c)) for t, c in pairs)


def _boxed(module: fx.GraphModule) -> Boxed:
    """A function that takes its arguments in a list, which it empties as it goes."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    getattr(module, "real_recompile", module.recompile)()  # a lazy module would ask at every call
    forward = module.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _show(watch: Callable[[str, torch.Tensor], None], names: Sequence[str], values: Any) -> None:
    for name, value in zip(names, values, strict=False):
        if name and isinstance(value, torch.Tensor):
            watch(name, value)


def _own_function(target: Callable[..., Any], name: str) -> FunctionType:
    """A function with a code object of its own that calls `target`.

    dynamo keeps its caches and limits per code object, and skips torch's own modules when they
    are compiled directly.
    """

    def segment(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return target(module, *args, **kwargs)

    code = segment.__code__.replace(co_name=name)
    return FunctionType(code, segment.__globals__, name, None, segment.__closure__)


def _known(settings: dict[str, Any], config: Any) -> dict[str, Any]:
    """The settings that this release of torch has."""
    return {name: value for name, value in settings.items() if hasattr(config, name)}
