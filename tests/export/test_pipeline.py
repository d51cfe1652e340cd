"""Resize makes the pixels that the decoders make, and Pipeline computes what an evaluation computes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.conftest import absent

from headway.core.run_folder import RunFolder
from headway.data.augment import Augment
from headway.data.augment_recipe import AugmentRecipe
from headway.data.data_recipe import CropRecipe
from headway.data.decode import build_decoder, resolve_backend
from headway.data.decode_request import DecodeRequest
from headway.data.host_transform import HostTransform
from headway.data.records import Records
from headway.data.reference import RecordKind
from headway.export.dense_mixture import DenseMixture, densify_mixture
from headway.export.pipeline import Member, Pipeline, Resize, build_pipeline
from headway.model.gates import NoisyTopKGate, SwitchGate
from headway.model.mixture import MixtureOfExperts
from headway.training.average_outputs import average_outputs
from headway.training.evaluate import build_views, predict_outputs
from headway.training.runs import load_trained

Pixels = NDArray[np.uint8]


def draw(seed: int, *shape: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def decode(image: Pixels, size: tuple[int, int], share: float, backend: Any) -> Pixels:
    """The pixels that an evaluation sees."""
    h, w, channels = image.shape
    transform = HostTransform(size=size, channels=channels, crop=CropRecipe(share=share))
    boxes = transform.compute_boxes(np.empty(0, np.uint64), np.array([w], np.uint32), np.array([h], np.uint32), size)
    out = np.empty((1, *size, channels), np.uint8)
    kinds, shapes = np.array([RecordKind.RAW], np.uint8), np.array([image.shape], np.uint32)
    with closing(build_decoder(1, backend)) as decoder:
        records = Records.from_buffers([image.tobytes()])
        status = decoder.decode(DecodeRequest(records, boxes, out, kinds=kinds, shapes=shapes))
    assert not status.any()
    return out[0]


def resize(image: Pixels, size: tuple[int, int], share: float) -> Pixels:
    return Resize(size, share)(torch.from_numpy(image)[None])[0].numpy()


sides = st.integers(1, 70)


@given(sides, sides, sides, sides, st.sampled_from([1.0, 0.875, 0.33]), st.sampled_from([1, 3]))
def test_pixels_are_those_of_the_decoders(h: int, w: int, height: int, width: int, share: float, channels: int) -> None:
    image = draw(h * 100 + w, h, w, channels)
    found = resize(image, (height, width), share).astype(int)
    assert abs(found - decode(image, (height, width), share, "pillow")).max() <= 1
    assert abs(found - decode(image, (height, width), share, "auto")).max() <= 1


def test_few_pixels_differ_from_the_native_core() -> None:
    """Both round once; the core has 16 bits between its passes, so that only sums near a half differ."""
    if resolve_backend() != "native":
        absent("the native core is not built")
    image = draw(7, 120, 161, 3)
    difference = resize(image, (64, 64), 0.875) != decode(image, (64, 64), 0.875, "native")
    assert difference.mean() < 0.03


@pytest.mark.parametrize("size", [(8, 8), (20, 31)])
def test_an_image_of_the_size_stays_as_it_is(size: tuple[int, int]) -> None:
    image = draw(1, *size, 3)
    assert np.array_equal(resize(image, size, 1.0), image)


def test_the_crop_is_centred() -> None:
    """A box of whole pixels in the middle of an image that is twice as wide."""
    image = draw(2, 8, 16, 1)
    assert np.array_equal(resize(image, (8, 8), 1.0), image[:, 4:12])
    assert np.array_equal(resize(image, (4, 4), 0.5), image[2:6, 6:10])


class Affine(torch.nn.Module):
    """Sees where a pixel is: the views at test time change its outputs."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(values, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images.flatten(1))


@pytest.mark.parametrize(
    ("flip", "shift", "chooses"),
    [(False, 0, False), (True, 0, False), (False, 2, False), (True, 1, False), (True, 1, True)],
)
def test_a_member_is_normalisation_network_and_views(flip: bool, shift: int, chooses: bool) -> None:
    torch.manual_seed(0)
    mean, std = (120.0, 90.5, 3.25), (70.0, 66.6, 1.5)
    network, pixels = Affine(3 * 6 * 5), torch.from_numpy(draw(3, 4, 6, 5, 3))
    images = Augment(AugmentRecipe(mean=mean, std=std), "cpu").normalise(pixels)
    network.layer.weight.data.mul_(0.05)
    wanted: torch.Tensor | float = 0.0
    with torch.no_grad():
        for weight, view in build_views(images, flip=flip, shift=shift):
            wanted = network(view) * weight + wanted
        below = None
        if chooses:
            plain = network(images)
            sure = plain.softmax(1).amax(1)
            below = sure.median().item()
            assert 0 < (sure < below).sum() < len(sure)
            wanted = torch.where((sure < below)[:, None], wanted, plain)
        found = Member(network, mean, std, flip=flip, shift=shift, views_below=below)(pixels)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_network_that_normalises_gets_the_bytes() -> None:
    pixels, seen = torch.from_numpy(draw(4, 2, 5, 4, 3)), []

    class Look(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return images.float().mean((2, 3))

    Member(Look(), None, None)(pixels)
    assert seen[0].dtype == torch.uint8
    assert seen[0].equal(pixels.permute(0, 3, 1, 2))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "identity"])
def test_several_members_are_an_ensemble(activation: Any) -> None:
    torch.manual_seed(1)
    pixels = torch.from_numpy(draw(5, 6, 4, 4, 1))
    networks = [Affine(16) for _ in range(3)]
    members = [Member(one, (100.0,), (50.0 + n,)) for n, one in enumerate(networks)]
    pipeline = Pipeline(members, activation, size=(4, 4), channels=1, outputs=3)
    with torch.no_grad():
        outputs = [member(pixels) for member in members]
        found = pipeline(pixels)
    last = {"softmax": lambda x: x.softmax(1), "sigmoid": torch.sigmoid, "identity": lambda x: x}[activation]
    torch.testing.assert_close(found, last(average_outputs(activation, outputs)))
    # The mean of probabilities, or of numbers.
    torch.testing.assert_close(found, torch.stack([last(one) for one in outputs]).mean(0))


def test_the_pipeline_of_a_run(exported: Path) -> None:
    """Equal to the evaluation of the run to the last bit; the run's own network stays as it was."""
    setup = load_trained(RunFolder.open_trained(exported / "run"), wide=True)
    pixels = torch.from_numpy(draw(6, 9, 8, 8, 1))
    before = {name: value.clone() for name, value in setup.model.state_dict().items()}
    with closing(setup.inputs), torch.no_grad():
        pipeline = build_pipeline(setup)
        setup.model.eval()
        found, wanted = pipeline(pixels), predict_outputs(setup, pixels).softmax(1)
    assert found.equal(wanted)
    assert (pipeline.size, pipeline.channels, pipeline.outputs) == ((8, 8), 1, 10)
    assert not any(module.training for module in pipeline.modules())
    with torch.no_grad():
        next(pipeline.parameters()).zero_()
    assert all(value.equal(before[name]) for name, value in setup.model.state_dict().items())


@pytest.mark.parametrize("gate", ["noisy", "switch"])
def test_a_dense_mixture_is_a_mixture(gate: str) -> None:
    torch.manual_seed(2)
    made = NoisyTopKGate(6, 5, k=2) if gate == "noisy" else SwitchGate(6, 5)
    torch.nn.init.normal_(made.weight)
    mixture = MixtureOfExperts(6, 7, experts=5, gate=made).eval()
    for shape in ((1, 6), (4, 3, 6), (2, 5, 3, 6)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(DenseMixture(mixture)(x), mixture(x), rtol=1e-5, atol=1e-6)


def test_an_answer_does_not_depend_on_other_images(caplog: pytest.LogCaptureFixture) -> None:
    """With a capacity it does: which tokens find room depends on the rest of the batch."""
    torch.manual_seed(2)
    made = SwitchGate(6, 5)
    torch.nn.init.normal_(made.weight)
    mixture = MixtureOfExperts(6, 7, experts=5, gate=made, capacity_factor=0.5).eval()
    exported, x = densify_mixture(mixture, "blocks.1"), torch.randn(9, 6)
    assert "blocks.1 has capacity_factor=0.5" in caplog.text
    with torch.no_grad():
        together, alone = exported(x), torch.cat([exported(one) for one in x.split(1)])
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(together, mixture(x)), "the run has dropped some"
        mixture.capacity_factor = None
        torch.testing.assert_close(together, mixture(x), rtol=1e-5, atol=1e-6)
