"""Packages in the place of torchvision and timm, which are not installed here: their documented interface, and a
network of two layers. They fetch nothing: weights come from a file beside them."""

from __future__ import annotations

from pathlib import Path

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes=1000, channels=3):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 4, 3)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, images):
        return self.fc(self.bn1(self.conv1(images)).mean(dim=(2, 3)))
"""

# The interface of torchvision.models: builders, enums of weights, get_model, get_model_weights.
TORCHVISION = """
import enum, functools, types
from pathlib import Path
import torch
from torchvision.network import Net

FETCHED = []
ERROR = []

class Preset:
    def __init__(self, crop_size, resize_size):
        self.crop_size, self.resize_size = [crop_size], [resize_size]
        self.mean, self.std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

class WeightsEnum(enum.Enum):
    @classmethod
    def verify(cls, obj):
        return cls[obj.replace(cls.__name__ + ".", "")] if isinstance(obj, str) else obj

    transforms = property(lambda self: self.value.transforms)
    meta = property(lambda self: self.value.meta)

    def get_state_dict(self, progress=True, check_hash=False):
        FETCHED.append(self.name)
        if ERROR:
            raise ERROR[0]
        return torch.load(Path(__file__).with_name("tiny.pth"))

class Tiny_Weights(WeightsEnum):
    IMAGENET1K_V1 = types.SimpleNamespace(transforms=functools.partial(Preset, 24, 32), meta={"min_size": (1, 1)})
    IMAGENET1K_V2 = types.SimpleNamespace(transforms=functools.partial(Preset, 24, 24), meta={"min_size": (1, 1)})
    DEFAULT = IMAGENET1K_V2

def tiny(*, weights: Tiny_Weights | None = None, progress: bool = True, **kwargs):
    weights = Tiny_Weights.verify(weights)
    if weights is not None:
        if kwargs.get("num_classes", 1000) != 1000:
            raise ValueError("The parameter 'num_classes' expected value 1000.")
    model = Net(**kwargs)
    if weights is not None:
        model.load_state_dict(weights.get_state_dict(progress=progress, check_hash=True))
    return model

resnet18 = tiny

def get_model(name, **config):
    if name != "tiny":
        raise ValueError(f"Unknown model {name}")
    return tiny(**config)

def get_model_weights(name):
    if name not in ("tiny", tiny):
        raise ValueError(f"Unknown model {name}")
    return Tiny_Weights
"""

# The interface of timm: create_model, entry points, get_pretrained_cfg.
TIMM = """
from pathlib import Path
import torch
from timm.network import Net

FETCHED = []
ERROR = []

class PretrainedCfg:
    def __init__(self, tag):
        self.tag = tag

    def to_dict(self):
        return {
            "tag": self.tag, "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "classifier": "fc",
            "input_size": (3, 24, 24), "crop_pct": 0.75, "interpolation": "bicubic",
        }

def get_pretrained_cfg(model_name, allow_unregistered=True):
    name, _, tag = model_name.partition(".")
    return PretrainedCfg(tag or "a1_in1k") if name in ("tiny", "resnet18") else None

def tiny(pretrained=False, num_classes=1000, in_chans=3, pretrained_cfg_overlay=None):
    model = Net(num_classes, in_chans)
    model.pretrained_cfg = PretrainedCfg("a1_in1k").to_dict()
    if pretrained:
        FETCHED.append("tiny")
        if ERROR:
            raise ERROR[0]
        state = torch.load(Path(__file__).with_name("tiny.pth"))
        if num_classes != 1000:
            state = {name: value for name, value in state.items() if not name.startswith("fc")}
        if in_chans == 1:
            state["conv1.weight"] = state["conv1.weight"].sum(dim=1, keepdim=True)
        model.load_state_dict(state, strict=num_classes == 1000)
    return model
"""
CREATE = """
def create_model(model_name: str, pretrained: bool = False, checkpoint_path=None, **kwargs):
    from timm import models
    if model_name.startswith("local-dir:"):
        assert not pretrained
        model = models.tiny(**kwargs)
        model.pretrained_cfg["mean"] = (0.25, 0.25, 0.25)
        return model
    return models.tiny(pretrained=pretrained, **kwargs)
"""


def write_packages(folder: Path, *libraries: str) -> Path:
    """Writes both packages or one into a folder, with the state dict of their network beside them; returns its file."""
    import torch

    for library, models in (("torchvision", TORCHVISION), ("timm", TIMM)):
        if libraries and library not in libraries:
            continue
        package = folder / library
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(CREATE + "\nfrom timm import models\n" if library == "timm" else "")
        (package / "network.py").write_text(NETWORK)
        (package / "models.py").write_text(models)
        space: dict[str, type[torch.nn.Module]] = {}
        exec(NETWORK, space)
        torch.manual_seed(5)
        torch.save(space["Net"]().state_dict(), package / "tiny.pth")
    return package / "tiny.pth"
