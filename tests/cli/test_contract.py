"""What scripts rely on: names of verbs and options, streams, a light start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

from memfit.cli.app import app

SRC = Path(__file__).resolve().parents[2] / "src"
TARGET = "target --batch --seq --dtype --optimizer --device --set --json --verbose -v"
HOW = (
    "--strategy --interval --segments --allow --force --host-budget --accumulate --executor "
    "--min-tensor-bytes --preset --config --explain"
)
GOAL = "--budget --utilization --activation-reduction --max-slowdown"
VERBS = {
    "fit": f"{TARGET} {GOAL} {HOW} --cuda-graphs --references --plan --steps --output -o",
    "plan": f"{TARGET} {GOAL} {HOW} --sweep --all --decisions --output -o",
    "profile": f"{TARGET} --segments --executor --accumulate --all --output -o --plots "
    "--components --steps",
    "batch-size": f"{TARGET} --budget --utilization --allow --executor --with-plan --max-size "
    "--steps",
    "bench": f"{TARGET.replace('target', 'targets')} --suite --workloads --systems --budgets "
    "--batch-sizes --largest-in --only --allow --executor --steps --timeout --time-limit "
    "--compile-ahead --at-once --cap --retry --against --tolerance --output -o --no-charts "
    "--render --list",
    "estimate": f"{TARGET.replace(' --device', '')} --gpu --budget",
    "resources": f"{TARGET} --budget --utilization --samples --epochs --allow --host-budget "
    "--executor --accumulate --steps --output -o",
    "report": f"{TARGET} {GOAL} {HOW.replace(' --explain', '')} --profile --plan --result --trace "
    "--flame --plots --curve --no-curve --points --steps --output -o",
    "doctor": "--json --verbose -v",
    "init": "file --preset --json --verbose -v",
}


def test_verbs_and_options_are_those_that_were_promised():
    commands = typer.main.get_command(app).commands
    found = {verb: {n for p in c.params for n in p.opts} for verb, c in commands.items()}
    assert found == {verb: set(names.split()) for verb, names in VERBS.items()}


def test_executors_are_those_of_the_library():
    from memfit.api import EXECUTORS as LIBRARY
    from memfit.cli.goal import EXECUTORS

    assert EXECUTORS == ("auto", *LIBRARY)


def test_help_names_every_strategy_and_technique(memfit):
    from memfit.planning.strategies import STRATEGIES
    from memfit.planning.techniques import AVAILABLE

    for verb in ("fit", "plan"):
        shown = memfit(verb, "--help").stdout
        assert all(name in shown for name in (*STRATEGIES, *AVAILABLE))


def start(*words: str, **options: object) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(SRC)}
    command = [sys.executable, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    return subprocess.Popen(command, **pipes | options)


def test_help_does_not_load_torch():
    program = "import sys; from memfit.cli.app import app; assert 'torch' not in sys.modules"
    process = start("-c", program)
    assert process.communicate()[1] == ""
    assert process.returncode == 0


def test_python_m_memfit_and_version():
    import memfit

    process = start("-m", "memfit", "--version")
    assert process.communicate() == (f"memfit {memfit.__version__}\n", "")
    assert process.returncode == 0


def test_main_is_the_entry_point():
    process = start("-c", "from memfit.cli import main; main()")
    out, err = process.communicate()
    assert "Usage: memfit" in out + err


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    process = start("-m", "memfit", "init", str(tmp_path / "mine.py"))
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
    process.stderr.close()
    assert (tmp_path / "mine.py").exists()


def test_a_whole_fit_in_a_process_of_its_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch, memfit\n"
        "def workload():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    loss = lambda model, batch: model(batch).mean()\n"
        "    return memfit.Workload(model, loss, optimizer, torch.ones(2, 4))\n"
    )
    words = ("-m", "memfit", "fit", "mine.py:workload", "--budget", "1MiB", "--steps", "1")
    process = start(*words, cwd=tmp_path)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "\x1b" not in out
    assert "numbers identical" in out.splitlines()[-1]
