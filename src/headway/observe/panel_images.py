"""Pictures and texts of panels for services that draw no panels: contact sheets, heat maps, Markdown tables."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from headway.page.panel import Panel

# Pixels of a cell of a contact sheet; images keep their shape inside.
CELL = 128
CAPTION_HEIGHT = 14
# Letters of Pillow's built-in font that fit under an image.
CAPTION_LETTERS = 20
# Pixels of a cell of a matrix, at most.
MATRIX_CELL = 36
MATRIX_SIDE = 1024
MAX_MATRIX_LABELS = 40
# A service shows the first rows of a long table.
MAX_ROWS = 200


def encode_image(image: Image.Image, form: str = "PNG", **options: Any) -> str:
    """Returns an image as the data URI that a panel of kind `images` holds; `read_images` reads it."""
    out = io.BytesIO()
    image.save(out, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def read_images(panel: Panel) -> list[tuple[Image.Image, str]]:
    """Returns (image, caption) of each image of a panel of kind `images`."""
    found = []
    for entry in panel.data["images"]:
        _, _, data = entry["src"].partition("base64,")
        image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        found.append((image, "; ".join(text for text in (entry["caption"], entry["note"]) if text)))
    return found


def draw_panel(panel: Panel) -> Image.Image | None:
    """Draws a panel of kind `images` or `matrix`; returns None for any other kind."""
    if panel.kind == "images":
        return _draw_contact_sheet(read_images(panel))
    return _draw_matrix(panel) if panel.kind == "matrix" else None


def list_rows(panel: Panel) -> tuple[list[str], list[list[str]]] | None:
    """Returns (columns, rows) of a panel of kind `table` or `matrix`; None for any other kind.

    A matrix becomes its cells that are not zero, largest first.
    """
    if panel.kind == "table":
        return panel.data["columns"], panel.data["rows"]
    if panel.kind != "matrix":
        return None
    names, values = panel.data["names"], panel.data["values"]
    cells = [(value, y, x) for y, row in enumerate(values) for x, value in enumerate(row) if value]
    cells.sort(key=lambda cell: (-cell[0], cell[1], cell[2]))
    columns = [panel.data["y_label"], panel.data["x_label"], "count"]
    return columns, [[names[y], names[x], f"{value:g}"] for value, y, x in cells]


def format_markdown(panel: Panel) -> str:
    """Returns title, note and rows of a panel as Markdown; without rows, title and note."""
    lines = [f"**{panel.title}**", "", panel.note, ""]
    if (table := list_rows(panel)) is not None:
        columns, rows = table
        lines += [_join_cells(columns), "|" + "---|" * len(columns), *map(_join_cells, rows[:MAX_ROWS])]
        if len(rows) > MAX_ROWS:
            lines += ["", f"The first {MAX_ROWS} of {len(rows):,} rows."]
    return "\n".join(lines)


def _join_cells(cells: list[str]) -> str:
    # A bar or a line end in a cell would begin another cell or row.
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _draw_contact_sheet(images: list[tuple[Image.Image, str]]) -> Image.Image:
    columns = min(len(images), 8)
    rows = math.ceil(len(images) / columns)
    sheet = Image.new("RGB", (columns * CELL, rows * (CELL + CAPTION_HEIGHT)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (image, caption) in enumerate(images):
        left, top = place % columns * CELL, place // columns * (CELL + CAPTION_HEIGHT)
        scale = (CELL - 4) / max(image.size)
        # Small images are enlarged by whole pixels, so that each one stays visible.
        kernel = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        sheet.paste(image.resize(size, kernel), (left + 2, top + 2))
        pen.text((left + 2, top + CELL), _fit_text(caption), fill="black")
    return sheet


def _draw_matrix(panel: Panel) -> Image.Image:
    names, values = panel.data["names"], np.array(panel.data["values"], np.float64)
    side = max(1, min(MATRIX_CELL, MATRIX_SIDE // max(len(names), 1)))
    has_labels = len(names) <= MAX_MATRIX_LABELS
    margin = CELL if has_labels else 0
    # Shares of each row: classes with few samples show as well as those with many.
    shares = values / np.maximum(values.sum(axis=1, keepdims=True), 1e-12)
    pixels = np.repeat(np.repeat((255 * (1 - shares)).astype(np.uint8), side, axis=0), side, axis=1)
    picture = Image.new(
        "RGB", (margin + pixels.shape[1], pixels.shape[0] + (CAPTION_HEIGHT if has_labels else 0)), "white"
    )
    # Blue by count: red and green channels fall, blue stays.
    blue = np.stack([pixels, pixels, np.full_like(pixels, 255)], axis=-1)
    picture.paste(Image.fromarray(blue), (margin, 0))
    if has_labels:
        pen = ImageDraw.Draw(picture)
        for place, name in enumerate(names):
            pen.text((2, place * side + side // 2 - 6), _fit_text(name), fill="black")
            for column, value in enumerate(values[place]):
                if value:
                    colour = "white" if shares[place, column] > 0.5 else "black"
                    pen.text((margin + column * side + 4, place * side + side // 2 - 6), f"{value:g}", fill=colour)
        pen.text((margin, pixels.shape[0]), f"{panel.data['x_label']}, in the order of the rows", fill="black")
    return picture


def _fit_text(text: str) -> str:
    # The built-in font has no letters beyond Latin-1 in builds of Pillow without FreeType.
    shown = text.encode("latin-1", "replace").decode("latin-1")
    return shown if len(shown) <= CAPTION_LETTERS else shown[: CAPTION_LETTERS - 3] + "..."
