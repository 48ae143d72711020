"""One process that has imported torch and the rest, and forks a cell's process when asked.

`python -m memfit.bench.fork_server MODULE ...` imports the modules and reads requests, one line of
JSON each. It never touches CUDA and starts no threads: a forked process could use neither.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

CUDA_NOT_INITIALIZED = 3
POLL_S = 0.02
CLOSING_S = 10.0
# torch asks NVML whether there is a GPU, not CUDA, while this is set.
NVML_ALONE = "PYTORCH_NVML_BASED_CUDA_CHECK"


class CannotFork(Exception):
    """The server cannot be used; `module` is the one whose import is to blame, if any."""

    def __init__(self, message: str, module: str | None = None) -> None:
        super().__init__(message)
        self.module = module


class ForkServer:
    """The server as its client sees it: started when made, ended by `close`."""

    def __init__(self, modules: Sequence[str], environment: dict[str, str]) -> None:
        from memfit.measure.turns import join_turns  # not in the server, before it is asked to

        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memfit.bench.fork_server", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment | {NVML_ALONE: "1"},
            text=True,
            start_new_session=True,  # Ctrl-C is for the benchmark, which ends the cell in order
        )
        self._leave = join_turns(self._process.pid, environment)
        try:
            answer = self._read()
        except BaseException:
            self.close()
            raise
        if answer is None or "why" in answer:
            last_words = self._last_words()
            self.close()
            if answer is None:
                raise CannotFork(f"importing the cells' modules failed: {last_words}")
            raise CannotFork(answer["why"], answer["module"])

    def run(self, asked: str, told: str, said: str, timeout_s: float) -> int | None:
        """Run one cell to its end; its exit code, negative for a signal, None for a time-out."""
        assert self._process.stdin is not None
        request = {"asked": asked, "told": told, "said": said, "timeout_s": timeout_s}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._read()
        except BrokenPipeError:
            answer = None
        except BaseException:
            self.close()
            raise
        if answer is None:
            raise CannotFork("the process that starts the cells died")
        code: int | None = answer["code"]
        return code

    def close(self) -> None:
        """End the server; it ends the cell that runs, with all it started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()
        self._leave()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def main(modules: Sequence[str]) -> None:
    """Serve requests until there are no more; in a forked process, run its cell and return."""
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what modules print when they are imported is not for the client
    for module in modules:
        why = _import(module)
        if why is not None:
            _reply(replies, {"why": why, "module": module})
            return
    os.environ.pop(NVML_ALONE, None)
    gc.collect()
    gc.freeze()  # else the first collection in each cell would copy every page
    _reply(replies, {"ready": True})
    with os.fdopen(os.dup(requests), encoding="utf-8") as lines:
        while line := lines.readline():
            request = json.loads(line)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads: those of BLAS libraries know of forks
                process = os.fork()
            if not process:
                break
            _reply(replies, {"code": _wait(process, request["timeout_s"], requests)})
        else:
            return
    os.setsid()  # what the cell starts, such as compilers, ends with it
    os.close(requests)
    os.close(replies)
    said = os.open(request["said"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    from memfit.bench import cell

    cell.main([request["asked"], request["told"]], forked=True)


def _import(name: str) -> str | None:
    """Import "module" or "module:attribute"; why nothing may be forked any more, if so."""
    import torch

    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        if attribute:
            getattr(found, attribute)
    except Exception:  # the cells that need it say so
        traceback.print_exc()
    if torch.cuda.is_initialized() or _cuda_driver_is_up():
        return f"importing {name} initialises CUDA"
    if threading.active_count() > 1:
        return f"importing {name} starts a thread"
    return None


def _cuda_driver_is_up() -> bool:
    """Whether CUDA's driver was initialised in this process, by whoever."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    code: int = driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    return code != CUDA_NOT_INITIALIZED


def _wait(process: int, timeout_s: float, requests: int) -> int | None:
    """The cell's exit code; None when it took too long. Ends it when the client is gone."""
    end = time.monotonic() + timeout_s
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        left = end - time.monotonic()
        # The client asks for one cell at a time: what can be read here is its end.
        gone, _, _ = select.select([requests], [], [], min(max(left, 0), POLL_S))
        if gone or left <= 0:
            _end(process)
            if gone:
                raise SystemExit
            return None


def _end(process: int) -> None:
    """End the process and its session. It was not waited for yet, so it is there."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # it has no session of its own yet
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def _reply(replies: int, answer: dict[str, Any]) -> None:
    os.write(replies, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
