"""Options common to all targets: a wrong one is refused with a hint."""

from typing import Any

import pytest
import torch

from memfit.errors import UsageError
from memfit.targets.options import check_device, check_options, suggest


def check(**given: Any) -> Any:
    names = ("batch", "seq", "dtype", "optimizer", "device", "overrides")
    return check_options(seed=0, **({name: None for name in names} | given))


def test_defaults_and_given() -> None:
    options = check(batch=4, device="cpu")
    assert (options.dtype, options.device, options.overrides) == ("fp32", torch.device("cpu"), {})
    assert options.given == {"batch", "device"}


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"batch": 0}, "batch is 0", "--batch 1"),
        ({"seq": -3}, "seq is -3", "--seq 1"),
        ({"batch": True}, "not a whole number", "--batch 8"),
        ({"batch": 2.5}, "not a whole number", "--batch 8"),
        ({"dtype": "bf61"}, "unknown dtype 'bf61'", "did you mean bf16"),
        ({"dtype": "int8"}, "unknown dtype", "known are fp32, bf16, fp16"),
        ({"optimizer": "adamv"}, "unknown optimizer", "did you mean adam or adamw?"),
        ({"device": "foo"}, "unknown device 'foo'", "cpu, cuda"),
        ({"device": "xpu"}, "does not train on 'xpu'", "cpu, cuda"),
        ({"device": "meta", "dtype": "bf16"}, "meta device", "--dtype fp32"),
    ],
)
def test_wrong_option_is_refused(given: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check(**given)
    assert hint in caught.value.hint


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="'cuda' was asked for, but") as caught:
        check_device("cuda")
    assert "--device cpu" in caught.value.hint


def test_cuda_index_past_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="torch sees 2 CUDA") as caught:
        check_device("cuda:2")
    assert caught.value.hint == "the last one is cuda:1"


def test_suggest_ignores_case_and_prints_each_name_once() -> None:
    assert suggest("GPT2", ["gpt2", "bert"]) == "did you mean gpt2? "
    printed = {"gpt2": "transformers:gpt2", "gpt-2": "transformers:gpt2"}
    assert suggest("gpt", printed, printed=printed) == "did you mean transformers:gpt2? "
    assert suggest("zzz", ["gpt2"]) == ""
