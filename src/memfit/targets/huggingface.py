"""transformers:NAME -> a model built from the table of architectures, with its own loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.targets.architectures import ARCHITECTURES, Architecture
from memfit.targets.build import assemble, building, import_from, seeded
from memfit.targets.options import Options, suggest
from memfit.targets.overrides import parse_fields
from memfit.workload import Workload

_TEXT_BATCH, _TEXT_SEQ, _IMAGE_BATCH = 8, 512, 16
# Bookkeeping of a configuration that does not change the training step.
_NOT_SETTABLE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
}


def build_transformers(name: str, options: Options) -> Workload:
    """Return the architecture `name` with random weights, trained on a random batch."""
    target = f"transformers:{name}"
    row = ARCHITECTURES.get(name)
    if row is None:
        raise UsageError(
            f"unknown target {target!r}: the table has no architecture {name!r}",
            hint=f"{suggest(name, ARCHITECTURES)}known are {', '.join(ARCHITECTURES)}; for another "
            "model write a file.py:function target (`memfit init`)",
        )
    _, config_class, model_class = import_from("transformers", row.config_class, row.model_class)
    config = _build_config(target, row, config_class, model_class, options)
    with (
        building(target, options.overrides),
        seeded(options.seed, options.device),
        options.device,
    ):
        model = model_class(config)
        if row.task == "causal_lm" and getattr(model, "loss_type", "") is None:
            # GPT-2's class name says no loss, so it falls back to this one with a warning in
            # every forward, which breaks its compiled graph.
            model.loss_type = "ForCausalLM"
        batch = _make_batch(target, row, config, options)
    return assemble(target, model, _loss, batch, options, default_optimizer=row.optimizer)


def _build_config(
    target: str, row: Architecture, config_class: Any, model_class: Any, options: Options
) -> Any:
    fields = dict(row.fields)
    if hasattr(config_class(), "use_cache"):
        fields["use_cache"] = False
    if getattr(model_class, "_supports_sdpa", False):
        fields["attn_implementation"] = "sdpa"
    with building(target, options.overrides):
        config = config_class(**fields)
        current = {k: v for k, v in config.to_dict().items() if k not in _NOT_SETTABLE}
        for extra in ("num_labels", "attn_implementation"):
            if extra in fields:
                current[extra] = fields[extra]
        aliases = {a: real for a, real in config.attribute_map.items() if real in current}
        current |= {alias: current[real] for alias, real in aliases.items()}
        values = parse_fields(target, options.overrides, current, optional=True)
        # Built anew rather than changed in place, so that fields derived from others follow.
        fields |= {aliases.get(name, name): value for name, value in values.items()}
        return config_class(**fields)


def _make_batch(
    target: str, row: Architecture, config: Any, options: Options
) -> dict[str, torch.Tensor]:
    if row.task == "image_classification":
        options.refuse_seq(target)
        return _make_image_batch(target, config, options.batch or _IMAGE_BATCH)
    limit = getattr(config, "max_position_embeddings", None)
    length = options.seq or min(_TEXT_SEQ, limit or _TEXT_SEQ)
    if limit is not None and length > limit:
        raise UsageError(
            f"seq is {length}, but {target} has {limit} positions",
            hint=f"use --seq {limit} or --set max_position_embeddings={length}",
        )
    shape = (options.batch or _TEXT_BATCH, length)
    tokens = torch.randint(config.vocab_size, shape)
    labels = tokens.clone() if row.task == "causal_lm" else torch.randint(config.vocab_size, shape)
    return {"input_ids": tokens, "labels": labels}


def _make_image_batch(target: str, config: Any, count: int) -> dict[str, torch.Tensor]:
    if config.num_labels < 2:
        raise UsageError(
            f"{target} classifies images, but num_labels is {config.num_labels}",
            hint="use --set num_labels=2 or more",
        )
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {
        "pixel_values": torch.randn(count, config.num_channels, height, width),
        "labels": torch.randint(config.num_labels, (count,)),
    }


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss
