"""The layer where strips become samples: chosen by rows, checked on shapes. `test_strips.py` trains with it."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from headway import model
from headway.core.errors import UsageError
from headway.parallel.until import check_until, choose_until


class Tail(nn.Module):
    """Behind the body: a function without a rule, a residual, and batch norm of maps and of features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 5, 2, 2), nn.BatchNorm2d(6), nn.ReLU())
        self.tail = nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.features, self.head = nn.BatchNorm2d(6), nn.BatchNorm1d(18), nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.body(x))
        x = (x + self.norm(x)).cumsum(2).view(len(x), 18, -1).mean(2)
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Flipped(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(2))  # type: ignore[no-any-return]


@pytest.mark.check
def test_strips_end_where_a_rank_would_have_less_than_four_rows() -> None:
    """Or before a function without a rule."""
    network = model.resnet18()
    assert choose_until(network, (2, 3, 224, 224), (2, 1)).layer == "layer4"
    assert choose_until(network, (2, 3, 224, 224), (4, 1)).layer == "layer3"
    assert choose_until(network, (2, 3, 256, 256), (2, 1)).layer is None
    assert choose_until(Tail(), (4, 3, 30, 21), (2, 2)).layer == "tail"
    with pytest.raises(UsageError, match=r"^Tail: Tensor\.cumsum has no rule.* Set parallel\.until to tail,"):
        check_until(Tail(), (4, 3, 30, 21), (2, 2), None)
    check_until(Tail(), (4, 3, 30, 21), (2, 2), "tail")
    network = Flipped(nn.Conv2d(3, 4, 3))
    with pytest.raises(UsageError, match=r"^Flipped: Tensor\.flip has no rule"):
        choose_until(network, (2, 3, 16, 16), (2, 1))
    with pytest.raises(UsageError, match=r"^Flipped: Tensor\.flip has no rule.* Train with parallel: data, or change"):
        check_until(network, (2, 3, 16, 16), (2, 1), None)


def test_a_layer_that_no_strip_enters_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'lyer4' is no layer of the network.* Did you mean 'layer4'"):
        check_until(model.resnet18(), (2, 3, 64, 64), (2, 1), "lyer4")
    with pytest.raises(UsageError, match="no split map enters layer 'fc'"):
        check_until(model.resnet18(), (2, 3, 64, 64), (2, 1), "fc")
    # The shortcut needs the strip as well.
    with pytest.raises(UsageError, match="values of samples"):
        check_until(model.resnet18(), (2, 3, 64, 64), (2, 1), "layer2.0.conv1")
