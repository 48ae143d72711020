"""From the words of `memfit bench` to its cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from memfit.cli.goal import check_executor
from memfit.cli.target import Target
from memfit.errors import UsageError

if TYPE_CHECKING:
    from memfit.bench.cell import CellSpec
    from memfit.bench.suite import Settings
    from memfit.bench.workloads import Suite
    from memfit.ir.bench import WorkloadSpec


@dataclass(frozen=True)
class BenchOptions:
    """What was asked for, as it was given; `target` has the options of all targets."""

    target: Target
    targets: Sequence[str]
    suite: str | None
    workloads: Sequence[str]
    systems: Sequence[str]
    budgets: Sequence[str]
    batch_sizes: str | None
    largest_in: str | None
    only: Sequence[str]
    allow: Sequence[str]
    executor: str | None
    steps: int
    timeout_s: float
    cap: str | None
    retry: bool
    compile_ahead: int | None
    at_once: int

    def settings(self) -> Settings:
        """What all cells share."""
        from memfit.bench.machine import device_type
        from memfit.bench.suite import Settings
        from memfit.planning.budget import budget_bytes

        cap = None if self.cap is None else budget_bytes(self.cap)
        if cap is not None and device_type(self.target.device) != "cuda":
            raise UsageError(
                "--cap limits the allocator of a GPU, and the cells run on the CPU",
                hint="leave it out, or add --device cuda",
            )
        return Settings(self.steps, self.timeout_s, cap, self.retry)

    def cells(self) -> list[CellSpec]:
        """Every cell, checked; UsageError for words that mean nothing here."""
        from memfit.bench.suite import plan_cells

        settings, suite = self.settings(), self._suite()
        check_executor(self.executor)
        workloads = self._workloads(suite)
        systems = self._systems(suite)
        more = [f"largest-batch:{self.largest_in}{self._how()}"] if self.largest_in else []
        other = self.systems or self.budgets or self.allow or self.executor
        also = {} if other else suite.also
        found = plan_cells(workloads, [*systems, *more], settings, self.only, also)
        first = {w.series: w.name for w in reversed(workloads)}
        # A search over batch sizes is the same for all workloads of a series.
        chosen = [
            cell
            for cell in found
            if not cell.system.startswith("largest-batch")
            or cell.workload.name == first[cell.workload.series]
        ]
        if not chosen:
            raise UsageError(
                "nothing to run: the largest batch is looked for once in a series",
                hint=f"with its first workload: {', '.join(first.values())}",
            )
        return chosen

    def _suite(self) -> Suite:
        from memfit.bench.systems.catalogue import PEERS, SWEPT
        from memfit.bench.workloads import ENCODER, RESNET152, Suite, named, parse_sizes, suite_of
        from memfit.bench.workloads import sized as at_sizes
        from memfit.ir.bench import WorkloadSpec

        if self.suite is not None and self.targets:
            raise UsageError(
                "--suite names workloads, and so do targets", hint="give one of the two"
            )
        if self.batch_sizes is not None and (self.suite is not None or self.target.batch):
            raise UsageError(
                "--batch-sizes sets the batch, and so does "
                + ("--suite" if self.suite is not None else "--batch"),
                hint="give one of the two",
            )
        sizes = None if self.batch_sizes is None else parse_sizes(self.batch_sizes)
        if not self.targets and sizes is None:
            given = {
                "--batch": self.target.batch,
                "--seq": self.target.seq,
                "--dtype": self.target.dtype,
                "--optimizer": self.target.optimizer,
                "--set": self.target.fields or None,
            }
            extra = [option for option, value in given.items() if value is not None]
            if extra:
                raise UsageError(
                    f"{', '.join(extra)} are for targets, and the suite has its own",
                    hint="name a TARGET, or leave them out",
                )
            found = suite_of(self.suite or "peers")
            return replace(found, workloads=tuple(map(self._on_device, found.workloads)))
        specs: list[WorkloadSpec] = [
            named(
                WorkloadSpec(
                    "",
                    target,
                    self.target.batch,
                    self.target.seq,
                    self.target.dtype,
                    self.target.optimizer,
                    fields=tuple(self.target.fields),
                )
            )
            for target in self.targets
        ] or [RESNET152, ENCODER]
        specs = [self._on_device(spec) for spec in dict.fromkeys(specs)]
        if sizes is None:
            return Suite(tuple(specs), PEERS, ("80%", "60%", "40%"))
        swept = tuple(w for spec in specs for w in at_sizes(spec, sizes))
        return Suite(swept, SWEPT, ("65%",))

    def _on_device(self, spec: WorkloadSpec) -> WorkloadSpec:
        from memfit.bench.machine import device_type
        from memfit.targets import is_file_target

        if is_file_target(spec.target) and self.target.device is None:
            return spec  # a file may choose by itself
        return replace(spec, device=self.target.device or device_type(None))

    def _workloads(self, suite: Suite) -> tuple[WorkloadSpec, ...]:
        patterns = [name.strip() for text in self.workloads for name in text.split(",")]
        names = [w.name for w in suite.workloads]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"no workload is called {pattern!r}", hint=f"there are {', '.join(names)}"
                )
        return tuple(
            w
            for w in suite.workloads
            if not patterns or any(fnmatchcase(w.name, pattern) for pattern in patterns)
        )

    def _systems(self, suite: Suite) -> list[str]:
        from memfit.bench.systems.catalogue import memfit_name

        def words(texts: Sequence[str]) -> list[str]:
            return [word.strip() for text in texts for word in text.split(",") if word.strip()]

        names, allow = words(self.systems), self._allowed()
        for option, given in (("--systems", self.systems), ("--budgets", self.budgets)):
            if given and not words(given):
                raise UsageError(f"{option} names nothing", hint=f"leave {option} out, or fill it")
        budgets = words(self.budgets) or list(suite.budgets)
        planned = [memfit_name(budget, allow, self._executor) for budget in budgets]
        if not names:
            return [*(self._with_options(name) for name in suite.systems), *planned]
        found: list[str] = []
        for name in names:
            found += planned if name == "memfit" else [self._with_options(name)]
        return [*found, *(planned if self.budgets and "memfit" not in names else [])]

    def _with_options(self, system: str) -> str:
        """A system of memfit's own, unless it says by itself how to plan, as the options say."""
        own = system.startswith(("memfit", "largest-batch")) and " " not in system
        return f"{system}{self._how()}" if own else system

    def _how(self) -> str:
        allow = self._allowed()
        words = [*([f"allow={allow}"] if allow else [])]
        words += [f"executor={self._executor}"] if self._executor else []
        return "".join(f" {word}" for word in words)

    @property
    def _executor(self) -> str | None:
        """As asked; over batch sizes else `module`: it runs the eager step's own operators.

        What is asked there is what recomputing costs the eager step, and each size would have to be
        compiled by itself.
        """
        swept = self.suite == "sweep" or self.batch_sizes is not None
        return self.executor or ("module" if swept else None)

    def _allowed(self) -> str | None:
        """The techniques as one word without commas, which part systems."""
        from memfit.planning.techniques import allowed_techniques

        names = [n.strip() for text in self.allow for n in text.split(",") if n.strip()]
        allowed_techniques(names or None)
        added = [n for n in names if n.startswith("+")]
        if added and len(added) < len(names):
            raise UsageError(
                f"--allow {','.join(names)} mixes names with and without a +",
                hint="+NAME adds to the default; names without it are all there is",
            )
        return ("".join(added) or "+".join(names)) or None
