"""Decoding for an export, as in the evaluation of its run: the decoder, crop and resize of its manifest."""

from __future__ import annotations

from headway.data.data_recipe import CropRecipe
from headway.data.decode import Backend, choose_available_backend
from headway.data.host_transform import HostTransform
from headway.export.manifest import Manifest


def build_transform(manifest: Manifest) -> HostTransform:
    """Returns centre crop and resize."""
    crop = CropRecipe(share=manifest.crop_share)
    return HostTransform(size=manifest.size, channels=manifest.channels, crop=crop, scaled=manifest.scaled)


def choose_backend(manifest: Manifest) -> Backend:
    """Returns the decoder of the run, or Pillow with a warning if the native core is not here."""
    # A run on synthetic data has not chosen one.
    known: dict[str, Backend] = {"native": "native", "pillow": "pillow"}
    return choose_available_backend(known.get(manifest.decoder, "auto"))
