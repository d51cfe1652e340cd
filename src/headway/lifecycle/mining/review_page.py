"""The page of a review: how the arms compare, and the images on which the network was wrong."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from headway.core.files import expect_inside, write_atomically
from headway.core.text_format import pluralise
from headway.data.reference import PILLOW_FORMATS
from headway.lifecycle.mining.picture_list import IMAGES
from headway.lifecycle.mining.review import Review
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.training.evaluation_panels import encode_small_image

LOG = logging.getLogger("headway.lifecycle")
SHOWN = 48
"""Images on the page."""


def write_review_page(path: Path, review: Review, wrong: Sequence[Mapping[str, str]]) -> None:
    """Writes the page beside the list and the images.

    Args:
        wrong: rows of the list whose label is not what the network proposed.
    """
    labelled = sum(arm.labelled for arm in review.arms)
    html = renderer.render(
        [*build_review_panels(review), *_build_pictures(path.parent, wrong)],
        title=f"Review of {path.parent.resolve().name}",
        subtitle=f"Headway mining: {pluralise(labelled, 'label')} came back, {len(wrong):,} unlike the proposals",
        sections=("Arms", "Mistakes"),
    )
    write_atomically(path, html)


def build_review_panels(review: Review) -> list[Panel]:
    """Builds the table of what each arm gave, and what it says."""
    columns, rows = review.build_table()
    note = (
        "A label teaches most where the network was wrong. The random arm shows how often that is without mining: only "
        "a difference whose interval lies above 0 shows that mining finds more."
    )
    panels = [
        panel.table("arms", "What each arm gave", columns, rows, section="Arms", order=200, width="full", note=note)
    ]
    if sentences := review.list_sentences():
        text = "\n".join(sentences)
        panels.append(panel.text("gains", "Gain over random picks", text, section="Arms", order=210, width="full"))
    return panels


def _build_pictures(folder: Path, wrong: Sequence[Mapping[str, str]]) -> list[Panel]:
    pictures = []
    for row in wrong[:SHOWN]:
        source = _encode_file(folder / IMAGES, Path(row["path"]).name)
        if source is not None:
            pictures.append((source, f"{row['label']}, not {row['proposed']}", f"{row['arm']}, {row['name']}"))
    if not pictures:
        return []
    note = f"The first {len(pictures)} of {len(wrong):,}: the label that people set, and what the network proposed."
    title = "Where the network was wrong"
    return [panel.images("mistakes", title, pictures, section="Mistakes", order=300, width="full", note=note)]


def _encode_file(folder: Path, name: str) -> str | None:
    """Returns an image of the list for the page; None if it cannot be read, or leads out of the folder."""
    try:
        expect_inside(folder, name)
        with Image.open(folder / name, formats=PILLOW_FORMATS) as image:
            return encode_small_image(image.convert("RGB"))
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception as error:
        LOG.warning(f"{folder / name}: it is left out of the page ({error}).")
        return None
