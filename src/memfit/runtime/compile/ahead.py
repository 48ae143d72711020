"""Compile segments in copies of this process, so that several are compiled at once.

A worker is forked where a half of a traced segment, its forward or its backward, is about to be
compiled. It does that with inductor, which leaves the code in its cache on disk, and ends. This
process runs the traced operators meanwhile; when it compiles the segment itself, later, the cache
has the code. A worker hands nothing else over, so one that fails costs time only.

Forked processes cannot use CUDA and take no memory on the card: what inductor asks of the device
is answered with what this process knew, and kernels are compiled but not loaded. Autograd does not
run in them either, so they begin when the backward is traced. This is the only module that changes
torch for a worker. Limits: Linux; what measures on the device to compile (`max_autotune`) fails.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch

from memfit.errors import UsageError

log = logging.getLogger(__name__)

ASKED = "MEMFIT_COMPILE_WORKERS"  # an environment variable: how many, 0 for none
FEWEST_CORES = 4  # for workers that nobody asked for
MOST_WORKERS = 8  # each may come to some hundred MB of host memory of its own
LIMIT_S = 180  # for one that hangs: threads of this process may hold locks when it is forked
_KERNELS_AT_ONCE = 8
_TEXT_CHARACTERS = 200
_FRAMES = 4  # of where a worker failed
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"  # an array by the numbers of device types
_CUDA, _META = 1, 14

_MISSES = 3  # so often what workers made may be for nothing, or as often as it was of use

_failed = False  # whether a worker of this process failed: there are no more after that
_used = {True: 0, False: 0}  # how often torch's cache had what workers made, and had not


def worker_count() -> int:
    """How many workers may run at once here; 0 where segments are compiled in this process.

    As many as were asked for; where nobody asked, some for a process that uses a GPU.
    """
    asked = os.environ.get(ASKED, "").strip()
    if asked and not asked.isdecimal():
        raise UsageError(
            f"{ASKED} is {asked!r}, no count of processes", hint=f"try {ASKED}={MOST_WORKERS}"
        )
    if sys.platform != "linux" or _failed:
        return 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return 0  # its threads and pinned buffers do not care for forks
    cores = len(os.sched_getaffinity(0))
    usual = MOST_WORKERS if torch.cuda.is_initialized() and cores >= FEWEST_CORES else 0
    return min(int(asked) if asked else usual, cores - 1, MOST_WORKERS)


def wake_inductor() -> None:
    """Have inductor start its own processes for kernels, which take seconds to come up.

    It does so when it compiles first, and compiles kernels one by one until they are there.
    """
    from torch._inductor import async_compile  # takes seconds as well

    getattr(async_compile, "maybe_warm_pool", lambda: None)()  # not in all releases


@functools.cache
def _compile_once(device: torch.device) -> None:
    """Compile next to nothing, so that what inductor does once is done before a fork.

    It loads modules and traces patterns then, which every worker would do again, and asks the
    device what a worker cannot.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def tiny(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.ops.aten.mm.default(x, y), torch.ops.aten.mul.Tensor(x, y)]

    with FakeTensorMode(), config.patch(fx_graph_cache=False):
        inputs = [torch.empty(16, 16, device=device, dtype=torch.bfloat16) for _ in "xy"]
        compile_fx_inner(make_fx(tiny)(*inputs), inputs, is_inference=True)


def give_up(reason: str) -> None:
    """Have no more workers in this process, and say why."""
    global _failed
    if not _failed:
        log.warning("segments are compiled one after another, in this process: %s", reason)
    _failed = True


def looked_for(kind: str, *, found: bool) -> None:
    """Take note of whether torch's cache had what a worker made for a segment.

    Now and then it has not: a worker sees inputs as traced operators lay them out, and fused code
    may lay them out in another way. Where most is missing there are no more workers.
    """
    _used[found] += 1
    if found:
        return
    missing = f"torch's cache has not got what others made for {kind}"
    log.info(missing)
    if _used[False] >= max(_MISSES, _used[True]):
        give_up(missing)


class Workers:
    """Forked processes that compile; `close` waits for them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.work: set[Hashable] = set()  # what they were forked for
        self.worker: Worker | None = None  # what this process is, if it is one of them
        self._running: dict[int, int] = {}  # process -> where it says what went wrong
        self._begin = time.monotonic()

    def prepare(self) -> None:
        """Do once what the workers would each do again; before anything is traced."""
        device = _known_device() if self.most else None
        if device is None:
            return
        try:
            _compile_once(torch.device("cuda", device))
        except Exception as error:
            give_up(_shown(error))

    def fork(self, work: Hashable) -> None:
        """Start a worker, which goes on from here too; wait for a place if there is none.

        The same work is done once, and none where it would leave nothing in a cache.
        """
        if not self.most or _failed or work in self.work or not _cache_is_on():
            return
        while len(self._running) >= self.most:
            self._wait_for(next(iter(self._running)))
        device = _known_device()
        read, write = os.pipe()
        try:
            process = _fork()
        except OSError as error:  # no memory for another process
            give_up(str(error))
            os.close(read)
            os.close(write)
            return
        self.work.add(work)
        if process:
            os.close(write)
            self._running[process] = read
            return
        self.worker = Worker(write)
        with self.guarded(leaving=True):
            self.worker.prepare(device)

    @contextmanager
    def guarded(self, leaving: bool = False) -> Iterator[None]:
        """See to it that a worker never leaves this block, or, `leaving`, not by an error."""
        try:
            yield
        except BaseException as error:
            if self.worker is not None:
                self.worker.end(error)
            raise
        if self.worker is not None and not leaving:
            self.worker.end()

    def close(self) -> None:
        """Wait for all workers."""
        while self._running:
            self._wait_for(next(iter(self._running)))
        if self.work:
            seconds = time.monotonic() - self._begin
            log.info("compiled by other processes: %d in %.1f s", len(self.work), seconds)

    def kill(self) -> None:
        """End all workers now."""
        for process in self._running:
            os.kill(process, signal.SIGKILL)
        while self._running:
            process, read = self._running.popitem()
            os.close(read)
            os.waitpid(process, 0)

    def _wait_for(self, process: int) -> None:
        _, status = os.waitpid(process, 0)
        with os.fdopen(self._running.pop(process), "rb") as said:
            text = said.read().decode(errors="replace")
        if status:
            give_up(text or f"one ended with {os.waitstatus_to_exitcode(status)}")


class Worker:
    """This process as a forked one, which is to compile and nothing else."""

    def __init__(self, write: int) -> None:
        self._write = write
        self._kernels: list[int] = []  # processes

    def end(self, error: BaseException | None = None) -> NoReturn:
        """End this process when its kernels are compiled, without any of its exit handlers."""
        failed = error is not None
        if error is not None:
            self._say(error)
        while self._kernels:
            failed |= self._kernel_failed()
        os._exit(failed)

    def prepare(self, device: int | None) -> None:
        """Make this process fit to compile; `device` is the current one of CUDA."""
        from torch._inductor import async_compile, config

        _end_in_time()
        with open(os.devnull, "w") as nowhere:  # the original gives the same warnings
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        gc.disable()  # nothing of the original is to be freed here, least of all on its device
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # those of OpenMP were not copied
        _replace(torch, "get_num_threads", lambda: threads)  # generated code is for so many
        config.compile_threads = 1  # the processes and threads for more belong to the original
        _replace(async_compile.AsyncCompile, "triton", self._compile_kernel)
        if device is not None:
            _replace(torch.cuda, "is_initialized", lambda: True)
            _replace(torch.cuda, "_exchange_device", lambda number: device)
            _replace(torch.cuda, "_maybe_exchange_device", lambda number: device)
            _replace(torch._C, "_cuda_getDevice", lambda: device)
            _replace(torch._C, "_accelerator_getDeviceIndex", lambda: device)
            # Inductor puts the generator's state aside while it compiles; nothing is drawn here.
            _replace(torch.cuda, "get_rng_state", lambda *_: torch.empty(0, dtype=torch.uint8))
            _replace(torch.cuda, "set_rng_state", lambda *_: None)
            _leave_out_guards()

    def _compile_kernel(self, name: str, source: str, device_str: str = "cuda") -> None:
        """Put a kernel into Triton's cache, as inductor's own processes do."""
        from torch._inductor import async_compile

        if len(self._kernels) >= _KERNELS_AT_ONCE and self._kernel_failed():
            raise RuntimeError("a kernel was not compiled")
        for prepare in ("_set_triton_ptxas_path", "_set_triton_libdevice_path"):
            getattr(async_compile, prepare, lambda: None)()  # the second is not in all releases
        process = _fork()
        if process:
            self._kernels.append(process)
            return
        try:
            _end_in_time()
            kernel = async_compile._load_triton_kernel_from_source(name, source)
            kernel.precompile(warm_cache_only=True)
            os._exit(0)
        except BaseException as error:
            self._say(error)
        finally:
            os._exit(1)

    def _kernel_failed(self) -> bool:
        return os.waitpid(self._kernels.pop(0), 0)[1] != 0

    def _say(self, error: BaseException) -> None:
        os.write(self._write, _shown(error).encode())


def _leave_out_guards() -> None:
    """Have torch not set the device around its work on fake tensors, such as indexing them.

    The guards of meta tensors do nothing: they are put in the place of CUDA's.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    guards[_CUDA] = guards[_META]


def _shown(error: BaseException) -> str:
    """An error in one line, with the calls it came from; what it was raised from, if anything."""
    error = error.__cause__ or error
    text = textwrap.shorten(f"{type(error).__name__}: {error}", _TEXT_CHARACTERS)
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    calls = ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
    return f"{text} ({calls})"


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        return os.fork()


def _end_in_time() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)


def _cache_is_on() -> bool:
    from torch._inductor import config

    return bool(config.fx_graph_cache) and not config.force_disable_caches


def _known_device() -> int | None:
    """The current CUDA device, with torch made to remember what the devices are."""
    if not torch.cuda.is_initialized():
        return None
    for number in range(torch.cuda.device_count()):
        torch.cuda.get_device_properties(number)
    return torch.cuda.current_device()


def _replace(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), name
    setattr(owner, name, value)
