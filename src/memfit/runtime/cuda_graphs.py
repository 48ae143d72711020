"""Run a model's forward and its backward as two CUDA graphs: the host launches two things a step.

Where kernels are short the device waits for Python: a ResNet-50 of 64 images on an H200 is 20 ms of
kernels in a step of 36. The first call of the model runs as ever and shows whether it draws random
numbers or keeps count of anything; the second is captured, with the memory that it takes, and from
then on both graphs are launched again. The same kernels run in the same order, so the numbers are
the same.

A graph is one forward with its backward, for inputs of one shape, parameters in one place and
modules in one mode. Any other call runs as ever and gives the graphs' memory back. What Python does
in the forward besides would not be done again: a model with hooks inside, or whose forward leaves
traces, is not captured. The graphs keep the memory of the step between steps, so nothing else can
have it; gradients lie in it, too, and are copied where the next forward would overwrite them. One
that was put elsewhere is left there with its memory, and the step is captured anew.
"""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import once_differentiable
from torch.nn.modules import module as torch_modules
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from memfit.measure.cuda_allocator import drop_cublas_scratch
from memfit.measure.step import is_out_of_memory
from memfit.runtime.calls import Forward, replaced_forward
from memfit.runtime.pressure.innards import hooks_in_force
from memfit.runtime.traces import Traces
from memfit.workload import unwrap

log = logging.getLogger(__name__)
_PLAIN = (
    torch.Tensor,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
)
_TOLERATED = 3  # captures that are lost because gradients are kept


class Cuda:
    """What is asked of CUDA; a test on a CPU has its own."""

    def graph(self) -> Any:
        """An empty graph: `replay()` runs what was recorded."""
        return torch.cuda.CUDAGraph()

    def pool(self) -> Any:
        """Memory for graphs that always run one after another."""
        return torch.cuda.graph_pool_handle()

    def recording(self, graph: Any, pool: Any) -> AbstractContextManager[Any]:
        """What is launched in the block goes into the graph, and is not run."""
        return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")

    def clear(self, device: torch.device) -> None:
        """Wait, and give back memory that is not in use, the scratch of cuBLAS included.

        It has its own on every stream: left alone, that of the capture would come on top.
        """
        torch.cuda.synchronize(device)
        drop_cublas_scratch()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)

    def mend(self, device: torch.device, pool: Any) -> None:
        """End what a recording left behind that CUDA broke off, which torch does not.

        Else allocations would go on into its memory, and random numbers would wait for its end.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        with suppress(RuntimeError):  # there is nothing to end after any other failure
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with self.recording(self.graph(), self.pool()):
                pass

    def hidden_bytes(self, device: torch.device) -> int:
        """What was in use since `clear`, and is not now."""
        drop_cublas_scratch()  # it lies in the graphs' memory, which nobody else is given
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


class CudaGraphs:
    """The graphs of one model's step; they outlive the time they are at work (see `release`)."""

    def __init__(self, model: torch.nn.Module, cuda: Cuda | None = None) -> None:
        self.model = unwrap(model)
        self._cuda = cuda or Cuda()
        self._modules = list(self.model.modules())
        self.refused: str | None = None  # why the model cannot be captured
        self.no_room = False  # that is why
        self.as_ever: str | None = None  # why the latest call was not launched as a graph
        self.replays = 0
        self._captured: _Captured | None = None
        self._warm: _Circumstances | None = None  # of a call that ran as ever
        self._times_kept = 0  # that gradients were not given back before the next step

    @property
    def hidden_bytes(self) -> int:
        """What the graphs use and the allocator counts as free between steps."""
        return 0 if self._captured is None else self._captured.hidden_bytes

    def release(self) -> None:
        """Give the memory of the graphs back; the next call but one captures again.

        What had no room may have it then.
        """
        self._drop()
        if self.no_room:
            self.no_room, self.refused = False, None

    def _drop(self) -> None:
        self._captured = self._warm = None

    @contextmanager
    def at_work(self, skipped: Callable[[], None]) -> Iterator[None]:
        """Replace the model's forward until the block is left.

        `skipped` is called for every forward that the graphs do in its place.
        """
        with replaced_forward(self.model, partial(self._wrap, skipped)):
            yield

    def _wrap(self, skipped: Callable[[], None], forward: Forward) -> Forward:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = tree_flatten((args, kwargs))
            try:
                now = self._circumstances(leaves, spec)
            except _CannotBe as reason:
                self._drop()
                self.as_ever = str(reason)
                return forward(*args, **kwargs)
            if self._captured is None and now == self._warm:
                self._captured = self._capture(forward, leaves, spec, now)
            captured = self._captured
            if captured is not None and captured.is_kept:
                self._kept_gradients()
                captured = None
            if captured is None or captured.made_in != now or captured.is_waiting:
                self._drop()
                return self._as_ever(forward, args, kwargs, now)
            skipped()
            self.as_ever = None
            self.replays += 1
            return captured(leaves)

        return call

    def _kept_gradients(self) -> None:
        """Leave gradients that somebody kept to them, and their memory with these."""
        self._times_kept += 1
        if self._times_kept >= _TOLERATED:
            self._refuse("gradients of earlier steps are kept")

    def _circumstances(self, leaves: Sequence[Any], spec: TreeSpec) -> _Circumstances:
        if self.refused is not None:
            raise _CannotBe(self.refused)
        if not torch.is_grad_enabled():
            raise _CannotBe("it needs no gradients")
        return _Circumstances.of(self._modules, leaves, spec)

    def _as_ever(self, forward: Forward, args: Any, kwargs: Any, now: _Circumstances) -> Any:
        self.as_ever = "the first call of its kind"
        before = Traces.of(self._modules, _device(self.model))
        output = forward(*args, **kwargs)
        left = before.left_since()
        if left is None:
            self._warm = now
        else:
            self._refuse(left)
        return output

    def _capture(
        self, forward: Forward, leaves: Sequence[Any], spec: TreeSpec, now: _Circumstances
    ) -> _Captured | None:
        pool: Any = None
        try:
            pool = self._cuda.pool()
            with _casting_anew():
                return capture(forward, self.model, leaves, spec, now, self._cuda, pool)
        except (RuntimeError, _CannotBe) as error:
            self.no_room = is_out_of_memory(error)
            why = str(error).strip().splitlines()[0]
        # Outside of the except block what the failed capture held is free.
        gc.collect()
        if self.no_room:
            why = "there is no room for its memory"
        elif pool is not None:
            self._cuda.mend(_device(self.model), pool)
        self._warm = None
        self._refuse(why)
        return None

    def _refuse(self, why: str) -> None:
        self.refused = why
        log.warning("%s is not run as CUDA graphs: %s", type(self.model).__name__, why)


class _CannotBe(Exception):
    """A call that no graph can stand for, and why."""


@dataclass(frozen=True)
class _Circumstances:
    """What a graph holds for: where everything lies, modes, shapes, and torch's settings."""

    spec: TreeSpec
    inputs: tuple[Any, ...]  # of a tensor its make, of anything else itself
    model: tuple[int, ...]  # of its modules their modes, of its tensors where they lie
    settings: tuple[Any, ...]

    @staticmethod
    def of(
        modules: Sequence[torch.nn.Module], leaves: Sequence[Any], spec: TreeSpec
    ) -> _Circumstances:
        """Those of a call of the first of these modules, which has the others inside.

        _CannotBe where a graph would leave something out.
        """
        if torch.is_anomaly_enabled():
            raise _CannotBe("autograd looks for anomalies")
        if torch_modules._has_any_global_hook() or hooks_in_force() is not None:
            raise _CannotBe("there are hooks for all modules, or for saved tensors")
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (
                type(leaf) is not torch.Tensor or leaf.requires_grad
            ):
                raise _CannotBe("an input needs a gradient, or is of another class of tensors")
            _check_plain(leaf, "is given")
        model: list[int] = []
        for module in modules:
            if _has_hooks(module) and module is not modules[0]:
                raise _CannotBe(f"a {type(module).__name__} inside has hooks")
            model.append(module.training)
            for parameter in module._parameters.values():
                if parameter is not None:
                    model += (parameter.data_ptr(), parameter.requires_grad)
            model += (b.data_ptr() for b in module._buffers.values() if b is not None)
        return _Circumstances(spec, tuple(map(_make, leaves)), tuple(model), _settings())


def _check_plain(leaf: Any, what: str) -> None:
    """_CannotBe for a value that may change, or hold tensors, unseen."""
    if not isinstance(leaf, _PLAIN):
        raise _CannotBe(f"it {what} a {type(leaf).__name__}")


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _make(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return leaf


def _settings() -> tuple[Any, ...]:
    """What chooses other kernels for the same call."""
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        cudnn.enabled,
        cudnn.deterministic,
        cudnn.benchmark,
        cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


class _Ticket:
    """Lives as long as a forward waits for its backward."""


class _Captured:
    """Two graphs, with the memory that they read from and write to."""

    def __init__(self, made_in: _Circumstances, inputs: list[torch.Tensor], cuda: Cuda) -> None:
        self.made_in, self.inputs = made_in, inputs
        self.forward, self.backward = cuda.graph(), cuda.graph()
        self.outputs: list[Any] = []
        self.output_spec: TreeSpec | None = None
        self.tangents: list[torch.Tensor | None] = []  # of the outputs that are tensors
        self.parameters: list[torch.nn.Parameter] = []
        self.gradients: list[torch.Tensor | None] = []
        self.users: list[int] = []  # of each gradient's memory, when nobody has it but the graphs
        self.hidden_bytes = 0
        self._waiting: Callable[[], _Ticket | None] = lambda: None

    @property
    def is_waiting(self) -> bool:
        """Whether a backward is still to come, of what another forward would overwrite."""
        return self._waiting() is not None

    @property
    def is_kept(self) -> bool:
        """Whether somebody has a gradient that this step would overwrite, not as `.grad`."""
        every = zip(self.parameters, self.gradients, self.users, strict=True)
        return any(
            gradient is not None and _users(gradient) - _has(parameter, gradient) > users
            for parameter, gradient, users in every
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run the forward on these inputs."""
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results = iter(_Step.apply(self, len(given), *given, *self.parameters))
        leaves = [next(results) if isinstance(o, torch.Tensor) else o for o in self.outputs]
        assert self.output_spec is not None
        return tree_unflatten(leaves, self.output_spec)

    def run_forward(self, given: Sequence[torch.Tensor]) -> tuple[_Ticket, list[torch.Tensor]]:
        """Launch the forward; its outputs are copies, which the next step leaves alone."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            there = parameter.grad
            if there is not None and gradient is not None and _has(parameter, gradient):
                there.data = there.clone()  # this step writes where it lies
        for static, tensor in zip(self.inputs, given, strict=True):
            static.copy_(tensor)
        self.forward.replay()
        ticket = _Ticket()
        self._waiting = ref(ticket)
        return ticket, [o.detach().clone() for o in self.outputs if isinstance(o, torch.Tensor)]

    def run_backward(self, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Launch the backward; the gradients are those of the parameters."""
        for static, tangent in zip(self.tangents, tangents, strict=True):
            if static is not None:
                static.zero_() if tangent is None else static.copy_(tangent)
        self.backward.replay()
        return [None if g is None else g.detach() for g in self.gradients]


def _has(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a parameter's gradient is this one."""
    there = parameter.grad
    return (
        there is not None
        and there.untyped_storage().data_ptr() == gradient.untyped_storage().data_ptr()
    )


def _users(tensor: torch.Tensor) -> int:
    """How many tensors there are with this one's memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _Step(torch.autograd.Function):
    """The graphs as one node of autograd."""

    @staticmethod
    def forward(ctx: Any, captured: _Captured, given: int, *tensors: torch.Tensor) -> Any:
        ctx.captured, ctx.given = captured, given
        ctx.ticket, outputs = captured.run_forward(tensors[:given])
        ctx.set_materialize_grads(False)
        needs = iter(captured.tangents)
        ctx.mark_non_differentiable(*(o for o in outputs if next(needs) is None))
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *tangents: Any) -> Any:
        if ctx.ticket is None:
            raise RuntimeError(
                "the backward of a step that runs as CUDA graphs can run once: "
                "fit with cuda_graphs=False to keep its graph"
            )
        ctx.ticket = None
        gradients = ctx.captured.run_backward(tangents)
        return None, None, *[None] * ctx.given, *gradients


def capture(
    forward: Forward,
    model: torch.nn.Module,
    leaves: Sequence[Any],
    spec: TreeSpec,
    made_in: _Circumstances,
    cuda: Cuda,
    pool: Any,
) -> _Captured:
    """Capture a call of the forward and its backward; nothing is computed yet."""
    device = _device(model)
    gc.collect()
    cuda.clear(device)
    inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found = _Captured(made_in, inputs, cuda)
    static = iter(inputs)
    leaves = [next(static) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, spec)
    found.parameters = [p for p in model.parameters() if p.requires_grad]
    with _twins(model) as twins:
        with cuda.recording(found.forward, pool):
            output = forward(*args, **kwargs)
        results, found.output_spec = tree_flatten(output)
        del output
        for result in results:
            _check_plain(result, "returns")
        tensors = [r for r in results if isinstance(r, torch.Tensor)]
        found.tangents = [torch.empty_like(t) if t.requires_grad else None for t in tensors]
        with cuda.recording(found.backward, pool):
            gradients = torch.autograd.grad(
                [t for t in tensors if t.requires_grad],
                [twins[p] for p in found.parameters],
                [t for t in found.tangents if t is not None],
                allow_unused=True,
            )
            pairs = zip(gradients, found.parameters, strict=True)
            found.gradients = [None if g is None else _laid_out(g, p) for g, p in pairs]
            del gradients, pairs
    found.outputs = [r.detach() if isinstance(r, torch.Tensor) else r for r in results]
    del results, tensors
    gc.collect()
    found.users = [0 if g is None else _users(g) for g in found.gradients]
    found.hidden_bytes = cuda.hidden_bytes(device)
    return found


@contextmanager
def _casting_anew() -> Iterator[None]:
    """No casts of weights from before, nor for later: autocast keeps them, a graph makes its own.

    They are dropped, for to switch keeping them off is a change that compiled code is made for.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _twins(model: torch.nn.Module) -> Iterator[dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """Put other parameters with the same memory into the model; by those they stand for.

    What autograd knows of a parameter is of the stream it was first used on, for as long as a loss
    of an earlier step is alive; work on that stream would end the capture.
    """
    twins = {p: torch.nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    before = [(m._parameters, dict(m._parameters)) for m in model.modules()]
    for parameters, own in before:
        parameters.update({n: None if p is None else twins[p] for n, p in own.items()})
    try:
        yield twins
    finally:
        for parameters, own in before:
            parameters.update(own)


def _laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in its parameter's layout: autograd takes it over then, and copies it else."""
    if gradient.layout is torch.strided and gradient.stride() != parameter.stride():
        return torch.empty_like(parameter).copy_(gradient)
    return gradient


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
