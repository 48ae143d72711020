"""One run of a command: what goes to stdout and stderr, and which exit code an error gives."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, NoReturn, TextIO

import typer
from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from memfit.errors import DeviceMemoryError, InfeasibleError, MemfitError, NumbersWarning

SCHEMA_VERSION = 1
PLAIN_WIDTH = 100  # of tables that go to a file or a pipe
CTRL_C = 130


class Session:
    """Where a command writes: results to stdout, everything else to stderr."""

    def __init__(self, stdout: TextIO, as_json: bool) -> None:
        self.as_json = as_json
        self._stdout = stdout
        self._console = Console(file=stdout, width=_width(stdout), highlight=False)
        self._stderr = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._doing: str | None = None
        self._begun = 0.0

    def progress(self, text: str) -> None:
        """Show what is being done, on a terminal; the next call replaces it."""
        self._log_seconds()
        logging.getLogger(__name__).info(text)
        self._doing, self._begun = text, time.perf_counter()
        if not self._stderr.is_terminal:
            return
        if self._status is None:
            self._status = self._stderr.status(Text(text))
            self._status.start()
        self._status.update(Text(text))

    def show(self, *renderables: RenderableType) -> None:
        """Print tables and text on stdout."""
        self.quiet()
        with self._console.capture() as captured:
            for renderable in renderables:
                self._console.print(renderable)
        self._write(captured.get())

    def line(self, text: str | Text) -> None:
        """Print one line on stdout, however long."""
        self.quiet()
        with self._console.capture() as captured:
            self._console.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)
        self._write(captured.get())

    def emit(self, data: dict[str, Any]) -> None:
        """Print the JSON object of the command on stdout."""
        self.quiet()
        data = {"schema_version": SCHEMA_VERSION, **data}
        self._write(json.dumps(_finite(data), indent=1) + "\n")

    def fail(self, error: MemfitError) -> NoReturn:
        """Report an error that the user can mend, and exit with its code."""
        self.quiet()
        self.complain(error.message, error.hint)
        if self.as_json:
            self.emit(_error_data(error))
        raise typer.Exit(error.exit_code)

    def complain(self, message: str, hint: str | None = None) -> None:
        """Print an error on stderr."""
        self._stderr.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
        if hint is not None:
            self._stderr.print(Text.assemble(("hint: ", "bold"), hint), soft_wrap=True)

    def quiet(self) -> None:
        """Take the progress line off the terminal."""
        self._log_seconds()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _log_seconds(self) -> None:
        """Tell how long took what is done now."""
        if self._doing is not None:
            seconds = time.perf_counter() - self._begun
            logging.getLogger(__name__).info("%s took %.1f s", self._doing, seconds)
        self._doing = None

    def _write(self, text: str) -> None:
        try:
            self._stdout.write(text)
            self._stdout.flush()
        except BrokenPipeError:
            # The reader (`| head`) has seen enough; the rest has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())


@contextmanager
def opened(*, as_json: bool, verbose: bool) -> Iterator[Session]:
    """Run a command's work: logging set up, and its errors turned into messages and exit codes."""
    session = Session(sys.stdout, as_json)
    with ExitStack() as stack:
        stack.callback(session.quiet)
        stack.enter_context(_logging(verbose))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", NumbersWarning)  # commands say so themselves
        if as_json:  # what a user's file or a library prints must not mix with the object
            stack.enter_context(redirect_stdout(sys.stderr))
        try:
            yield session
        except MemfitError as error:
            session.fail(error)
        except KeyboardInterrupt:
            session.quiet()
            typer.echo("interrupted", err=True)
            raise typer.Exit(CTRL_C) from None
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            session.fail(
                DeviceMemoryError(
                    f"out of memory: {'. '.join(str(error).split('. ')[:2])}",
                    hint="use a smaller --batch or --seq, --dtype bf16, or a smaller model",
                )
            )


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    """Send memfit's log to stderr; let transformers speak only of errors."""
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.getLogger("transformers").setLevel(logging.ERROR)
    logger = logging.getLogger("memfit")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _error_data(error: MemfitError) -> dict[str, Any]:
    data = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
    if isinstance(error, InfeasibleError):
        return {
            "verdict": "infeasible",
            "budget_bytes": error.budget_bytes,
            "minimum_feasible_bytes": error.minimum_bytes,
            "incompressible_bytes": error.incompressible_bytes,
            "slowdown": error.slowdown,
            **data,
        }
    return data


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # not loaded: then it is not torch's error
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _finite(data: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _width(stdout: TextIO) -> int | None:
    return None if stdout.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
