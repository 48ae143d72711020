"""The rules of the source tree: one-way imports, a quiet import, short files, no machine paths."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "memfit"
MAX_LINES = 500

# What each module or folder directly under src/memfit may import from the rest of memfit.
# A new one gets its own row; the table must stay free of cycles.
BASE = {"units", "errors"}
STAGES = {
    "ir",
    "planning",
    "report",
    "workload",
    "targets",
    "measure",
    "runtime",
    "capture",
    "verify",
    "estimating",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "ir": BASE,
    "planning": BASE | {"ir"},
    "report": BASE | {"ir"},
    "workload": BASE,
    "targets": BASE | {"workload"},
    "measure": BASE | {"ir", "workload"},
    "runtime": BASE | {"ir", "workload", "measure"},
    "capture": BASE | {"ir", "workload", "measure", "runtime"},
    "verify": BASE | {"ir", "workload", "measure", "runtime"},
    "estimating": BASE | {"ir", "workload", "targets", "measure", "runtime", "capture"},
    "fitted": BASE | {"ir", "workload", "measure", "runtime"},
    "observe": BASE | {"ir", "workload", "measure", "runtime", "capture", "report", "fitted"},
    "config": BASE | {"planning"},
    "starting": BASE | {"ir", "workload", "measure", "config"},
    "ways": BASE | {"ir", "workload", "planning", "runtime"},
    "whole_step": BASE | {"ir", "workload", "planning", "runtime", "verify", "ways"},
    "holding": BASE | {"ir", "workload", "capture", "planning", "runtime", "verify"},
    "attempts": BASE | {"ir", "workload", "planning", "runtime", "whole_step", "holding"},
    "proof": BASE | {"ir", "workload", "holding", "planning", "runtime", "verify"},
    "api": BASE
    | STAGES
    | {"config", "starting", "fitted", "whole_step", "holding", "attempts", "proof"},
    "__init__": BASE | STAGES | {"api", "observe", "train"},
    "train": BASE | {"ir", "workload", "measure", "planning", "runtime", "api"},
    "bench": BASE | STAGES | {"fitted", "api", "train", "__init__"},
    "cli": BASE | STAGES | {"config", "fitted", "observe", "api", "train", "bench", "__init__"},
    "__main__": {"cli"},
}
# These hold plain data and arithmetic, so that a plan is tested in milliseconds, from JSON.
TORCH_FREE = {"errors", "units", "ir", "planning", "report"}
TORCH_LIBRARIES = {"torch", "torchvision", "transformers", "timm"}


class Import(NamedTuple):
    path: Path
    line: int
    name: str  # dotted, absolute

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.name}"


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def component_of(path: Path) -> str:
    """The row of ALLOWED a file belongs to: its folder or module directly under src/memfit."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path, source: str | None = None) -> Iterator[Import]:
    """Every import of a file, at any depth, relative ones made absolute."""
    tree = ast.parse(path.read_text(encoding="utf-8") if source is None else source, str(path))
    package = path.relative_to(SRC).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            for alias in node.names:
                yield Import(path, node.lineno, f"{module}.{alias.name}")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else None
            function = node.func.id if isinstance(node.func, ast.Name) else function
            if function in ("import_module", "__import__"):
                yield Import(path, node.lineno, str(node.args[0].value))


def imported_component(name: str) -> str | None:
    """The row of ALLOWED that an imported name belongs to, or None outside memfit."""
    top, _, rest = name.partition(".")
    if top != "memfit":
        return None
    child = rest.partition(".")[0]
    is_module = (PACKAGE / child).is_dir() or (PACKAGE / f"{child}.py").is_file()
    return child if child and is_module else "__init__"


def layering_errors(found: Import) -> Iterator[str]:
    importer, imported = component_of(found.path), imported_component(found.name)
    if importer in TORCH_FREE and found.name.partition(".")[0] in TORCH_LIBRARIES:
        yield f"{found}: {importer} never imports torch or a library built on it"
    if imported is None or imported == importer or importer not in ALLOWED:
        return
    if imported not in ALLOWED[importer]:
        allowed = ", ".join(sorted(ALLOWED[importer])) or "nothing"
        yield f"{found}: {importer} may import {allowed}, not {imported}"


def test_every_module_is_in_the_layering_table() -> None:
    components = {component_of(path) for path in source_files()}
    missing = sorted(components - ALLOWED.keys())
    assert not missing, (
        f"not in the layering table: {missing}. hint: say what each may import by adding a row to "
        f"ALLOWED in {Path(__file__).relative_to(ROOT)}, and to the table in CONTRIBUTING.md"
    )


def test_layering_table_has_no_cycle_and_no_unknown_name() -> None:
    assert set().union(*ALLOWED.values()) <= ALLOWED.keys()
    list(TopologicalSorter(ALLOWED).static_order())  # raises CycleError


def test_imports_point_one_way() -> None:
    errors = [e for path in source_files() for i in imports_of(path) for e in layering_errors(i)]
    assert not errors, "\n" + "\n".join(errors)


def test_layering_check_finds_every_form_of_import() -> None:
    source = """
import torch.nn
from memfit.runtime import apply
from ..cli import main
from .. import fit
from . import sibling
from .sibling import thing
def late():
    from torch import Tensor
    importlib.import_module("torch")
"""
    path = PACKAGE / "ir" / "example.py"
    found = list(imports_of(path, source))
    assert [i.name for i in found if i.name.startswith("memfit.ir")] == [
        "memfit.ir.sibling",
        "memfit.ir.sibling.thing",
    ]
    wrong_lines = {i.line for i in found if list(layering_errors(i))}
    assert wrong_lines == {2, 3, 4, 5, 9, 10}


def test_import_memfit_is_quiet() -> None:
    """Importing loads no model library, compiler or CUDA, adds no logging handler, and prints
    nothing."""
    program = """
import logging, sys
before = list(logging.getLogger().handlers)
import memfit
import memfit.api
import torch
assert "torch._dynamo" not in sys.modules, "import memfit.api loads torch's compiler: a second"
loaded = {"transformers", "torchvision", "timm"} & set(sys.modules)
assert not loaded, f"import memfit loads {sorted(loaded)}"
assert not torch.cuda.is_initialized(), "import memfit initialises CUDA"
assert logging.getLogger().handlers == before, "import memfit adds a root logging handler"
ours = [n for n in logging.root.manager.loggerDict if n.partition(".")[0] == "memfit"]
loud = [n for n in ours if logging.getLogger(n).handlers]
assert not loud, f"import memfit adds logging handlers to {loud}"
"""
    env = os.environ | {"PYTHONPATH": str(SRC)}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""


def test_source_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()}
    long = {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MAX_LINES}
    assert not long, f"past {MAX_LINES} lines, split by idea: {long}"


def project_files() -> list[Path]:
    """The files git tracks; outside a git checkout, those of the project's own folders."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0:
        paths = [ROOT / name for name in git.stdout.split("\0") if name]
    else:
        folders = ("src", "tests", "docs", "examples", "benchmarks", ".ci")
        paths = [p for folder in folders for p in (ROOT / folder).rglob("*")]
        paths += ROOT.glob("*")
    return [p for p in paths if p.is_file()]


def test_project_files_name_no_machine_path() -> None:
    machine_path = re.compile(rb"(?<![\w.-])/(?:home|root|work)/|/tmp/bash")
    found = []
    for path in project_files():
        content = path.read_bytes()
        if path == Path(__file__).resolve() or b"\0" in content:
            continue
        for number, line in enumerate(content.splitlines(), start=1):
            if machine_path.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.decode(errors='replace')}")
    assert not found, "paths of one machine in project files:\n" + "\n".join(found)
