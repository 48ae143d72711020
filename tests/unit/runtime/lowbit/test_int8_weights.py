"""A model with int8 weights computes with them, keeps none in float, and comes back exactly."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.errors import UsageError
from memfit.runtime.lowbit.int8_tensor import Int8Tensor
from memfit.runtime.lowbit.int8_weights import Int8Weights


class Mixed(torch.nn.Module):
    """One module of each kind; the head, which shares the embedding's weight, has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8, padding_idx=0)
        self.conv = torch.nn.Conv1d(8, 8, 3, padding=1)
        self.norm = torch.nn.LayerNorm(8)
        self.linear = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.linear(self.norm(x)).relu())


TOKENS = torch.arange(20).view(2, 10) % 11


@pytest.fixture
def model() -> Any:
    """A model of which only the norm is trained."""
    torch.manual_seed(0)
    model = Mixed().requires_grad_(False)
    model.norm.requires_grad_(True)
    return model


def rounded(model: Any, int8: Int8Weights) -> Any:
    """A plain copy of the model that has the rounded weights."""
    plain = copy.deepcopy(model)
    found = int8.install().quantized()
    int8.undo()
    for name, weight in found.items():
        plain.get_submodule(name).weight.data = weight.dequantize()
    return plain


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
def test_output_and_gradients_are_those_of_the_rounded_weights(
    model: Any, symmetric: bool, per_channel: bool
) -> None:
    int8 = Int8Weights(model, symmetric=symmetric, per_channel=per_channel)
    plain = rounded(model, int8)
    exact = model(TOKENS)
    expected = plain(TOKENS)
    expected.square().sum().backward()
    with int8:
        found = model(TOKENS)
        found.square().sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(model.norm.weight.grad, plain.norm.weight.grad)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(found, exact)


def test_undo_restores_everything(model: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    keys = {name: set(vars(m)) for name, m in model.named_modules()}
    exact = model(TOKENS)
    int8 = Int8Weights(model).install()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    int8.undo()
    int8.undo()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {name: set(vars(m)) for name, m in model.named_modules()} == keys
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(TOKENS), exact)


def test_a_shared_weight_is_kept_once(model: Any) -> None:
    with Int8Weights(model, names=["head"]) as int8:
        found = int8.quantized()
        assert found.keys() == {"embedding", "head"}
        assert found["head"] is found["embedding"]


@pytest.mark.parametrize("autocast", [True, False])
def test_autograd_keeps_no_float_weight(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[StorageWeakRef] = []
    dequantize = Int8Tensor.dequantize

    def watched(*args: Any) -> torch.Tensor:
        tensor = dequantize(*args)
        whole.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(Int8Tensor, "dequantize", watched)
    linear = torch.nn.Linear(64, 64).requires_grad_(False)
    x = torch.randn(2, 64, requires_grad=True)
    with Int8Weights(linear), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = linear(x)
        assert len(whole) == 1 and whole[0].expired()
        out.sum().backward()
    assert len(whole) == 2 and x.grad is not None and bool(x.grad.any())


def test_the_linear_layers_of_gpt2() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    layer = conv1d(12, 8).requires_grad_(False)
    x = torch.randn(3, 8)
    exact = layer(x)
    with Int8Weights(layer) as int8:
        (weight,) = int8.quantized().values()
        assert weight.scale.shape == (1, 12)
        torch.testing.assert_close(layer(x), exact, rtol=0.02, atol=1e-3)


def test_loaded_values_are_taken_over(model: Any) -> None:
    other = Mixed()
    with Int8Weights(model) as int8:
        before = model(TOKENS)
        model.load_state_dict(other.state_dict())
        assert not torch.equal(model(TOKENS), before)
        expected = other.linear.weight.detach()
        error = (int8.quantized()["linear"].dequantize() - expected).abs()
        assert bool((error <= int8.quantized()["linear"].scale * 0.501).all())
    assert torch.equal(model.linear.weight, expected)


def test_bytes(model: Any) -> None:
    big = torch.nn.Linear(512, 512, dtype=torch.float16).requires_grad_(False)
    with Int8Weights(big) as int8:
        (weight,) = int8.quantized().values()
        assert weight.nbytes == 512 * 512 + 4 * 512
        footprint = int8.footprint()
        assert footprint.removed_bytes == 0  # the exact weight lies in the same memory
        assert footprint.host_bytes == weight.nbytes
        assert footprint.working_bytes == 512 * 512 * (4 + 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_in_training_is_evaluated_in_int8(model: Any, mode: Any) -> None:
    """Its next steps are those of a copy that was never in int8."""
    model.requires_grad_(True)
    plain = copy.deepcopy(model)
    expected = rounded(model, Int8Weights(model, forward_only=True))(TOKENS)

    def train(trained: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        trained(TOKENS).square().mean().backward()
        optimizer.step()

    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, plain)]
    with Int8Weights(model, forward_only=True) as int8, mode():
        assert torch.equal(model(TOKENS), expected)
        assert int8.modules.keys() == {"embedding", "conv", "linear", "head"}
    for _ in range(2):
        train(model, optimizers[0])
        train(plain, optimizers[1])
        with Int8Weights(model, forward_only=True), mode():
            model(TOKENS)
    assert all(map(torch.equal, model.parameters(), plain.parameters())), "bit for bit"


def test_training_in_an_evaluation_by_int8_is_refused_and_changes_nothing(model: Any) -> None:
    model.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(UsageError, match="is trained ran forward") as refused,
        Int8Weights(model, forward_only=True),
    ):
        model(TOKENS)
    assert "torch.no_grad()" in str(refused.value.hint)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    model(TOKENS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_fused_encoder_layer_is_not_taken() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.requires_grad_(False)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        exact = layer(x)
        with Int8Weights(layer) as int8:
            assert int8.modules.keys() == {"linear1", "linear2"}
            assert not torch.equal(layer(x), exact)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_linear_layer_was_silenced_by_one_large_weight(symmetric: bool) -> None:
    linear = torch.nn.Linear(64, 64).requires_grad_(False)
    linear.weight.mul_(0.01)[5, 7] = 100.0
    before, x = linear.weight.clone(), torch.randn(2, 64)
    with pytest.raises(UsageError, match=r"63 of 64 channels would become all zero") as refusal:
        Int8Weights(linear, symmetric=symmetric, per_channel=False).install()
    assert "per_channel=True" in str(refusal.value.hint)
    assert torch.equal(linear.weight, before) and "forward" not in vars(linear)
    with Int8Weights(linear, symmetric=symmetric):
        assert bool(linear(x).isfinite().all())


@pytest.mark.parametrize("per_channel", [True, False])
def test_zero_channels_are_said(
    model: Any, caplog: pytest.LogCaptureFixture, per_channel: bool
) -> None:
    model.linear.weight[3] = 0
    int8 = Int8Weights(model, names=["linear"], per_channel=per_channel)
    with caplog.at_level(logging.WARNING), int8:
        model(TOKENS)
    assert [r.getMessage() for r in caplog.records] == [
        "linear: 1 of 8 channels of the weight are all zero, and stay so in int8"
    ]


def test_a_refused_weight_leaves_the_model_as_it_was(model: Any) -> None:
    model.linear.weight[0, 0] = torch.nan
    with pytest.raises(UsageError, match=r"linear: .*NaN"):
        Int8Weights(model).install()
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_replaced_weight_is_refused(model: Any) -> None:
    with Int8Weights(model):
        model.linear.weight = torch.nn.Parameter(torch.ones(8, 8), requires_grad=False)
        with pytest.raises(UsageError, match="replaced"):
            model(TOKENS)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["norm"], "no Linear"), (["nothing.*"], "there is none"), (["linear"], "is trained")],
)
def test_names_that_cannot_be_taken(model: Any, names: list[str], words: str) -> None:
    model.linear.requires_grad_(True)
    with pytest.raises(UsageError, match=words) as refusal:
        Int8Weights(model, names=names)
    assert refusal.value.hint


def test_a_model_without_frozen_weights() -> None:
    with pytest.raises(UsageError, match="no frozen"):
        Int8Weights(Mixed())
