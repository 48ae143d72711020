"""The techniques a plan may use, and what a user allows."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.errors import UsageError

ACTIVATIONS = ("recompute", "offload")
# How the step itself is run, in the order in which they are tried: the cheap ones first.
ROUNDED_STATE = ("optim_bf16_sr", "optim_8bit")
# Frozen weights in int8: by itself symmetric, with a scale per channel.
INT8_WEIGHTS = (
    "int8_weights",
    "int8_weights_asymmetric",
    "int8_weights_per_tensor",
    "int8_weights_asymmetric_per_tensor",
)
APPROXIMATE = (*ROUNDED_STATE, *INT8_WEIGHTS)
# Optimizer state on the host: it visits the device to be stepped, or the CPU steps it there.
ON_HOST = ("optimizer_offload", "step_on_host")
IN_BACKWARD = "step_in_backward"  # each segment's parameters, as soon as their gradients are there
OPTIMIZER = (IN_BACKWARD, *ON_HOST, *ROUNDED_STATE)
STEP = (IN_BACKWARD, "tiled_loss", *ON_HOST, *APPROXIMATE)
MICROBATCH = "microbatch"  # the batch in parts, gradients added up
AVAILABLE = (*ACTIVATIONS, *STEP, MICROBATCH)
# What a strategy is made of: naming it allows these.
NEEDS = {
    "all": ("recompute",),
    "interval": ("recompute",),
    "ratio": ("recompute",),
    "swap": ("offload",),
    "mutwo": ("recompute", "offload"),
}


# What a plan may use when nobody says.
DEFAULTS = {"cpu": ("recompute",), "cuda": ("recompute",)}
# What is tried as well when no plan holds the budget and nobody says: it changes no number. On a
# CPU the host is where the step itself is, so that moving saves nothing.
LAST_RESORT = {
    "cpu": ("step_in_backward",),
    "cuda": ("offload", "step_in_backward", "optimizer_offload"),
}


def techniques_for(
    strategy: str, allow: str | Sequence[str] | None, device_type: str
) -> tuple[str, ...]:
    """The techniques of a plan: allowed ones, or the usual ones and what the strategy needs."""
    needed = NEEDS.get(strategy, ())
    check_device(device_type)
    allowed = allowed_techniques(allow, DEFAULTS[device_type])
    if allow is None:
        return tuple(t for t in AVAILABLE if t in allowed or t in needed)
    for name in needed:
        if name not in allowed and allowed:
            raise UsageError(
                f"strategy {strategy!r} is made of {name}, which is not allowed",
                hint=f"add it: --allow +{name}",
            )
    return allowed


def last_resort(
    strategy: str, allow: str | Sequence[str] | None, device_type: str
) -> tuple[str, ...]:
    """The techniques to try when nothing else fits: none where somebody said what to use."""
    names = _names(allow or ())
    chosen = strategy != "optimal" or not all(n.startswith("+") for n in names)
    if chosen or (allow is not None and not names):
        return ()
    return tuple(t for t in LAST_RESORT[device_type] if f"+{t}" not in names)


def left_out(strategy: str, allow: str | Sequence[str] | None, device_type: str) -> dict[str, str]:
    """Why a plan may be without a technique although nothing was tried, by technique."""
    used = techniques_for(strategy, allow, device_type)
    later = last_resort(strategy, allow, device_type)
    useless = ("offload", *ON_HOST) if device_type == "cpu" else ()
    reasons = dict[str, str]()
    for name in AVAILABLE:
        add = f"add --allow +{name}"
        if name in used:
            reasons[name] = "allowed, but not needed: the plan is as fast without it"
        elif name in INT8_WEIGHTS and (name != INT8_WEIGHTS[0] or {*INT8_WEIGHTS} & {*used}):
            continue  # one of its forms says enough
        elif name in later:
            reasons[name] = f"tried where nothing holds without it; before: {add}"
        elif name in useless:
            reasons[name] = "not allowed, and of no use on a CPU"
        else:
            kind = "approximate, not allowed" if name in APPROXIMATE else "not allowed"
            reasons[name] = f"{kind}: {add}"
    return reasons


def check_device(device_type: str) -> None:
    """Refuse a kind of device that no step runs on."""
    if device_type not in DEFAULTS:
        raise UsageError(
            f"memfit does not know devices of type {device_type!r}",
            hint="it fits steps on cuda and cpu; without weights, `memfit estimate` says what a "
            "step takes",
        )


def allowed_techniques(
    allow: str | Sequence[str] | None, default: tuple[str, ...] = AVAILABLE
) -> tuple[str, ...]:
    """Return the techniques in `allow`; names that begin with + add to the default ones."""
    if allow is None:
        return default
    names = _names(allow)
    for name in names:
        if name.removeprefix("+") not in AVAILABLE:
            raise UsageError(
                f"unknown technique {name.removeprefix('+')!r}",
                hint=f"this version has: {', '.join(AVAILABLE)}",
            )
    plain = [n for n in names if not n.startswith("+")]
    added = [n.removeprefix("+") for n in names if n.startswith("+")]
    return tuple(dict.fromkeys([*(plain or default), *added])) if names else ()


def allowed_over(allow: str | Sequence[str], base: Sequence[str]) -> tuple[str, ...]:
    """What is allowed beside a starting point: names with + add to its own, others replace them."""
    names, own = _names(allow), {n.removeprefix("+") for n in base}
    if not base or not all(n.startswith("+") for n in names):
        return tuple(names)
    on_default = all(n.startswith("+") for n in base)
    new = [n for n in names if n.removeprefix("+") not in own]
    return (*base, *(n if on_default else n.removeprefix("+") for n in new))


def without(allow: str | Sequence[str] | None, name: str) -> str | Sequence[str] | None:
    """What is allowed, less one technique; what a + adds to stays the default."""
    names = _names(allow or ())
    left = [n for n in names if n.removeprefix("+") != name]
    return None if allow is None or (not left and f"+{name}" in names) else left


def _names(allow: str | Sequence[str]) -> list[str]:
    return [n.strip() for n in allow.split(",")] if isinstance(allow, str) else list(allow)


def forced_techniques(force: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The techniques to use although they change what is computed; UsageError for any other."""
    for name in force:
        if name != MICROBATCH:
            raise UsageError(
                f"{name} cannot be forced", hint=f"{MICROBATCH} can, where there is a batch norm"
            )
        if name not in allowed:
            raise UsageError(f"{name} is forced, but not allowed", hint=f"add --allow +{name}")
    return tuple(force)
