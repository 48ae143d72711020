"""Bytes and seconds as people write them."""

from __future__ import annotations

import re

from memfit.errors import UsageError

_FACTORS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_BYTES = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_HINT = 'write bytes as "16GiB" (2^30), "16GB" (10^9) or a whole number of bytes'


def parse_bytes(text: str | int) -> int:
    """Return the bytes that `text` names: 1073741824, "1GiB", "1.5 GB"."""
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise UsageError(f"{text!r} is not a number of bytes", hint=_HINT)
    if isinstance(text, int):
        return text
    match = _BYTES.fullmatch(text)
    if match is None and _BYTES.fullmatch(text.strip().removeprefix("-")):
        raise UsageError(f"{text!r} is below 0", hint=_HINT)
    if match is None:
        raise UsageError(f"{text!r} is not a number of bytes", hint=_HINT)
    number, unit = match.groups()
    factor = _FACTORS.get(unit.upper() or "B")
    if factor is None:
        raise UsageError(f"{text!r} has an unknown unit {unit!r}", hint=_HINT)
    if "." not in number:
        return int(number) * factor
    if not unit:  # "1.5", where GiB may have been meant, would be two bytes
        raise UsageError(f"{text!r} has no unit and is no whole number of bytes", hint=_HINT)
    return round(float(number) * factor)


def format_bytes(n: float) -> str:
    """Return `n` bytes in binary units with three to four digits: "15.62 GiB"."""
    sign, size = ("-" if n < 0 else ""), abs(float(n))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a duration with a fitting unit: "12.3 ms", "4.56 s", "3 min 20 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
