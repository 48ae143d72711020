"""torchvision and timm targets, against stand-ins of their interfaces and the packages if there."""

import sys
import weakref
from collections import namedtuple
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.estimating.estimate import estimate
from memfit.targets import resolve_target

Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


class Classifier(nn.Module):
    """Mean colour -> classes; `auxiliary` returns two heads in train mode."""

    def __init__(self, num_classes: int = 1000, in_chans: int = 3, auxiliary: Any = None) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.head = nn.Linear(in_chans, num_classes)
        # As torch has them to fake parameters, which it then refuses to move.
        self.watches = [weakref.ref(parameter) for parameter in self.parameters()]
        self.auxiliary = auxiliary

    def forward(self, images: torch.Tensor) -> Any:
        logits = self.head(images.mean((2, 3)))
        return logits if self.auxiliary is None else self.auxiliary(logits, None)


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []

    def get_model(name: str, **arguments: Any) -> nn.Module:
        calls.append((name, dict(arguments)))
        assert arguments.pop("weights") is None
        auxiliary = Outputs if arguments.pop("init_weights", False) else None
        arguments.pop("image_size", None)
        return Classifier(**arguments, auxiliary=auxiliary)

    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    package.models = models
    models.get_model = get_model
    models.list_models = lambda module: ["resnet18", "vit_b_16", "inception_v3", "googlenet"]
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return calls


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []

    def create_model(name: str, **arguments: Any) -> nn.Module:
        calls.append((name, dict(arguments)))
        assert arguments.pop("pretrained") is False
        arguments.pop("img_size", None)
        if name == "features":
            arguments.setdefault("num_classes", 0)
        model = Classifier(**arguments, auxiliary=lambda logits, aux: (logits, aux))
        model.pretrained_cfg = {"input_size": (3, 96, 96)}
        return model

    package = ModuleType("timm")
    package.create_model = create_model
    package.list_models = lambda: ["features", "resnet18", "vit_tiny_patch16_224"]
    package.is_model = lambda name: name.split(".")[0] in package.list_models()
    monkeypatch.setitem(sys.modules, "timm", package)
    return calls


def check_trains(target: str, **options: Any) -> Any:
    workload = resolve_target(target, **options)
    workload.compute_loss().backward()
    workload.optimizer.step()
    assert workload.model.training
    assert workload.name == target
    return workload


def test_torchvision_defaults(torchvision: list) -> None:
    workload = check_trains("torchvision:resnet18")
    images, labels = workload.batch
    assert images.shape == (16, 3, 224, 224)
    assert labels.shape == (16,)
    assert labels.max() > 10
    assert isinstance(workload.optimizer, torch.optim.SGD)
    assert workload.optimizer.param_groups[0]["momentum"] == 0.9
    assert torchvision == [("resnet18", {"weights": None})]


def test_torchvision_overrides_reach_constructor_and_batch(torchvision: list) -> None:
    overrides = {"num_classes": "7", "image_size": "64"}
    workload = check_trains("torchvision:vit_b_16", batch=4, overrides=overrides)
    assert workload.batch[0].shape == (4, 3, 64, 64)
    assert workload.batch[1].max() < 7
    assert torchvision[0][1] == {"weights": None, "num_classes": 7, "image_size": 64}


@pytest.mark.parametrize(("name", "size"), [("inception_v3", 299), ("googlenet", 224)])
def test_torchvision_auxiliary_heads_use_the_main_logits(
    torchvision: list, name: str, size: int
) -> None:
    workload = check_trains(f"torchvision:{name}", batch=2)
    assert workload.batch[0].shape == (2, 3, size, size)


def test_timm_takes_size_and_classes_from_the_model(timm: list) -> None:
    workload = check_trains("timm:resnet18.a1_in1k", overrides={"num_classes": "5"})
    assert workload.batch[0].shape == (16, 3, 96, 96)
    assert workload.batch[1].max() < 5
    assert timm == [("resnet18.a1_in1k", {"pretrained": False, "num_classes": 5})]


def test_timm_image_size_and_channels_can_be_overridden(timm: list) -> None:
    overrides = {"img_size": "[32,64]", "in_chans": "1"}
    workload = check_trains("timm:vit_tiny_patch16_224", batch=2, overrides=overrides)
    assert workload.batch[0].shape == (2, 1, 32, 64)


def test_timm_models_that_give_features_get_classes(timm: list) -> None:
    workload = check_trains("timm:features")
    assert int(workload.batch[1].max()) > 0
    assert timm == [
        ("features", {"pretrained": False}),
        ("features", {"pretrained": False, "num_classes": 1000}),
    ]
    with pytest.raises(UsageError, match="without classes"):
        resolve_target("timm:resnet18", overrides={"num_classes": "0"})


@pytest.mark.parametrize("zoo", ["torchvision", "timm"])
def test_models_are_estimated_one_after_another(zoo: str, torchvision: list, timm: list) -> None:
    first = estimate(f"{zoo}:resnet18", batch=4)
    assert first.categories["parameters"] >= 4 * 1000 * 4
    assert first.categories["batch"] > 0
    estimate("encoder", batch=1, seq=8, overrides={"n_layer": "1"})
    assert estimate(f"{zoo}:resnet18", batch=4) == first


@pytest.mark.parametrize("zoo", ["torchvision", "timm"])
def test_models_are_built_on_their_device(zoo: str, torchvision: list, timm: list) -> None:
    workload = resolve_target(f"{zoo}:resnet18", device="meta")
    tensors = [*workload.model.parameters(), *workload.batch]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("zoo", ["torchvision", "timm"])
def test_unknown_name_gets_close_matches(zoo: str, torchvision: list, timm: list) -> None:
    with pytest.raises(UsageError, match="no image classifier 'resnet19'") as caught:
        resolve_target(f"{zoo}:resnet19")
    assert "did you mean resnet18" in caught.value.hint


def test_timm_hub_names_are_refused(timm: list) -> None:
    with pytest.raises(UsageError, match="no image classifier"):
        resolve_target("timm:hf-hub:timm/resnet18")
    assert timm == []


@pytest.mark.parametrize("field", ["weights", "pretrained"])
def test_trained_weights_are_refused(field: str, torchvision: list) -> None:
    with pytest.raises(UsageError, match="random weights"):
        resolve_target("torchvision:resnet18", overrides={field: "DEFAULT"})


def test_unknown_constructor_argument_is_a_usage_error(torchvision: list) -> None:
    with pytest.raises(UsageError, match=r"cannot be built with depth=3: TypeError: .*'depth'"):
        resolve_target("torchvision:resnet18", overrides={"depth": "3"})


def test_wrong_image_size_and_sequence_are_refused(torchvision: list) -> None:
    with pytest.raises(UsageError, match="image size 'big'"):
        resolve_target("torchvision:vit_b_16", overrides={"image_size": "big"})
    with pytest.raises(UsageError, match="has no sequence length, but seq=8"):
        resolve_target("torchvision:resnet18", seq=8)


@pytest.mark.parametrize("name", ["squeezenet1_1", "googlenet", "inception_v3"])
def test_real_torchvision(name: str) -> None:
    pytest.importorskip("torchvision", exc_type=ImportError)
    check_trains(f"torchvision:{name}", batch=2, overrides={"num_classes": "10"})


def test_real_torchvision_knows_all_classifiers_but_no_detectors() -> None:
    pytest.importorskip("torchvision", exc_type=ImportError)
    with pytest.raises(UsageError, match="no image classifier"):
        resolve_target("torchvision:fasterrcnn_resnet50_fpn")
    for name in ("resnet50", "vit_b_16", "convnext_tiny", "maxvit_t", "swin_t"):
        assert resolve_target(f"torchvision:{name}", device="meta").batch[0].shape[1:] == (
            3,
            224,
            224,
        )


@pytest.mark.parametrize(
    "target",
    ["torchvision:regnet_y_400mf", "torchvision:vit_b_16", "timm:regnety_002", "timm:resnet18"],
)
def test_real_models_are_estimated_as_they_are(target: str) -> None:
    pytest.importorskip(target.partition(":")[0], exc_type=ImportError)
    made = estimate(target, batch=2)
    count = sum(p.numel() for p in resolve_target(target, batch=2).model.parameters())
    assert f"with {count:,} parameters" in made.workload["model"]
    assert made.categories["parameters"] == pytest.approx(4 * count, rel=0.02)


def test_real_timm() -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    overrides = {"num_classes": "10", "img_size": "64"}
    check_trains("timm:vit_tiny_patch16_224", batch=2, overrides=overrides)
    with pytest.raises(UsageError, match="no image classifier"):
        resolve_target("timm:hf-hub:timm/resnet18")
