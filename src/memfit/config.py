"""Named starting points for a fit, and files that keep one: typed, checked, TOML or JSON.

A preset says how far a fit may go, a recipe what a model of a size needs on a card of a size.
What is given beside one goes before it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit.planning.budget import check_budget_text
from memfit.planning.make_plan import Goal
from memfit.planning.techniques import (
    allowed_over,
    allowed_techniques,
    forced_techniques,
    techniques_for,
)
from memfit.units import parse_bytes

EXECUTORS = ("auto", "graph", "inductor", "module")
DTYPES = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Config:
    """What a fit is asked for; None and () leave a choice as usual."""

    budget: str | int | None = None
    utilization: float | None = None
    activation_reduction: float | None = None
    max_slowdown: float | None = None
    strategy: str | None = None
    interval: int | None = None
    segments: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    host_budget: str | int | None = None
    executor: str | None = None
    min_tensor_bytes: str | int | None = None
    accumulate: int | None = None
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str | None = None

    def __post_init__(self) -> None:
        _check(self)

    def over(self, base: Config) -> Config:
        """This one, with what it leaves open taken from `base`; "+name" adds to its techniques."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        if {*_GOALS} & given.keys():  # they exclude each other
            base = replace(base, budget=None, utilization=None, activation_reduction=None)
        if self.strategy is not None:
            base = base.for_strategy(self.strategy)
        if self.allow:
            given["allow"] = allowed_over(self.allow, base.allow)
        return replace(base, **given)

    def for_strategy(self, strategy: str) -> Config:
        """This one beside a strategy that is given: its own goes, and an interval for another."""
        interval = self.interval if strategy == "interval" else None
        return replace(self, strategy=None, interval=interval)

    def to_toml(self) -> str:
        """The fields that are set, as TOML."""
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self._set().items())

    def to_json(self) -> dict[str, Any]:
        """The fields that are set."""
        return self._set()

    def save(self, path: Path, *, new: bool = False) -> None:
        """Write it as TOML, or as JSON where the name ends so; a `new` file must not be there."""
        text = json.dumps(self._set(), indent=2) + "\n" if _is_json(path) else self.to_toml()
        try:
            with path.open("x" if new else "w", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            raise UsageError(
                f"{str(path)!r} exists already and is left as it is", hint="choose another name"
            ) from error
        except OSError as error:
            raise UsageError(
                f"{str(path)!r} cannot be written: {error.strerror}",
                hint="choose a place that exists and is yours to write to",
            ) from error

    def _set(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _FIELDS}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value not in (None, ())
        }


_FIELDS = tuple(field.name for field in fields(Config))
_GOALS = ("budget", "utilization", "activation_reduction")
_NUMBERS = ("utilization", "activation_reduction", "max_slowdown")
_COUNTS = ("interval", "accumulate", "batch", "seq")
_LISTS = {"allow": '"recompute"', "force": '"microbatch"', "segments": '"layers.*"'}


def named(name: str) -> Config:
    """The preset or recipe of this name."""
    known = PRESETS | RECIPES
    if name in UNREACHED:
        raise UsageError(
            f"{name} cannot be had: {UNREACHED[name]}",
            hint="a smaller model; memfit estimate says what one needs",
        )
    if name not in known:
        raise UsageError(f"unknown preset {name!r}", hint=f"one of: {', '.join(known)}")
    return known[name]


def starting_point(
    preset: str | None,
    config: Config | str | Path | None,
    *,
    strategy: str | None = None,
    allow: str | Sequence[str] | None = None,
) -> Config:
    """What a preset and a configuration, or the file of one, leave to start from.

    The configuration goes before the preset, and a `strategy` that is given before both; techniques
    that are given replace theirs, or are added where they begin with +.
    """
    base = load(Path(config)) if isinstance(config, str | Path) else config or Config()
    if not isinstance(base, Config):
        raise UsageError(
            f"config is a {type(base).__name__}",
            hint='a file such as "mine.toml" or a memfit.config.Config; names are for preset',
        )
    base = base if strategy is None else base.for_strategy(strategy)
    names = allow.split(",") if isinstance(allow, str) else allow or ()
    base = Config(allow=tuple(name.strip() for name in names)).over(base)
    return base if preset is None else base.over(named(preset))


def load(path: Path) -> Config:
    """The configuration in a TOML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if _is_json(path) else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="a file of lines such as budget = '12GiB'"
        ) from error
    return from_data(data, str(path))


def from_data(data: Any, where: str = "the configuration") -> Config:
    """The configuration in a table of fields; unknown ones are refused."""
    if not isinstance(data, dict):
        raise UsageError(f"{where} holds no fields", hint="lines such as budget = '12GiB'")
    unknown = [name for name in data if name not in _FIELDS]
    if unknown:
        raise UsageError(
            f"{where} has an unknown field {unknown[0]!r}", hint=f"known: {', '.join(_FIELDS)}"
        )
    return Config(**data | {name: _listed(data[name]) for name in _LISTS if name in data})


def _listed(value: Any) -> Any:
    """The names in a list, or in a text with commas; anything else as it is."""
    value = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    return tuple(value) if isinstance(value, list) else value


def _is_json(path: Path) -> bool:
    return path.suffix == ".json"


def _check(config: Config) -> None:
    """Refuse values that mean nothing, before anything is measured."""
    goals = [name for name in _GOALS if getattr(config, name) is not None]
    if len(goals) > 1:
        raise UsageError(f"{' and '.join(goals)} exclude each other", hint="give one of them")
    if config.budget is not None:
        check_budget_text(config.budget)
    for name in _NUMBERS:
        value = getattr(config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UsageError(f"{name} is {value!r}", hint="a number, such as 1.2")
    if config.utilization is not None and not 0 < config.utilization <= 1:
        raise UsageError(f"utilization is {config.utilization}", hint="0.8 is 80 % of the device")
    for name in _COUNTS:
        value = getattr(config, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and value >= 1):
            raise UsageError(f"{name} is {value!r}", hint="a whole number, 1 or more")
    for name in ("host_budget", "min_tensor_bytes"):
        if getattr(config, name) is not None:
            parse_bytes(getattr(config, name))
    for name, known in (("executor", EXECUTORS), ("dtype", DTYPES), ("optimizer", OPTIMIZERS)):
        value = getattr(config, name)
        if value is not None and value not in known:
            raise UsageError(f"{name} is {value!r}", hint=f"one of: {', '.join(known)}")
    for name, such in _LISTS.items():
        value = getattr(config, name)
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise UsageError(f"{name} is {value!r}", hint=f"names in a list, such as [{such}]")
    allow, strategy = config.allow or None, config.strategy or "optimal"
    allowed_techniques(allow)
    forced_techniques(config.force, config.force)
    if config.interval is not None and config.strategy not in (None, "interval"):
        raise UsageError(
            f"interval is for strategy interval, not {strategy}", hint="leave one of them out"
        )
    Goal(
        strategy=strategy,
        max_slowdown=config.max_slowdown,
        activation_reduction=config.activation_reduction,
    )
    if not all(name.startswith("+") for name in config.allow):  # else it adds to something
        techniques_for(strategy, allow, "cpu")  # a strategy needs the same anywhere


PRESETS = {
    # Only what costs little: numbers bit for bit the same.
    "conservative": Config(allow=("recompute",), max_slowdown=1.10),
    # Whatever is exact, as long as the step takes at most a third longer.
    "balanced": Config(allow=("recompute", "offload", "step_in_backward"), max_slowdown=1.33),
    # The loss in tiles, too; a step may take twice as long.
    "aggressive": Config(
        allow=("recompute", "offload", "step_in_backward", "tiled_loss"), max_slowdown=2.0
    ),
    # State on the host as well, at any cost in time.
    "maximum": Config(
        allow=("recompute", "offload", "step_in_backward", "tiled_loss", "optimizer_offload")
    ),
}
_LANGUAGE = Config(dtype="bf16", optimizer="adamw")
RECIPES = {
    "124m-4gib": replace(_LANGUAGE, budget="4GiB", batch=8, seq=1024).over(PRESETS["aggressive"]),
    "1b-16gib": replace(_LANGUAGE, budget="16GiB", batch=1, seq=2048).over(PRESETS["maximum"]),
}
# Sizes whose parameters alone are larger than the card: nothing here can help them.
UNREACHED = {
    "7b-24gib": "the parameters alone, 27 GiB in fp32, are larger than the budget",
    "50b-24gib": "the parameters alone, 186 GiB in fp32, are larger than the budget",
}
