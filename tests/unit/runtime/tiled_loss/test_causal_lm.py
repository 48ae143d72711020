"""Language models of transformers make their loss in tiles, and are restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memfit.errors import UsageError
from memfit.runtime.tiled_loss.in_model import TiledLoss, find_head
from memfit.runtime.tiled_loss.logits import Logits
from memfit.workload import Workload

transformers = pytest.importorskip("transformers")
ForCausalLMLoss = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss

VOCAB = 97
TILE = 5
close = torch.testing.assert_close


def _config(name: str, **fields: Any) -> Any:
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return getattr(transformers, name)(vocab_size=VOCAB, use_cache=False, **tokens, **fields)


def _llama_like(name: str, **fields: Any) -> Any:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    return _config(name, **sizes, **fields)


def _gpt2(**fields: Any) -> nn.Module:
    config = _config("GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=32, **fields)
    return transformers.GPT2LMHeadModel(config)


def _llama(**fields: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(_llama_like("LlamaConfig", **fields))


def _gptj() -> nn.Module:
    config = _config("GPTJConfig", n_embd=16, n_layer=1, n_head=2, n_positions=32, rotary_dim=4)
    return transformers.GPTJForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2, tied": _gpt2,
    "Llama": _llama,
    "Llama, tied": lambda: _llama(tie_word_embeddings=True),
    "GPT-J, with a bias": _gptj,
    "Granite, logits divided": lambda: transformers.GraniteForCausalLM(
        _llama_like("GraniteConfig", logits_scaling=3.0)
    ),
    "Cohere, logits scaled": lambda: transformers.CohereForCausalLM(
        _llama_like("CohereConfig", logit_scale=0.5)
    ),
    "Mixtral, with another loss": lambda: transformers.MixtralForCausalLM(
        _llama_like("MixtralConfig", num_local_experts=2, output_router_logits=True)
    ),
}


def build(name: str = "GPT-2, tied") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batch(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :4] = -100
    return {"input_ids": tokens, "labels": labels}


def numbers(model: nn.Module, **given: Any) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a step with the same dropout every time."""
    torch.manual_seed(2)
    model.zero_grad()
    loss = model(**given).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_model_as_it_was(name: str) -> None:
    model = build(name)
    expected = numbers(model, **batch())
    with TiledLoss(model, tile=TILE):
        assert isinstance(model(**batch()).logits, Logits)
        close(numbers(model, **batch()), expected)
    close(numbers(model, **batch()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["GPT-2, tied", "Llama"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(name: str, autocast: bool) -> None:
    model = build(name) if autocast else build(name).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = numbers(model, **batch())
        with TiledLoss(model, tile=TILE):
            actual = numbers(model, **batch())
    close(actual["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    for key, theirs in expected.items():
        close(actual[key], theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    "extra",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": torch.arange(24).view(3, 8)},
        {"ignore_index": 3},
        {"logits_to_keep": 8},
        {"output_hidden_states": True},
    ],
    ids=str,
)
def test_arguments_of_the_loss(extra: dict[str, Any]) -> None:
    model, given = build("Llama"), batch() | extra
    if "ignore_index" in extra:
        given["labels"] = given["labels"].clamp(min=3)
    expected = numbers(model, **given)
    with TiledLoss(model, tile=TILE):
        close(numbers(model, **given), expected)


def test_labels_by_position_and_outputs_as_tuples() -> None:
    model, given = build("Llama").eval(), batch()
    arguments = (given["input_ids"], None, None, None, None, given["labels"])
    expected = model(*arguments, return_dict=False)
    with TiledLoss(model, tile=TILE):
        loss, logits = model(*arguments, return_dict=False)
    assert isinstance(logits, Logits) and logits.shape == expected[1].shape
    close(loss, expected[0])


def test_other_outputs_stay() -> None:
    model = build("Llama").eval()
    expected = model(**batch(), output_hidden_states=True)
    with TiledLoss(model, tile=TILE):
        output = model(**batch(), output_hidden_states=True)
    assert type(output) is type(expected)
    assert list(output) == list(expected)
    close(output.hidden_states, expected.hidden_states, rtol=0, atol=0)


def test_calls_without_gradients_give_logits() -> None:
    model = build().eval()
    tokens = batch()["input_ids"]
    expected = model(**batch())
    with TiledLoss(model, tile=TILE):
        with torch.no_grad():
            output = model(**batch())
        inside = model.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=True)
        plain = model.loss_function(expected.logits, batch()["labels"], VOCAB)
        close(model(**batch()).loss, plain)
    assert type(output.logits) is torch.Tensor
    close(output.logits, expected.logits.detach(), rtol=0, atol=0)
    close(output.loss, expected.loss.detach(), rtol=0, atol=0)
    close(inside, model.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=True))


def _state(model: nn.Module) -> Any:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [dict(m.__dict__) for m in model.modules()], list(model.state_dict()), hooks


def test_undo_restores_everything() -> None:
    model = build()
    before = _state(model)
    parameters = dict(model.named_parameters())
    tiled = TiledLoss(model, tile=TILE).install()
    assert tiled.at_work
    assert list(model.state_dict()) == before[1]
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    tiled.undo()
    tiled.undo()
    assert not tiled.at_work
    assert repr(_state(model)) == repr(before)
    with tiled:
        assert type(model(**batch()).logits) is Logits
    assert type(model(**batch()).logits) is torch.Tensor


def test_a_loss_and_forwards_set_by_the_user_come_back() -> None:
    model = build()
    plain = model.loss_function
    model.loss_function = plain
    forward = model.forward
    model.forward = forward
    with TiledLoss(model, tile=TILE):
        assert isinstance(model(**batch()).logits, Logits)
    assert model.__dict__["_loss_function"] is plain
    assert model.__dict__["forward"] is forward


def test_fake_tensors() -> None:
    with FakeTensorMode(), TiledLoss(build("Granite, logits divided"), tile=TILE) as tiled:
        tokens = torch.zeros(3, 8, dtype=torch.int64)
        tiled.model(tokens, labels=tokens).loss.backward()
        assert isinstance(tiled.head.weight.grad, FakeTensor)


def test_an_error_in_a_call_leaves_the_next_one_right() -> None:
    model = build().eval()
    tokens = batch()["input_ids"]
    expected = model(tokens, labels=tokens).loss
    with TiledLoss(model, tile=TILE):
        with pytest.raises(IndexError):
            model(tokens + VOCAB, labels=tokens)
        close(model(tokens, labels=tokens).loss, expected)


def test_hooks_of_model_and_head_are_called() -> None:
    model, called = build(), []
    model.register_forward_hook(lambda *_: called.append("model"))
    model.lm_head.register_forward_pre_hook(lambda *_: called.append("before head"))
    model.lm_head.register_forward_hook(lambda *_: called.append("head"))
    with TiledLoss(model, tile=TILE):
        model(**batch())
    assert called == ["before head", "head", "model"]


@pytest.mark.parametrize("seed", range(3))
def test_recomputed_runs_up_to_the_head_give_the_same_numbers(
    assert_trains_alike: Callable[..., None], seed: int
) -> None:
    def make() -> Workload:
        model = build()
        TiledLoss(model, tile=TILE).install()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Workload(model, lambda model, given: model(**given).loss, optimizer, batch())

    assert_trains_alike(make, seed)


def test_labels_that_do_not_meet_the_kept_logits_are_refused() -> None:
    with TiledLoss(build(), tile=TILE) as tiled, pytest.raises(UsageError, match="one label"):
        tiled.model(**batch(), logits_to_keep=4)


class _Squared(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden).square()


def _other_head() -> nn.Module:
    model = build()
    model.lm_head = _Squared(16, VOCAB, bias=False)
    return model


def _watched_head() -> nn.Module:
    model = build()
    model.lm_head.register_full_backward_hook(lambda *_: None)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no linear layer": (lambda: nn.Embedding(3, 4), "Embedding.*has no linear layer"),
    "another head": (_other_head, "the head _Squared"),
    "gradients of logits asked for": (_watched_head, "hooks that ask"),
    "compiled": (lambda: torch.compile(build()), "torch.compile"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UsageError, match=message) as refused:
        TiledLoss(make())
    assert refused.value.hint
    assert name == "compiled" or "memfit.tiled_cross_entropy" in refused.value.hint


def test_capped_logits_are_refused_at_the_first_call() -> None:
    model = transformers.Gemma2ForCausalLM(_llama_like("Gemma2Config"))
    with TiledLoss(model), pytest.raises(UsageError, match="'tanh' is done to them"):
        model(**batch())


def test_a_masked_language_model() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = _config("BertConfig", num_attention_heads=2, **sizes)
    model = transformers.BertForMaskedLM(config)
    expected = numbers(model, **batch())
    with TiledLoss(model, tile=TILE) as tiled:
        assert tiled.name == "cls.predictions.decoder"
        close(numbers(model, **batch()), expected)


class _Changing(nn.Module):
    """A model that changes its logits between head and loss."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 8)
        self.lm_head = nn.Linear(8, VOCAB)
        self.change = change

    @property
    def loss_function(self) -> Any:
        return self.__dict__.get("_loss_function", ForCausalLMLoss)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.change(self.lm_head(self.embedding(input_ids)))
        return {"loss": self.loss_function(logits, labels, VOCAB), "logits": logits}


def _masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 3] = -1e9
    return logits


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda x: 30 * torch.tanh(x / 30), "'.*div.*'"),  # with a bias a factor changes more
        (torch.tanh, "'tanh'"),
        (_masked, "'__setitem__'"),
        (lambda x: x[..., :50], "'__getitem__'"),
        (lambda x: x + 1, "'.*add.*'"),
        (lambda x: x.masked_fill_(x > 3, 0), "gt"),
    ],
)
def test_changed_logits_are_refused_when_they_are_made(change: Any, name: str) -> None:
    model = _Changing(change)
    with TiledLoss(model, tile=TILE), pytest.raises(UsageError, match=name) as refused:
        model(**batch())
    assert "memfit.tiled_cross_entropy" in (refused.value.hint or "")
    assert torch._C._len_torch_function_stack() == 0


def test_a_change_of_dtype_is_none() -> None:
    model = _Changing(lambda logits: logits.float().to(torch.float64).contiguous())
    expected = model(**batch())["loss"]
    with TiledLoss(model, tile=TILE):
        output = model(**batch())
    close(output["loss"], expected, rtol=1e-5, atol=1e-5)
    assert output["logits"].dtype is torch.float64


def test_a_loss_made_twice_of_the_same_logits() -> None:
    class Twice(_Changing):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            logits = self.lm_head(self.embedding(input_ids))
            losses = [self.loss_function(logits, labels, VOCAB) for _ in range(2)]
            return {"loss": sum(losses), "logits": logits}

    model = Twice(torch.tanh)
    expected = model(**batch())["loss"]
    with TiledLoss(model, tile=TILE):
        close(model(**batch())["loss"], expected)


def test_find_head_returns_the_head() -> None:
    model = build()
    assert find_head(model) == ("lm_head", model.lm_head)
