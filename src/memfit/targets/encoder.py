"""The built-in target: a transformer language model that needs nothing but torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from memfit.errors import UsageError
from memfit.targets.build import assemble, building, seeded
from memfit.targets.options import Options
from memfit.targets.overrides import parse_fields
from memfit.workload import Workload

_BATCH, _SEQ = 8, 128


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the encoder; every field can be overridden."""

    n_layer: int = 6
    n_embd: int = 512
    n_head: int = 8
    n_ff: int = 2048
    dropout: float = 0.1
    vocab_size: int = 30000
    max_length: int = 512

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise UsageError(
                    f"{name} is {value}, but must be at least 1", hint=f"try --set {name}=1"
                )
        if not 0 <= self.dropout < 1:
            raise UsageError(
                f"dropout is {self.dropout}, but must lie in [0, 1)", hint="try --set dropout=0.1"
            )
        if self.n_embd % self.n_head:
            raise UsageError(
                f"n_embd {self.n_embd} cannot be split evenly over {self.n_head} heads",
                hint="make n_embd a multiple of n_head",
            )


class Encoder(nn.Module):
    """Token and position embeddings, encoder layers, a linear head to the vocabulary."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.max_length, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        # Not nn.TransformerEncoder: it copies one layer, so all would start with the same weights.
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                config.n_embd, config.n_head, config.n_ff, config.dropout, batch_first=True
            )
            for _ in range(config.n_layer)
        )
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, batch x sequence x vocabulary."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(positions))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def build_encoder(options: Options) -> Workload:
    """Return the encoder trained on random tokens and random targets."""
    config = EncoderConfig()
    config = replace(config, **parse_fields("encoder", options.overrides, asdict(config)))
    length = min(_SEQ, config.max_length) if options.seq is None else options.seq
    if length > config.max_length:
        raise UsageError(
            f"seq is {length}, but encoder has {config.max_length} positions",
            hint=f"use --seq {config.max_length} or --set max_length={length}",
        )
    shape = (options.batch or _BATCH, length)
    with (
        building("encoder", options.overrides),
        seeded(options.seed, options.device),
        options.device,
    ):
        model = Encoder(config)
        tokens = torch.randint(config.vocab_size, shape)
        targets = torch.randint(config.vocab_size, shape)
    batch = (tokens, targets)
    return assemble("encoder", model, _loss, batch, options, default_optimizer="adam")


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
