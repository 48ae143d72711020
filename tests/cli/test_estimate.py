"""`memfit estimate`: tables, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

from memfit.ir.cards import CARDS
from memfit.targets import resolve_target


def test_estimate_lists_every_card(memfit, tiny):
    result = memfit("estimate", *without_device(tiny))
    assert result.exit_code == 0, result.stderr
    assert all(card.name in result.stdout for card in CARDS)
    for word in ("peak of the eager step", "bytes per parameter", "layers.0 .. 1 (2)", "as it is"):
        assert word in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next, on the card: memfit plan encoder")


def test_estimate_for_one_card_as_json(memfit, tiny):
    result = memfit("estimate", *without_device(tiny), "--gpu", "rtx4090", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["schema_version"], data["fits"]) == (2, True)
    (card,) = data["cards"]
    assert (card["name"], card["way"], card["fits"]) == ("RTX 4090", "plain", True)
    assert sum(data["categories"].values()) == data["peak_bytes"]


def test_a_targets_adam_was_not_fused_by_the_command(memfit):
    """Its peak was that of an optimizer's step which the target does not have on CUDA."""
    from memfit.estimating.estimate import estimate

    fields = {"n_layer": "4", "n_embd": "64", "n_head": "2", "n_ff": "256", "vocab_size": "100"}
    options = {"batch": 1, "seq": 8, "optimizer": "adamw"}
    words = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    printed = json.loads(memfit("estimate", "encoder", *words, "--json").stdout)
    made = estimate("encoder", overrides=fields, **options)
    unfused = estimate(lambda: resolve_target("encoder", overrides=fields, **options))
    assert unfused.where == "optimizer" and unfused.peak_bytes > made.peak_bytes
    assert printed["peak_bytes"] == made.peak_bytes
    assert printed["needs"] == vars(made.needs)
    assert printed["where"] == made.where
    assert [card["way"] for card in printed["cards"]] == [card.way for card in made.cards]


def test_the_adam_of_a_file_is_its_own(memfit, workload_file):
    target = workload_file(
        model="torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))",
        batch="torch.ones(2, 512)",
    )
    path = Path(target.rpartition(":")[0])
    path.write_text(path.read_text().replace("SGD", "AdamW"))
    data = json.loads(memfit("estimate", target, "--json").stdout)
    assert data["where"] == "optimizer"
    between = int(1.05 * data["needs"]["step_in_backward_bytes"])
    assert between < data["needs"]["recompute_bytes"]
    shown = memfit("estimate", target, "--budget", between).stdout
    assert "perhaps: recompute, step in backward" in shown
    assert shown.splitlines()[-1].endswith("--allow +step_in_backward")


def test_a_report_says_that_it_is_of_the_eager_step(memfit, tiny):
    shown = memfit("estimate", *without_device(tiny)).stdout
    assert "peak of the eager step" in shown
    words = " ".join(shown.split())
    assert "what compiled code takes is not estimated" in words
    assert "gpt2-large@8x1024 bf16 56% of 46238 MB" in words
    data = json.loads(memfit("estimate", *without_device(tiny), "--json").stdout)
    assert data["step"] == "eager"
    assert any("compiled code" in note for note in data["notes"])


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
