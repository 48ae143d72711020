"""transformers targets: tiny models of each family train; overrides and limits hold."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.errors import UsageError
from memfit.targets import resolve_target

pytest.importorskip("transformers", exc_type=ImportError)

_BERT = {
    "num_hidden_layers": "2",
    "hidden_size": "32",
    "num_attention_heads": "4",
    "intermediate_size": "64",
}
_LLAMA = _BERT | {"num_key_value_heads": "2", "vocab_size": "100"}
TINY = {
    "gpt2": {"n_layer": "2", "n_embd": "32", "n_head": "2", "vocab_size": "100"},
    "llama-160m": _LLAMA,
    "llama-1b": _LLAMA | {"head_dim": "8"},
    "qwen2.5-0.5b": _LLAMA,
    "mistral-7b": _LLAMA | {"head_dim": "8"},
    "bert-base": _BERT | {"vocab_size": "100"},
    "distilbert": {
        "n_layers": "2",
        "dim": "32",
        "n_heads": "4",
        "hidden_dim": "64",
        "vocab_size": "100",
    },
    "t5-small": {
        "num_layers": "2",
        "d_model": "32",
        "num_heads": "4",
        "d_kv": "8",
        "d_ff": "64",
        "vocab_size": "100",
    },
    "vit-base": _BERT | {"image_size": "32", "num_labels": "10"},
    "resnet-50": {
        "depths": "1,1",
        "hidden_sizes": "16,32",
        "embedding_size": "8",
        "image_size": "32",
        "num_labels": "10",
    },
}
IMAGES = ("vit-base", "resnet-50")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TINY)
def test_tiny_model_trains(name: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").addHandler(caplog.handler)
    seq = None if name in IMAGES else 8
    workload = resolve_target(
        f"transformers:{name}", batch=2, seq=seq, dtype=dtype, overrides=TINY[name]
    )
    logging.getLogger("transformers").removeHandler(caplog.handler)
    loss = workload.compute_loss()
    loss.backward()
    assert loss.isfinite()
    assert loss.dtype == torch.float32
    assert workload.model.training
    assert {p.dtype for p in workload.model.parameters()} == {torch.float32}
    assert all(p.grad is not None for p in workload.model.parameters())
    workload.optimizer.step()
    assert caplog.messages == []


def test_batches_follow_the_task_and_the_configuration() -> None:
    gpt2 = resolve_target("transformers:gpt2", overrides=TINY["gpt2"]).batch
    assert gpt2["input_ids"].shape == (8, 512)
    assert torch.equal(gpt2["input_ids"], gpt2["labels"])
    assert gpt2["input_ids"].max() < 100
    bert = resolve_target("transformers:bert-base", seq=8, overrides=TINY["bert-base"]).batch
    assert not torch.equal(bert["input_ids"], bert["labels"])
    t5 = resolve_target("transformers:t5-small", seq=8, overrides=TINY["t5-small"]).batch
    assert t5["input_ids"].shape == t5["labels"].shape == (8, 8)
    vit = resolve_target("transformers:vit-base", overrides=TINY["vit-base"]).batch
    assert vit["pixel_values"].shape == (16, 3, 32, 32)
    assert vit["labels"].max() < 10


def test_optimizer_attention_and_cache_defaults() -> None:
    gpt2 = resolve_target("transformers:gpt2", device="meta")
    assert isinstance(gpt2.optimizer, torch.optim.AdamW)
    assert gpt2.model.config._attn_implementation == "sdpa"
    assert gpt2.model.config.use_cache is False
    vit = resolve_target("transformers:vit-base", device="meta")
    assert isinstance(vit.optimizer, torch.optim.AdamW)
    resnet = resolve_target("transformers:resnet-50", device="meta")
    assert isinstance(resnet.optimizer, torch.optim.SGD)


def test_gpt2_loss_is_the_shifted_cross_entropy() -> None:
    overrides = TINY["gpt2"] | {"resid_pdrop": "0", "embd_pdrop": "0", "attn_pdrop": "0"}
    workload = resolve_target("transformers:gpt2", batch=2, seq=8, overrides=overrides)
    tokens = workload.batch["input_ids"]
    logits = workload.model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    torch.testing.assert_close(workload.compute_loss(), expected)


def test_fields_by_their_common_name_and_derived_fields_follow() -> None:
    overrides = {"num_hidden_layers": "3", "attn_implementation": "eager"}
    config = resolve_target("transformers:gpt2", device="meta", overrides=overrides).model.config
    assert config.n_layer == 3
    assert config._attn_implementation == "eager"
    overrides = {"hidden_size": "384", "num_hidden_layers": "2"}
    config = resolve_target(
        "transformers:llama-160m", device="meta", overrides=overrides
    ).model.config
    assert config.head_dim == 32
    config = resolve_target(
        "transformers:t5-small", device="meta", overrides={"num_layers": "2"}
    ).model.config
    assert config.num_decoder_layers == 2


@pytest.mark.parametrize(
    ("name", "overrides", "message", "hint"),
    [
        ("gpt2", {"n_layr": "4"}, "no field 'n_layr'", "did you mean n_layer"),
        ("gpt2", {"n_layer": "four"}, "is not of type int", "the value now is 12"),
        ("gpt2", {"dtype": "bfloat16"}, "no field 'dtype'", "its fields are"),
        ("gpt2", {"n_layer": "none"}, "cannot be built with n_layer=none", "--set"),
        ("gpt2", {"n_head": "7"}, "cannot be built with n_head=7: ", "--set"),
        ("gpt2", {"attn_implementation": "magic"}, "cannot be built with attn", "--set"),
        ("vit-base", {"num_labels": "1"}, "num_labels", "--set"),
    ],
)
def test_wrong_overrides_are_refused(
    name: str, overrides: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve_target(f"transformers:{name}", device="meta", overrides=overrides)
    assert hint in caught.value.hint


def test_unknown_architecture_gets_close_matches() -> None:
    with pytest.raises(UsageError, match="no architecture 'gpt-2'") as caught:
        resolve_target("transformers:gpt-2")
    assert "did you mean gpt2" in caught.value.hint


@pytest.mark.parametrize(("name", "limit"), [("gpt2", 1024), ("bert-base", 512)])
def test_sequence_past_the_positions_is_refused(name: str, limit: int) -> None:
    with pytest.raises(UsageError, match=f"seq is 2000, .* has {limit} positions"):
        resolve_target(f"transformers:{name}", seq=2000, device="meta")


def test_default_sequence_follows_fewer_positions() -> None:
    overrides = {"n_positions": "64"}
    workload = resolve_target("transformers:gpt2", device="meta", overrides=overrides)
    assert workload.batch["input_ids"].shape == (8, 64)


def test_sequence_for_images_is_refused() -> None:
    with pytest.raises(UsageError, match="has no sequence length, but seq=8"):
        resolve_target("transformers:resnet-50", seq=8, device="meta")


def test_large_model_builds_and_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        workload = resolve_target(
            "transformers:llama-8b", batch=1, seq=128, overrides={"num_hidden_layers": "2"}
        )
        workload.compute_loss().backward()
