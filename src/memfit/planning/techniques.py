"""The techniques a plan may use, and what a user allows."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import UsageError

AVAILABLE = ("recompute",)


def allowed_techniques(allow: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the techniques in `allow`; names that begin with + add to the default ones."""
    if allow is None:
        return AVAILABLE
    names = [n.strip() for n in allow.split(",")] if isinstance(allow, str) else list(allow)
    for name in names:
        if name.removeprefix("+") not in AVAILABLE:
            raise UsageError(
                f"unknown technique {name.removeprefix('+')!r}",
                hint=f"this version has: {', '.join(AVAILABLE)}",
            )
    plain = [n for n in names if not n.startswith("+")]
    added = [n.removeprefix("+") for n in names if n.startswith("+")]
    return tuple(dict.fromkeys([*(plain or AVAILABLE), *added])) if names else ()
