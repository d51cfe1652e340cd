from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model import measure_model_size
from headway.model.model_size import ModelSize


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(8, 16, (1, 3), groups=4, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 5 * 3, 7)
        self.drop = nn.Dropout()

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.grouped(self.conv(images)))
        logits = self.head(self.drop(hidden.flatten(1)))
        return F.linear(logits, torch.ones(2, 7, device=logits.device))


def test_a_small_network_by_hand() -> None:
    model = Small()
    model.norm.eval()
    random = torch.get_rng_state()
    found = measure_model_size(model, torch.zeros(3, 4, 10, 10))
    convolutions = 25 * 8 * 4 * 9 + 15 * 16 * 2 * 3
    assert found.multiply_adds == convolutions + 240 * 7 + 7 * 2
    assert found.parameters == 8 * 36 + 8 + 16 * 2 * 3 + 32 + 240 * 7 + 7
    assert (model.training, model.drop.training, model.norm.training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(value.grad is None for value in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert measure_model_size(model, torch.zeros(1, 4, 10, 10)) == found
    assert measure_model_size(Small().to("meta"), torch.zeros(1, 4, 10, 10, device="meta")) == found


def test_it_is_said_in_words() -> None:
    assert ModelSize(25_557_032, 4_089_184_256).describe() == "25,557,032 parameters, 4.089 billion multiply-adds"
    assert ModelSize(1_972_792, 210_500_000).describe() == "1,972,792 parameters, 210.5 million multiply-adds"
    assert ModelSize(650, 640).describe() == "650 parameters, 640 multiply-adds"
    assert ModelSize(650, None).describe() == "650 parameters"
