"""Any model whose logits go to cross_entropy, in the model or outside, makes its loss in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import memfit
from memfit.errors import UsageError
from memfit.measure.allocations import peak_above_start, record
from memfit.runtime.setup import Setup
from memfit.runtime.tiled_loss.in_model import TiledLoss, find_head
from memfit.runtime.tiled_loss.logits import Logits
from memfit.workload import Workload

VOCAB, WIDTH, ROWS, LENGTH, TILE = 29, 8, 3, 7, 5
close = torch.testing.assert_close
Loss = Callable[..., torch.Tensor]


class Tiny(nn.Module):
    """Embedding, norm and head; with labels it computes its loss itself, as nanoGPT does."""

    def __init__(self, *, bias: bool = True, tied: bool = False, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=bias)
        if tied:
            self.embedding.weight = self.head.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(torch.tanh(self.body(self.embedding(tokens))))
        if labels is None:
            return logits
        flat = logits.view(-1, logits.size(-1))
        return logits, F.cross_entropy(flat, labels.view(-1), ignore_index=-1)


class Parts(nn.Module):
    """A model whose head and loss lie inside segments of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "ab")
        self.output = Output()
        self.loss = Averaged()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens.flatten())
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(self.output(hidden), labels.flatten())


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.drop(F.gelu(self.dense(hidden))))


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.one(logits, labels) + self.other(logits, labels)) / 2


def tiny(**options: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**options)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCAB, (ROWS, LENGTH), generator=source) for _ in range(2))
    labels[0, :4] = -100
    return tokens, labels


def numbers(model: nn.Module, loss: Loss) -> dict[str, torch.Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    value = loss(model, *batch())
    value.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": value.detach(), **grads}


def _sizes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rows, length, classes = logits.shape
    return F.cross_entropy(logits.view(rows * length, classes), labels.view(rows * length))


def _image(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    image = logits.unflatten(1, (1, LENGTH)).permute(0, 3, 1, 2)
    return F.cross_entropy(image, labels.unsqueeze(1))


FORMS: dict[str, Loss] = {
    "view, vocabulary": lambda x, y: F.cross_entropy(x.view(-1, VOCAB), y.view(-1)),
    "view, size": lambda x, y: F.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "sizes unpacked": _sizes,
    "reshape": lambda x, y: F.cross_entropy(x.reshape(ROWS * LENGTH, VOCAB), y.reshape(-1)),
    "flatten": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
    "flatten, function": lambda x, y: F.cross_entropy(torch.flatten(x, end_dim=1), y.flatten()),
    "shifted": lambda x, y: F.cross_entropy(x[:, :-1].reshape(-1, VOCAB), y[:, 1:].flatten()),
    "shifted, dots": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.shape[-1]), y[..., 1:].contiguous().view(-1)
    ),
    "last": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "last, dots": lambda x, y: F.cross_entropy(x[..., -1, :], y[:, -1]),
    "masked": lambda x, y: F.cross_entropy(x[y != -100], y[y != -100]),
    "picked": lambda x, y: F.cross_entropy(x[torch.arange(ROWS), y.argmax(1)], y[:, -1]),
    "new dimension": lambda x, y: F.cross_entropy(x[:, None].flatten(0, 2), y.flatten()),
    "transposed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y),
    "there and back": lambda x, y: F.cross_entropy(
        x.transpose(1, 2).movedim(1, -1).flatten(0, 1), y.flatten()
    ),
    "image": _image,
    "module": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "keywords": lambda x, y: F.cross_entropy(target=y.flatten(), input=x.flatten(0, 1)),
    "wide": lambda x, y: F.cross_entropy(x.float().flatten(0, 1), y.flatten()),
    "wider": lambda x, y: F.cross_entropy(x.to(torch.float64).flatten(0, 1), y.flatten()),
    "ignored": lambda x, y: F.cross_entropy(
        x.flatten(0, 1), y.flatten().clamp(min=3), ignore_index=3
    ),
    "smoothed": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, label_smoothing=0.2),
    "summed": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="sum"),
    "everything": lambda x, y: nn.CrossEntropyLoss(
        ignore_index=5, label_smoothing=0.1, reduction="sum"
    )(x.flatten(0, 1), y.flatten().clamp(min=5)),
    "several": lambda x, y: sum(
        F.cross_entropy(x[:, i], y[:, i], reduction="sum") for i in range(LENGTH)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_losses_outside_of_the_model(form: str) -> None:
    def loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return FORMS[form](model(tokens), labels)

    model = tiny()
    expected = numbers(model, loss)
    with TiledLoss(model, tile=TILE):
        assert isinstance(model(batch()[0]), Logits)
        actual = numbers(model, loss)
    close(actual, expected)
    close(numbers(model, loss), expected, rtol=0, atol=0)


def inside(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(tokens, labels.clamp(min=-1))[1]


def outside(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).view(-1, VOCAB), labels.view(-1))


@pytest.mark.parametrize("loss", [inside, outside])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_heads(loss: Loss, bias: bool, tied: bool) -> None:
    model = tiny(bias=bias, tied=tied)
    expected = numbers(model, loss)
    with TiledLoss(model, tile=TILE):
        close(numbers(model, loss), expected)


def test_a_factor_goes_through_a_head_without_bias() -> None:
    def cool(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((model(tokens) / 0.7).flatten(0, 1), labels.flatten())

    model = tiny(bias=False)
    expected = numbers(model, cool)
    with TiledLoss(model, tile=TILE):
        close(numbers(model, cool), expected)


@pytest.mark.parametrize("loss_too", [False, True])
@pytest.mark.parametrize("loss", [inside, outside])
def test_autocast_of_the_model_and_of_the_loss(loss: Loss, loss_too: bool) -> None:
    model = tiny()

    def mixed(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if loss_too or loss is inside:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(model, tokens, labels)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
        assert logits.dtype is torch.bfloat16
        return F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))

    expected = numbers(model, mixed)
    with TiledLoss(model, tile=TILE):
        actual = numbers(model, mixed)
    close(actual["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    for key, theirs in expected.items():
        close(actual[key], theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


def test_a_loss_of_bfloat16_logits_is_bfloat16() -> None:
    model = tiny().bfloat16()
    expected = numbers(model, outside)["loss"]
    with TiledLoss(model, tile=TILE):
        close(numbers(model, outside)["loss"], expected, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("loss", [inside, outside])
def test_distributed_data_parallel(loss: Loss) -> None:
    model = nn.parallel.DistributedDataParallel(tiny())
    expected = numbers(model, loss)
    with TiledLoss(model, tile=TILE) as tiled:
        assert tiled.head is model.module.head
        close(numbers(model, loss), expected)


def test_a_head_called_several_times_for_one_loss() -> None:
    def chunks(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        model(tokens)  # as a profiler repeats calls
        parts = zip(tokens.split(1), labels.split(1), strict=True)
        return sum(F.cross_entropy(model(x)[0], y[0], reduction="sum") for x, y in parts)

    model = tiny()
    expected = numbers(model, chunks)
    with TiledLoss(model, tile=TILE):
        close(numbers(model, chunks), expected)


def test_a_frozen_head_and_a_frozen_body() -> None:
    for name in ("head", "body"):
        model = tiny()
        model.get_submodule(name).requires_grad_(False)
        expected = numbers(model, outside)
        with TiledLoss(model, tile=TILE):
            close(numbers(model, outside), expected)


def test_without_gradients_the_head_gives_logits() -> None:
    model = tiny()
    with torch.no_grad():
        expected = model(batch()[0])
        with TiledLoss(model, tile=TILE):
            logits = model(batch()[0])
    assert type(logits) is torch.Tensor
    close(logits, expected, rtol=0, atol=0)


def test_nothing_is_left_behind() -> None:
    model = tiny()
    expected = numbers(model, outside)
    tiled = TiledLoss(model, tile=TILE).install()
    with pytest.raises(IndexError):
        model(batch()[0] + VOCAB)
    model(batch()[0])  # a loss that never comes
    assert torch._C._len_torch_function_stack() == 0
    close(numbers(model, outside), expected)
    tiled.undo()
    tiled.undo()
    assert not tiled.at_work and "forward" not in model.head.__dict__
    close(numbers(model, outside), expected, rtol=0, atol=0)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        model = tiny()
        tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        with TiledLoss(model, tile=TILE):
            F.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
        assert isinstance(model.head.weight.grad, FakeTensor)


@pytest.mark.parametrize("seed", range(4))
def test_recomputed_runs_around_head_and_loss_give_the_same_numbers(
    assert_trains_alike: Callable[..., None], seed: int
) -> None:
    def make() -> Workload:
        torch.manual_seed(0)
        model = Parts()
        TiledLoss(model, tile=TILE).install()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Workload(model, lambda model, given: model(*given), optimizer, batch())

    assert_trains_alike(make, seed)


@pytest.mark.parametrize("executor", ["graph", pytest.param("inductor", marks=pytest.mark.slow)])
def test_segments_that_hold_head_or_loss_are_not_compiled(executor: str) -> None:
    torch.manual_seed(0)
    model = Parts()
    workload = Workload(
        model, lambda model, given: model(*given), torch.optim.SGD(model.parameters()), batch()
    )
    plain = memfit.profile(workload, executor=executor)
    setup = Setup(("tiled_loss",), model, workload.optimizer)
    profile = memfit.profile(workload, executor=executor, setup=setup)
    assert plain.uncaptured == {}
    assert list(profile.uncaptured) == ["output", "loss"]
    assert all("loss is made in tiles" in reason for reason in profile.uncaptured.values())
    assert memfit.profile(workload, executor=executor).uncaptured == {}


@pytest.mark.parametrize("loss", [inside, outside])
def test_the_logits_never_exist(loss: Loss) -> None:
    rows, vocab = 64, 4000
    tokens = torch.randint(vocab, (4, rows // 4))
    logits = 4 * rows * vocab

    def peak(model: nn.Module) -> int:
        def step() -> None:
            if loss is inside:
                model(tokens, tokens)[1].backward()
            else:
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

        step()
        model.zero_grad()
        return peak_above_start(record(step, torch.device("cpu")))

    model = tiny(vocab=vocab)
    plain = peak(model)
    model.zero_grad()
    with TiledLoss(model, tile=1):
        tiled = peak(model)
    gradients = 4 * sum(p.numel() for p in model.parameters())
    assert plain > gradients + logits
    assert tiled < gradients + logits // 4


def test_the_head_is_the_linear_layer_registered_last() -> None:
    model = tiny()
    assert find_head(model) == ("head", model.head)
    assert find_head(nn.Sequential(model, nn.ReLU()))[0] == "0.head"
    with TiledLoss(model), pytest.raises(UsageError, match="no plain linear layer"):
        find_head(model)
