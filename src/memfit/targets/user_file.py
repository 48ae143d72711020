"""path/to/file.py:function -> the workload that the user's function returns."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memfit.errors import MemfitError, UsageError
from memfit.targets.build import describe, raise_if_out_of_memory, seeded
from memfit.targets.options import Options, suggest
from memfit.targets.overrides import parse_fields, parse_literal
from memfit.workload import Workload

_WRITE_ONE = "`memfit init` writes a workload file to start from"


def is_file_target(target: str) -> bool:
    """Return whether `target` has the form file.py:function (or lacks only the function)."""
    return target.endswith(".py") or target.rpartition(":")[0].endswith(".py")


def build_from_file(target: str, options: Options) -> Workload:
    """Return what the function of the file returns, called with the options it was given."""
    path, function_name = _split_target(target)
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}", hint=_WRITE_ONE)
    with _folder_on_path(path), seeded(options.seed, _device_to_seed(options)):
        module = _run_file(path, target)
        function = _find_function(module, path, function_name)
        arguments = _choose_arguments(function, target, options)
        with _errors_of(path, target):
            workload = function(**arguments)
    if not isinstance(workload, Workload):
        raise UsageError(
            f"{target} returned a {type(workload).__name__}, not a memfit.Workload",
            hint="end it with `return memfit.Workload(model, loss_fn, optimizer, batch)`",
        )
    if workload.name is None:
        workload.name = f"{path.name}:{function_name}"
    return workload


def _split_target(target: str) -> tuple[Path, str]:
    path, _, function_name = target.rpartition(":")
    if target.endswith(".py") or not function_name:
        raise UsageError(
            f"{target!r} names a file but no function in it",
            hint=f"write {target.rstrip(':')}:FUNCTION, whose function returns a memfit.Workload",
        )
    return Path(path), function_name


@contextmanager
def _folder_on_path(path: Path) -> Iterator[None]:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the file may have changed sys.path itself
            sys.path.remove(folder)


def _device_to_seed(options: Options) -> torch.device:
    if "device" not in options.given and torch.cuda.is_available():
        return torch.device("cuda")  # the function may choose it by itself
    return options.device


def _run_file(path: Path, target: str) -> ModuleType:
    """Return the executed file as a module; runs the text as it is now, without a cached .pyc."""
    absolute = path.resolve()
    module = ModuleType(f"memfit_workload_{path.stem}")
    module.__file__ = str(absolute)
    with _errors_of(path, target):
        code = compile(absolute.read_bytes(), str(absolute), "exec")
        # Dataclasses and pickle look the module up by its name.
        sys.modules[module.__name__] = module
        try:
            exec(code, module.__dict__)
        except BaseException:
            del sys.modules[module.__name__]
            raise
    return module


def _find_function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    if function is not None:
        raise UsageError(
            f"{name!r} in {path} is a {type(function).__name__}, not a function",
            hint="name a function that returns a memfit.Workload",
        )
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise UsageError(
        f"{path} has no function {name!r}",
        hint=f"{suggest(name, own)}it has {', '.join(own)}" if own else _WRITE_ONE,
    )


def _choose_arguments(
    function: Callable[..., Any], target: str, options: Options
) -> dict[str, Any]:
    """Return the options the caller gave as keyword arguments; all must be accepted."""
    parameters = _keyword_parameters(function)
    arguments: dict[str, Any] = {name: getattr(options, name) for name in sorted(options.given)}
    if "device" in arguments:
        arguments["device"] = str(arguments["device"])
    for name in arguments:
        if parameters is not None and name not in parameters:
            raise UsageError(
                f"{name} is given, by --{name}, a preset or a configuration, but {target} takes "
                f"no argument {name!r}",
                hint=f"leave it out, or add a parameter {name!r} to the function",
            )
    for name, text in options.overrides.items():
        if name in arguments:
            raise UsageError(
                f"{name!r} was given twice, as --{name} and with --set", hint="give it once"
            )
        arguments[name] = _parse_argument(target, name, text, parameters)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{target} cannot be called with the options given: {error}",
            hint="give every parameter of the function a default",
        ) from error
    except ValueError:
        pass  # a callable without a signature (a builtin): the call itself will tell
    return arguments


def _keyword_parameters(function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return keyword parameters with their defaults (None without one); None for any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {
        p.name: None if p.default is p.empty else p.default
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def _parse_argument(target: str, name: str, text: str, parameters: Mapping[str, Any] | None) -> Any:
    if parameters is None:
        return parse_literal(text)
    if name not in parameters:
        raise UsageError(
            f"--set {name}={text} was given, but {target} takes no argument {name!r}",
            hint=f"{suggest(name, parameters)}leave it out, or add the parameter to the function",
        )
    return parse_fields(target, {name: text}, parameters, optional=True)[name]


@contextmanager
def _errors_of(path: Path, target: str) -> Iterator[None]:
    """Turn what the user's code raises into a UsageError that says where; Ctrl-C passes."""
    try:
        yield
    except MemfitError:
        raise
    except (Exception, SystemExit) as error:
        raise_if_out_of_memory(target, error)
        raise UsageError(
            f"{_where(path, error)}: {describe(error)}",
            hint="memfit imports the file and calls the function; try it alone with "
            f"`python {path}`",
        ) from error


def _where(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        own = Path(error.filename) == path.resolve()
        return f"{path if own else error.filename}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path.resolve())
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)
