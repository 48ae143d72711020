"""What dynamo says: errors in one line, and no warnings of limits that memfit lifts itself."""

from __future__ import annotations

import logging
import os
import textwrap

from torch._dynamo import exc as dynamo_errors

from memfit.runtime.compile.choice import CannotCapture, CannotCompile

_TEXT_CHARACTERS = 160
_OWN_CODE = os.path.dirname(__file__)  # which calls the segments


def leave_out_our_limits() -> None:
    """Keep dynamo from warning that a function of ours was compiled too often.

    It is compiled again with our settings then, or refused in words of ours.
    """
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "recompile_limit" not in message or f"({_OWN_CODE}{os.sep}" not in message


def cannot_capture(kind: str, error: BaseException, inner: BaseException) -> CannotCapture:
    """Dynamo's error in one line, with the line of the user's code it points to."""
    text = textwrap.shorten(_text(inner), _TEXT_CHARACTERS, placeholder=" ...")
    return CannotCapture(f"{kind}: {text}{_place(inner) or _place(error)}")


def cannot_compile(kind: str, error: BaseException) -> CannotCompile:
    """What kept inductor from making code, in one line."""
    text = textwrap.shorten(_text(error), _TEXT_CHARACTERS, placeholder=" ...")
    return CannotCompile(f"no code can be made for {kind}: {text}")


def _text(error: BaseException) -> str:
    """One line that says what went wrong: dynamo's title, or what the user's own code raised."""
    lines = [line.strip() for line in str(getattr(error, "msg", None) or error).splitlines()]
    title = next((line for line in lines if line), type(error).__name__)
    if any("Could not guard on data-dependent expression" in line for line in lines):
        return "it branches on the value of a tensor"
    for line in lines:
        _, raised, exception = line.partition("raised exception ")
        _, got, failure = line.partition(": got ")
        if raised and title == "Observed exception":
            return exception
        if got and isinstance(error, dynamo_errors.TorchRuntimeError):
            return failure
    return title


def innermost(error: BaseException) -> BaseException:
    """What a backend raised, out of dynamo's wrapping."""
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return error


def _place(error: BaseException) -> str:
    """The line of the user's code that dynamo points to, as " (file.py:12 code)"."""
    frames = [
        f
        for f in getattr(error, "real_stack", None) or ()
        if os.path.dirname(f.filename) != _OWN_CODE
    ]
    if not frames:
        return ""
    file = frames[-1].filename.replace("\\", "/").rpartition("/")[2]
    code = textwrap.shorten(frames[-1].line or "", _TEXT_CHARACTERS, placeholder=" ...")
    return f" ({file}:{frames[-1].lineno} {code})"
