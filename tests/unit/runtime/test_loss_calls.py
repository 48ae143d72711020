"""Losses as calls of a module beside the model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.runtime import loss_calls as calls
from memfit.runtime.calls import replaced_forward

PLAIN = F.cross_entropy
LABELS = torch.tensor([0, 1, 1])


def _logits() -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


class _Noted:
    """Takes note of the functions that a loss module is called with."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def __call__(self, forward: Any) -> Any:
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            self.functions.append(function)
            return forward(function, *args, **kwargs)

        return call


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def test_a_loss_goes_through_the_module_and_the_function_is_put_back(model: nn.Module) -> None:
    noted, logits = _Noted(), _logits()
    with replaced_forward(calls.loss_module(model), noted), calls.loss_calls(model):
        assert torch.equal(F.cross_entropy(logits, LABELS), PLAIN(logits, LABELS))
        assert torch.equal(
            nn.CrossEntropyLoss()(input=logits, target=LABELS), PLAIN(logits, LABELS)
        )
    assert noted.functions == [PLAIN, PLAIN]
    assert F.cross_entropy is PLAIN
    assert torch.equal(F.cross_entropy(logits, LABELS), PLAIN(logits, LABELS))
    assert len(noted.functions) == 2


def test_a_loss_without_a_gradient_is_left_alone(model: nn.Module) -> None:
    noted, logits = _Noted(), _logits()
    with replaced_forward(calls.loss_module(model), noted), calls.loss_calls(model):
        F.cross_entropy(logits.detach(), LABELS)
        with torch.no_grad():
            F.cross_entropy(logits, LABELS)
    assert noted.functions == []


def test_a_tensor_of_another_class_is_left_alone(model: nn.Module) -> None:
    class Other(torch.Tensor):
        pass

    noted = _Noted()
    with replaced_forward(calls.loss_module(model), noted), calls.loss_calls(model):
        F.cross_entropy(_logits().as_subclass(Other), LABELS)
    assert noted.functions == []


def test_a_loss_function_that_somebody_replaced_stays(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fancy(*args: Any) -> torch.Tensor:
        return torch.zeros(())

    monkeypatch.setattr(F, "cross_entropy", fancy)
    with calls.loss_calls(model):
        assert F.cross_entropy is fancy
    assert F.cross_entropy is fancy


def test_everything_is_put_back_when_a_loss_fails(model: nn.Module) -> None:
    with pytest.raises(IndexError), calls.loss_calls(model):
        F.cross_entropy(_logits(), torch.tensor([0, 1, 9]))
    assert F.cross_entropy is PLAIN
    noted = _Noted()
    with replaced_forward(calls.loss_module(model), noted), calls.loss_calls(model):
        F.cross_entropy(_logits(), LABELS)
    assert noted.functions == [PLAIN]


def test_of_two_models_the_one_that_was_called_last_gets_the_loss(model: nn.Module) -> None:
    other = nn.Linear(2, 2)
    mine, its = _Noted(), _Noted()
    with (
        replaced_forward(calls.loss_module(model), mine),
        replaced_forward(calls.loss_module(other), its),
        calls.loss_calls(model),
        calls.loss_calls(other),
    ):
        calls.expect_loss(model)
        F.cross_entropy(_logits(), LABELS)
        calls.expect_loss(other)
        F.cross_entropy(_logits(), LABELS)
    assert (len(mine.functions), len(its.functions)) == (1, 1)
    assert F.cross_entropy is PLAIN


def test_leaving_in_another_order_than_entering_keeps_the_other_at_work(model: nn.Module) -> None:
    other, noted = nn.Linear(2, 2), _Noted()
    first, second = calls.loss_calls(model), calls.loss_calls(other)
    with replaced_forward(calls.loss_module(other), noted):
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        F.cross_entropy(_logits(), LABELS)
        second.__exit__(None, None, None)
    assert len(noted.functions) == 1
    assert F.cross_entropy is PLAIN


def test_a_language_model_hands_over_the_loss_it_uses_once() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11)
    model = transformers.GPT2LMHeadModel(config)
    before = dict(model.__dict__)
    tokens, noted = torch.randint(11, (2, 5)), _Noted()
    expected = model(tokens, labels=tokens).loss
    with (
        replaced_forward(calls.loss_module(model), noted),
        calls.loss_calls(model),
        calls.loss_calls(model),  # as where a plan is at work and another is made
    ):
        loss = model.eval()(tokens, labels=tokens).loss
    # The one around torch's own, which runs inside of it.
    assert [f.__name__ for f in noted.functions] == ["ForCausalLMLoss"]
    assert loss.isfinite() and expected.isfinite()
    assert model.__dict__ == before | {"training": False}


def test_a_copy_of_a_language_model_keeps_its_loss_when_all_is_put_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(11, (2, 5))
    with calls.loss_calls(model):
        twin = copy.deepcopy(model)
        within = twin(tokens, labels=tokens).loss
        torch.save(model, saved := io.BytesIO())
    saved.seek(0)
    for other in (twin, torch.load(saved, weights_only=False)):
        assert torch.equal(other(tokens, labels=tokens).loss, within)
        assert other.__dict__["_loss_function"]._owner is other
    assert "_loss_function" not in model.__dict__


def test_a_loss_of_its_own_that_a_language_model_was_given_stays() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=11)
    model = transformers.GPT2LMHeadModel(config)

    def mine(logits: torch.Tensor, **_: Any) -> torch.Tensor:
        return logits.mean()

    with calls.loss_calls(model):
        model.loss_function = mine
    assert model.loss_function is mine
    with calls.loss_calls(model):
        assert model.loss_function is mine
    assert model.loss_function is mine
