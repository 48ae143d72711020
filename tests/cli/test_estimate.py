"""`memfit estimate`: tables, JSON and exit codes."""

from __future__ import annotations

import json

from memfit.ir.cards import CARDS


def test_estimate_lists_every_card(memfit, tiny):
    result = memfit("estimate", *without_device(tiny))
    assert result.exit_code == 0, result.stderr
    assert all(card.name in result.stdout for card in CARDS)
    for word in ("peak of the step", "bytes per parameter", "layers.0 .. 1 (2)", "as it is"):
        assert word in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next, on the card: memfit plan encoder")


def test_estimate_for_one_card_as_json(memfit, tiny):
    result = memfit("estimate", *without_device(tiny), "--gpu", "rtx4090", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["schema_version"], data["fits"]) == (1, True)
    (card,) = data["cards"]
    assert (card["name"], card["way"], card["fits"]) == ("RTX 4090", "plain", True)
    assert sum(data["categories"].values()) == data["peak_bytes"]


def test_a_step_that_does_not_fit_is_exit_code_1(memfit, tiny):
    result = memfit("estimate", *without_device(tiny), "--budget", "1MiB")
    assert result.exit_code == 1
    assert "1.00 MiB" in result.stdout
    assert "headroom counts 3% more" in result.stdout


def test_the_next_command_allows_what_the_way_that_fits_takes(memfit, tiny):
    wide = [word.replace("vocab_size=200", "vocab_size=20000") for word in without_device(tiny)]
    needs = json.loads(memfit("estimate", *wide, "--json").stdout)["needs"]
    between = int(1.05 * needs["tiled_loss_bytes"])
    assert between < needs["recompute_bytes"]
    shown = memfit("estimate", *wide, "--budget", between)
    assert "perhaps: recompute, loss in tiles" in shown.stdout
    assert shown.stdout.splitlines()[-1].endswith("--allow +tiled_loss")
    shown = memfit("estimate", *wide, "--budget", int(1.04 * needs["recompute_bytes"]))
    assert "--allow" not in shown.stdout.splitlines()[-1]


def test_parameters_alone_too_large_are_no_matter_for_a_plan(memfit, tiny):
    result = memfit("estimate", *without_device(tiny), "--budget", "100KB")
    assert result.exit_code == 1
    assert "nothing memfit has now makes it fit" in result.stdout
    assert "memfit plan" not in result.stdout and "streamed" not in result.stdout
    assert result.stdout.splitlines()[-1].startswith("take a smaller model or a larger card")


def test_estimate_of_a_file(memfit, workload_file):
    result = memfit("estimate", workload_file(), "--gpu", "T4")
    assert result.exit_code == 0, result.stderr
    assert "Sequential with 25 parameters" in result.stdout


def test_wrong_words_are_refused(memfit, tiny):
    target = without_device(tiny)
    for words, message in (
        (["--gpu", "rtx9999"], "unknown card 'rtx9999'"),
        (["--gpu", "4090", "--budget", "1GiB"], "exclude each other"),
        (["--budget", "much"], "not a number of bytes"),
        (["--budget", "0"], "not a budget"),
    ):
        result = memfit("estimate", *target, *words)
        assert result.exit_code == 2
        assert message in result.stderr


def without_device(words: list[str]) -> list[str]:
    place = words.index("--device")
    return words[:place] + words[place + 2 :]
