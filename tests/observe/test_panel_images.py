"""Pictures and texts of panels for TensorBoard, MLflow and W&B."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from headway.observe.panel_images import draw_panel, format_markdown, list_rows, read_images
from headway.page import panel


def encode(colour: tuple[int, int, int], size: tuple[int, int] = (4, 4)) -> str:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def test_a_contact_sheet_shows_every_image() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    pictures = [(encode(colour), f"image {colour}", "note") for colour in colours]
    sheet = draw_panel(panel.images("some", "Some", pictures))
    assert sheet is not None
    assert sheet.size == (3 * 128, 142)
    assert [sheet.getpixel((place * 128 + 64, 64)) for place in range(3)] == colours
    images = read_images(panel.images("some", "Some", pictures))
    assert images[0][1] == "image (255, 0, 0); note"
    # Letters that the built-in font lacks, and names of any length.
    assert draw_panel(panel.images("some", "Some", [(encode((0, 0, 0), (900, 3)), "\u732b" * 40, "")])) is not None


def test_a_matrix_is_a_heat_map_and_its_cells() -> None:
    one = panel.matrix("confusion", "Confusion", ["cat", "a|b"], [[8, 2], [0, 5]], note="7 of 10.")
    picture = draw_panel(one)
    assert picture is not None
    pixels = np.asarray(picture)
    # Right of the labels: a row's share of 80 % is darker than one of 20 %.
    assert pixels[2, 128 + 30].tolist() == [50, 50, 255]
    assert pixels[2, 128 + 36 + 30].tolist() == [204, 204, 255]
    assert list_rows(one) == (
        ["true", "predicted", "count"],
        [["cat", "cat", "8"], ["a|b", "a|b", "5"], ["cat", "a|b", "2"]],
    )
    text = format_markdown(one)
    assert "7 of 10." in text
    assert "| a\\|b | a\\|b | 5 |" in text
    many = panel.matrix("confusion", "Confusion", [str(number) for number in range(1000)], np.eye(1000).tolist())
    large = draw_panel(many)
    assert large is not None
    assert large.size == (1000, 1000)


def test_a_table_is_markdown_and_no_picture() -> None:
    one = panel.table("classes", "Classes", ["class", "f1"], [["cat\n", "0.5"]] * 300)
    assert draw_panel(one) is None
    text = format_markdown(one)
    assert "| class | f1 |\n|---|---|\n| cat  | 0.5 |" in text
    assert "The first 200 of 300 rows." in text
