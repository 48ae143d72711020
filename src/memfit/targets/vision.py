"""torchvision:NAME and timm:NAME -> image classifiers with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfit.errors import UsageError
from memfit.targets.build import assemble, building, import_from, seeded
from memfit.targets.options import Options, suggest
from memfit.targets.overrides import parse_literal
from memfit.workload import Workload

_BATCH, _CLASSES = 16, 1000
# torchvision's classifiers take any size but these; 224 leaves inception's auxiliary head nothing.
_TORCHVISION_SIZES = {"inception_v3": 299}
# They warn unless told; True is what they do anyway.
_TORCHVISION_INIT = ("googlenet", "inception_v3")
_LOADS_WEIGHTS = ("weights", "weights_backbone", "pretrained", "checkpoint_path")


def build_torchvision(name: str, options: Options) -> Workload:
    """Return the torchvision classifier `name`, trained on random images."""
    target = f"torchvision:{name}"
    models = import_from("torchvision", "models")[1]
    # The other models of torchvision (detection, segmentation, video) take other batches.
    known = models.list_models(module=models)
    if name.lower() not in known:
        raise _unknown_name(target, name, known, "https://docs.pytorch.org/vision/stable/models")
    arguments = _parse_arguments(target, options.overrides)
    if name.lower() in _TORCHVISION_INIT:
        arguments.setdefault("init_weights", True)

    def describe_batch(model: nn.Module) -> tuple[tuple[int, int, int], int]:
        size = arguments.get("image_size", _TORCHVISION_SIZES.get(name.lower(), 224))
        return (3, *_height_width(target, size)), arguments.get("num_classes", _CLASSES)

    return _build(
        target,
        options,
        lambda: models.get_model(name.lower(), weights=None, **arguments),
        describe_batch,
    )


def build_timm(name: str, options: Options) -> Workload:
    """Return the timm model `name`, trained on random images of the size in its default cfg."""
    target = f"timm:{name}"
    timm = import_from("timm", "create_model", "list_models", "is_model")[0]
    # is_model knows built-in names only, so a name such as "hf-hub:..." never reaches a network.
    if not timm.is_model(name):
        raise _unknown_name(target, name, timm.list_models(), "timm.list_models()")
    arguments = _parse_arguments(target, options.overrides)

    def describe_batch(model: nn.Module) -> tuple[tuple[int, int, int], int]:
        cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", {})
        channels, height, width = cfg.get("input_size", (3, 224, 224))
        size = arguments.get("img_size", (height, width))
        classes = getattr(model, "num_classes", arguments.get("num_classes", _CLASSES))
        return (arguments.get("in_chans", channels), *_height_width(target, size)), classes

    def create() -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        if getattr(model, "num_classes", None) != 0:
            return model
        if "num_classes" in arguments:
            raise UsageError(
                f"{target} without classes has nothing to be trained on here",
                hint=f"leave num_classes out for {_CLASSES}, or train it by file.py:function",
            )
        # It gives features when nothing is said, to be used without a classifier.
        model = timm.create_model(name, pretrained=False, num_classes=_CLASSES, **arguments)
        return model

    return _build(target, options, create, describe_batch)


def _build(
    target: str,
    options: Options,
    create: Callable[[], nn.Module],
    describe_batch: Callable[[nn.Module], tuple[tuple[int, int, int], int]],
) -> Workload:
    options.refuse_seq(target)
    count = options.batch or _BATCH
    with (
        building(target, options.overrides),
        seeded(options.seed, options.device),
        options.device,
    ):
        model = create()
        image_shape, classes = describe_batch(model)
        images = torch.randn(count, *image_shape)
        labels = torch.randint(classes, (count,))
    return assemble(target, model, _loss, (images, labels), options, default_optimizer="sgd")


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(_main_logits(model(images)), labels)


def _main_logits(output: Any) -> torch.Tensor:
    """Return the logits of the main head; in train mode some models give auxiliary ones too."""
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def _parse_arguments(target: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    for name in overrides:
        if name in _LOADS_WEIGHTS:
            raise UsageError(
                f"{target} is built with random weights, so {name!r} cannot be set",
                hint="to start from trained weights, load them in a file.py:function target",
            )
    return {name: parse_literal(text) for name, text in overrides.items()}


def _height_width(target: str, size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise UsageError(
            f"{target} was given the image size {size!r}",
            hint="write one whole number, or two as [height,width]",
        )
    return pair


def _unknown_name(target: str, name: str, known: list[str], where: str) -> UsageError:
    return UsageError(
        f"unknown target {target!r}: {target.partition(':')[0]} has no image classifier {name!r}",
        hint=f"{suggest(name, known)}all names: {where}",
    )
