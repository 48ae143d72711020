"""The built-in encoder."""

import pytest
import torch

from memfit.errors import UsageError
from memfit.targets import resolve_target

TINY = {"n_layer": "2", "n_embd": "16", "n_head": "2", "n_ff": "32", "vocab_size": "50"}


def test_default_sizes() -> None:
    workload = resolve_target("encoder", device="meta")
    model = workload.model
    assert workload.name == "encoder"
    assert [tuple(t.shape) for t in workload.batch] == [(8, 128), (8, 128)]
    assert isinstance(workload.optimizer, torch.optim.Adam)
    assert model.training
    assert len(model.layers) == 6
    assert all(isinstance(layer, torch.nn.TransformerEncoderLayer) for layer in model.layers)
    layer = model.layers[0]
    assert layer.self_attn.batch_first
    assert (layer.self_attn.num_heads, layer.linear1.out_features) == (8, 2048)
    assert layer.dropout.p == 0.1
    assert tuple(model.tokens.weight.shape) == (30000, 512)
    assert tuple(model.positions.weight.shape) == (512, 512)


def test_trains() -> None:
    workload = resolve_target("encoder", batch=2, seq=4, overrides=TINY | {"dropout": "0"})
    losses = []
    for _ in range(3):
        loss = workload.compute_loss()
        loss.backward()
        assert all(p.grad is not None for p in workload.model.parameters())
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]


def test_layers_start_with_different_weights() -> None:
    layers = resolve_target("encoder", batch=1, seq=2, overrides=TINY).model.layers
    assert not torch.equal(layers[0].linear1.weight, layers[1].linear1.weight)


def test_default_length_follows_a_shorter_maximum() -> None:
    workload = resolve_target("encoder", batch=1, overrides=TINY | {"max_length": "16"})
    assert workload.batch[0].shape == (1, 16)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_layer": "0"}, "n_layer is 0"),
        ({"dropout": "1.5"}, r"dropout is 1\.5"),
        ({"n_head": "3"}, "n_embd 512 cannot be split evenly over 3 heads"),
        ({"n_layer": "none"}, "is not of type int"),
        ({"layers": "2"}, "encoder has no field 'layers'"),
    ],
)
def test_wrong_sizes_are_refused(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_target("encoder", device="meta", overrides=overrides)


def test_sequence_past_the_positions_is_refused() -> None:
    with pytest.raises(UsageError, match="seq is 600, but encoder has 512 positions") as caught:
        resolve_target("encoder", seq=600)
    assert "--set max_length=600" in caught.value.hint
