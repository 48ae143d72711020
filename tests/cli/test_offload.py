"""Memory that goes to the host, as the commands show it."""

from __future__ import annotations

import csv
import json

import pytest

from memfit.cli.goal import GoalOptions
from memfit.ir.profile import CopyRates

FAST = CopyRates(1e11, 1e11, 1e-8, drag=1.0)
SLOW = CopyRates(1e6, 1e6, 1e-8, drag=1.0)
SWAP = ("--strategy", "swap")


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch):
    """Copies as fast as the test says, whatever this machine does."""

    def put(rates: CopyRates) -> None:
        monkeypatch.setattr("memfit.capture.profile.swap_rates", lambda device: rates)

    put(FAST)
    return put


def text(result) -> str:
    return " ".join(result.stdout.split())


def test_a_fit_shows_what_it_copied(memfit, tiny):
    result = memfit("fit", *tiny, *SWAP, "--host-budget", "1GiB", "--steps", "1")
    assert result.exit_code == 0, result.stderr
    shown = text(result)
    for word in ("offloaded, ", " to the host at ", " back at ", " host memory used", "% hidden"):
        assert word in shown
    assert "all waited for (a CPU copies or computes)" in shown
    last = result.stdout.splitlines()[-1]
    assert "numbers identical" in last
    assert last.endswith("--sweep --allow +offload --host-budget 1GiB")


def test_fit_json_has_the_copies(memfit, tiny):
    result = memfit("fit", *tiny, *SWAP, "--steps", "2", "--json")
    data = json.loads(result.stdout)
    swap = data["swap"]
    assert swap["moves"] == swap["retrievals"] > 0
    assert swap["out"]["bytes"] == swap["back"]["bytes"] > 0
    assert {"out_gb_per_s", "in_gb_per_s", "stalled_s", "hidden_share"} <= swap.keys()
    moved = data["decisions"]["offloaded_bytes"]
    assert swap["out"]["bytes"] / swap["steps"] == pytest.approx(moved, rel=0.02)
    assert data["decisions"]["techniques"] == ["offload"]


def test_decisions_say_swap_as_often_as_the_report(memfit, tiny, tmp_path):
    path = tmp_path / "decisions.csv"
    result = memfit("plan", *tiny, *SWAP, "--decisions", path)
    assert result.exit_code == 0, result.stderr
    words = [row["decision"] for row in csv.DictReader(path.open())]
    assert set(words) == {"RETAINED", "SWAP"}
    assert f"{words.count('SWAP')} tensors, " in text(result)
    assert "offload: sends " in text(result)
    assert result.stdout.splitlines()[-1].endswith("--strategy swap")


def test_offload_is_off_on_the_cpu_until_it_is_allowed(memfit, tiny):
    data = json.loads(memfit("plan", *tiny, "--budget", "90%", "--json").stdout)
    assert data["techniques"] == ["recompute"]
    allowed = memfit("plan", *tiny, "--budget", "90%", "--allow", "offload", "--json")
    data = json.loads(allowed.stdout)
    assert data["techniques"] == ["offload"] and data["predicted"]["copy_s"] > 0


def test_a_plan_that_may_move_and_does_not_says_why(memfit, tiny, rates):
    rates(SLOW)
    words = ("--budget", "90%", "--allow", "+offload")
    assert "recomputing is cheaper here" in text(memfit("plan", *tiny, *words))
    assert "to the host" not in text(memfit("plan", *tiny, "--budget", "90%"))
    fitted = memfit("fit", *tiny, *words, "--steps", "1")
    assert "recomputing is cheaper here" in text(fitted)


def test_choices_and_sweeps_use_what_the_fit_would(memfit, tiny):
    words = ("--allow", "offload", "--host-budget", "1GiB")
    choices = memfit("fit", *tiny, *words)
    assert choices.exit_code == 0, choices.stderr
    assert "to host" in choices.stdout
    assert choices.stdout.splitlines()[-1].endswith(" ".join(words))
    data = json.loads(memfit("fit", *tiny, *words, "--json").stdout)
    assert all(choice["offloaded_bytes"] > 0 for choice in data["choices"])
    swept = memfit("plan", *tiny, "--sweep", *words)
    assert "to host" in swept.stdout and "0 of 6" in swept.stdout
    assert swept.stdout.splitlines()[-1].endswith(" ".join(words))


def test_a_smaller_host_budget_makes_the_smallest_budget_larger(memfit, tiny):
    minimum = {}
    for host in ("0", "1GiB"):
        words = ("--sweep", "--allow", "offload", "--host-budget", host, "--json")
        minimum[host] = json.loads(memfit("plan", *tiny, *words).stdout)["minimum_feasible_bytes"]
    assert minimum["0"] > minimum["1GiB"]


def test_strategies_that_move_are_compared_with_those_that_do_not(memfit, tiny):
    words = ("--sweep", "--strategy", "all,swap", "--host-budget", "1GiB")
    result = memfit("plan", *tiny, *words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith("--allow +offload --host-budget 1GiB")


@pytest.mark.parametrize("verb", ["fit", "plan"])
def test_a_host_budget_that_means_nothing_is_refused_before_anything_is_built(memfit, verb):
    words = ("--budget", "1GiB", "--host-budget", "lots")
    result = memfit(verb, "transformers:llama-8b", *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: 'lots' is not a number of bytes\nhint: ")


@pytest.mark.parametrize("words", [("fit", "--budget", "90%"), ("fit",), ("plan", "--sweep")])
def test_a_host_budget_that_nothing_may_use_is_refused_before_the_step_is_measured(
    memfit, tiny, monkeypatch, words
):
    monkeypatch.delattr("memfit.api.profile")
    result = memfit(words[0], *tiny, *words[1:], "--host-budget", "1GiB")
    assert result.exit_code == 2 and result.stdout == ""
    assert "nothing may be moved to the host\nhint: allow it: --allow +offload" in result.stderr


def test_a_strategy_without_its_technique_is_refused(memfit, tiny):
    result = memfit("plan", *tiny, *SWAP, "--allow", "recompute")
    assert result.exit_code == 2
    assert "strategy 'swap' is made of offload, which is not allowed" in result.stderr


def test_a_host_budget_that_is_too_small_is_a_no_with_the_one_that_works(memfit, tiny):
    result = memfit("fit", *tiny, *SWAP, "--host-budget", "1KiB", "--steps", "1")
    assert result.exit_code == 1
    assert "and the host budget is 1.00 KiB" in result.stderr
    enough = result.stderr.partition("hint: give --host-budget ")[2].partition(",")[0]
    result = memfit("fit", *tiny, *SWAP, "--host-budget", enough, "--steps", "1")
    assert result.exit_code == 0, result.stderr


def test_host_memory_that_cannot_be_had_ends_with_its_own_code(memfit, tiny, monkeypatch):
    monkeypatch.setattr("memfit.runtime.swap.arena.free_host_bytes", lambda: 1000)
    monkeypatch.setattr("memfit.runtime.swap.attach._arenas", {})
    result = memfit("fit", *tiny, *SWAP, "--steps", "1")
    assert result.exit_code == 4 and result.stdout == ""
    assert result.stderr.startswith("error: cannot allocate ")
    assert "of host memory for swapping, 1000 B are free" in result.stderr
    assert "\nhint: give swapping less host memory (host_budget, --host-budget)" in result.stderr


def test_a_saved_plan_that_moves_is_run(memfit, tiny, tmp_path):
    path = tmp_path / "plan.json"
    assert memfit("plan", *tiny, *SWAP, "-o", path).exit_code == 0
    result = memfit("fit", *tiny, "--plan", path, "--steps", "1", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["swap"]["moves"] > 0


def test_mutwo_makes_a_plan(memfit, tiny):
    result = memfit("plan", *tiny, "--strategy", "mutwo", "--budget", "90%", "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["predicted"]["peak_bytes"] <= plan["budget_bytes"]
    assert plan["techniques"]


def test_words_of_the_next_command():
    goal = GoalOptions(None, None, None, None, "mutwo", None, [], [], host_budget="2GiB")
    assert goal.plan_options()["host_budget"] == 2 * 2**30
    assert goal.words() == ["--strategy", "mutwo", "--host-budget", "2GiB"]
    assert goal.setup_words() == ["--allow", "+offload", "--host-budget", "2GiB"]
    one = goal.for_strategy("all", "cpu")
    assert (one.strategy, one.host_budget) == ("all", None)
    assert goal.for_strategy("all", "cuda").host_budget is None
    assert goal.for_strategy("swap", "cuda").host_budget == "2GiB"
