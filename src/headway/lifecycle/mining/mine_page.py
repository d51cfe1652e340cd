"""The page of a folder of picks: what was chosen and why, what was out, and how the arms compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from headway.core.files import write_atomically
from headway.core.text_format import pluralise
from headway.data.dataset import Dataset
from headway.lifecycle.mining.choose import RANDOM
from headway.lifecycle.mining.mine_result import PAGE, MineResult
from headway.lifecycle.mining.review_page import build_review_panels
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.training.evaluation_panels import encode_thumbnail

SHOWN_PICKS, SHOWN_CLUSTERS, SHOWN_COPIES = 24, 12, 3
"""Images of each arm, clusters of near copies, and copies of each cluster on the page. `mine.json` has all."""
SECTIONS = ("Choice", "Arms", "Near copies")


def write_page(result: MineResult, sets: Mapping[str, Dataset]) -> Path:
    """Writes the page into the folder of a result and returns its path.

    Args:
        sets: the pool, and the labelled and held-out sets, by name.
    """
    path = result.folder / PAGE
    html = renderer.render(
        build_panels(result, sets),
        title=f"Picks of {Path(result.pool).name or result.pool}",
        subtitle=f"Headway mining by {result.about['strategy']}: {pluralise(len(result.picks), 'image')} to label",
        sections=SECTIONS,
    )
    write_atomically(path, html)
    return path


def build_panels(result: MineResult, sets: Mapping[str, Dataset]) -> list[Panel]:
    """Builds the panels of the page."""
    panels = [_build_cards(result), _build_class_bars(result), *_build_score_line(result)]
    if result.review is not None:
        panels += build_review_panels(result.review)
    panels += _build_pictures(result, sets["pool"])
    panels += _build_cluster_pictures(result, sets)
    return panels


def _build_cards(result: MineResult) -> Panel:
    num_random = sum(pick.arm == RANDOM for pick in result.picks)
    cards = [
        ("images in the pool", f"{result.images:,}", f"{result.damaged:,} cannot be decoded" if result.damaged else ""),
        (
            "to choose from",
            f"{len(result.candidates):,}",
            "with near copies" if result.copies is None else "without copies",
        ),
        ("picks", f"{len(result.picks):,}", f"{num_random:,} of them random"),
        ("networks", f"{result.candidates.members:,}", "whose probabilities are averaged"),
    ]
    note = (
        "The random picks are an unbiased sample of the images to choose from, whatever weights and quotas say: they "
        "measure the network there, and they show what the other picks are worth. Once labels have come, headway mine "
        "FOLDER --review writes a page with both."
    )
    return panel.cards("choice", "Choice", cards, section="Choice", order=100, note=note)


def _build_class_bars(result: MineResult) -> Panel:
    classes, candidates = result.candidates.classes, result.candidates
    predicted = candidates.probabilities.argmax(axis=1)
    arms = list(dict.fromkeys(pick.arm for pick in result.picks))
    stacks = []
    for arm in arms:
        places = [pick.place for pick in result.picks if pick.arm == arm]
        stacks.append((arm, np.bincount(predicted[places], minlength=len(classes)).astype(float).tolist()))
    # Hundreds of classes cannot be read as bars: those with the most picks are shown.
    totals = np.sum([values for _, values in stacks], axis=0)
    shown = np.sort(np.argsort(-totals, kind="stable")[:40])
    return panel.bars(
        "classes",
        "Picks by predicted class",
        [classes[number] for number in shown],
        [(arm, [values[number] for number in shown]) for arm, values in stacks],
        x_label="images",
        section="Choice",
        order=110,
        note="The class that the networks propose; people decide." if len(classes) <= 40 else "The 40 largest classes.",
    )


def _build_score_line(result: MineResult) -> list[Panel]:
    scores = [pick.score for pick in result.picks if pick.score is not None]
    if not scores:
        return []
    x = list(range(1, len(scores) + 1))
    return [
        panel.lines(
            "scores",
            "Scores of the mined picks",
            [("score", x, [float(f"{score:.4g}") for score in scores])],
            x_label="pick",
            y_label=str(result.about["strategy"]),
            section="Choice",
            order=120,
            note="In the order in which they were taken; those of a quota follow each other.",
        )
    ]


def _build_pictures(result: MineResult, pool: Dataset) -> list[Panel]:
    panels = []
    rows = result.rows
    for number, arm in enumerate(sorted({row["arm"] for row in rows}, key=lambda name: name == RANDOM)):
        pictures = []
        for row in [row for row in rows if row["arm"] == arm][:SHOWN_PICKS]:
            score = "" if row["score"] is None else f"score {row['score']:.3g}, "
            caption = f"{row['proposed']}? {row['probability']:.0%}"
            pictures.append((encode_thumbnail(pool, row["sample"]), caption, f"{score}{row['name']}"))
        total = sum(row["arm"] == arm for row in rows)
        title = f"Picks: {arm}"
        note = f"The first {len(pictures)} of {total:,}, each with the proposed class and its probability."
        panels.append(
            panel.images(f"picks-{arm}", title, pictures, section="Choice", order=130 + number, width="full", note=note)
        )
    return panels


def _build_cluster_pictures(result: MineResult, sets: Mapping[str, Dataset]) -> list[Panel]:
    if result.copies is None or not result.copies.clusters:
        return []
    pictures = []
    # The largest clusters first.
    clusters = sorted(result.copies.clusters, key=lambda one: -len(one.out))
    for number, cluster in enumerate(clusters[:SHOWN_CLUSTERS], 1):
        name, sample = cluster.kept
        own = f"{sets[name].name(sample)}, {int(sets[name].width[sample])} x {int(sets[name].height[sample])}"
        pictures.append((encode_thumbnail(sets[name], sample), f"{number}: kept, {name}", own))
        for out in cluster.out[:SHOWN_COPIES]:
            size = f"{int(sets['pool'].width[out])} x {int(sets['pool'].height[out])}"
            caption = f"{number}: out, {len(cluster.out):,} in all" if len(cluster.out) > 1 else f"{number}: out"
            pictures.append((encode_thumbnail(sets["pool"], out), caption, f"{sets['pool'].name(out)}, {size}"))
    total = int(result.copies.is_out.sum())
    note = (
        f"{pluralise(total, 'image')} of the pool in {pluralise(len(clusters), 'cluster')} are not chosen because a "
        f"copy is labelled, held out, or better resolved. The {min(len(clusters), SHOWN_CLUSTERS)} largest; mine.json "
        "has all. Nothing is deleted."
    )
    title = "Near copies"
    return [panel.images("copies", title, pictures, section="Near copies", order=300, width="full", note=note)]
