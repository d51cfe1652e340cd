"""What docs/decks.md stands on: every number of the decks has a figure or a reason, every figure a verdict, every claim
its measurement."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from bench._accuracy import batch_arms, batch_curve, batch_error
from bench._accuracy.batch_arms import CELLS, Cell
from bench._accuracy.batch_arms import SEEDS as TABLE_SEEDS
from bench._accuracy.batch_worker import run_recipe
from bench._accuracy.results import Results
from bench._decks import alexnet, drawing, from_catalog, from_results, statements, studies
from bench._decks.figure import Figure, Ours, read_figures
from bench._decks.numbers import REASONS, compare_texts, extract_numbers, find_faults, read_lines
from bench._decks.page import PAGE, build_rows, format_page
from bench._decks.studies import SEEDS, STUDIES, TUNING_SEED, Job, Runs, has_diverged, summarise_epochs
from bench._decks.verdict import NAMES, judge
from bench._drawing import FOLDER
from tests._support import packed_digits
from tests.conftest import ROOT

from headway.core.recipe import read_recipe
from headway.export.deck import TENSORRT, read_deck
from headway.plan.growth import PF_S_DAY
from headway.setup.recipe import TrainRecipe

TEXTS = Path(os.environ.get("HEADWAY_DECKS") or ROOT.parent / "shared/sources")
GAIN = Figure("gain", "B", "Table 1", "a gain", "3.0", "points", "large:gain", "gain", "")


def test_every_number_of_the_decks_has_a_figure_or_a_reason() -> None:
    lines, figures = read_lines(), read_figures()
    assert list(find_faults(lines, figures)) == []
    assert len({figure.id for figure in figures}) == len(figures) >= 200
    # A reason that no number has would hide a mistake in the list.
    assert {mark for line in lines for mark in line.marks} >= REASONS.keys()


def test_a_number_without_a_row_is_named() -> None:
    lines, figures = read_lines(), read_figures()
    place = next(at for at, line in enumerate(lines) if "b-p40-fp32" in line.marks)
    gone = [figure for figure in figures if figure.id != "b-p40-fp32"]
    (fault,) = find_faults(lines, gone)
    assert "172 belongs to 'b-p40-fp32', which is neither" in fault
    more = [*lines[:place], replace(lines[place], numbers=(*lines[place].numbers, "7")), *lines[place + 1 :]]
    assert [fault for fault in find_faults(more, figures) if "numbers, and marks for" in fault]
    other = [replace(figure, value="171") if figure.id == "b-p40-fp32" else figure for figure in figures]
    (fault,) = find_faults(lines, other)
    assert fault == "b-p40-fp32 is 171, and the deck prints [172.0]"


def test_the_list_has_the_numbers_of_the_decks_texts(tmp_path: Path) -> None:
    found = extract_numbers("no\n1,600 MB/s, .001 and 0.9\n(2017) 5,6")
    assert found == {2: ("1,600", ".001", "0.9"), 3: ("2017", "5", "6")}
    for place in range(5):
        (tmp_path / f"{place:03d}.txt").write_text("only 1 number\n")
    faults = list(compare_texts(tmp_path))
    assert faults[0] == "deck A, line 1: the text has ('1',), the list None"
    # One number more in each deck, apart from the one whose first line has numbers in the list.
    assert len(faults) == len(read_lines()) + 4


@pytest.mark.skipif(not TEXTS.is_dir(), reason="the decks' texts are not a part of Headway: set HEADWAY_DECKS")
def test_the_list_is_that_of_the_decks_own_texts() -> None:
    assert list(compare_texts(TEXTS)) == []


def test_the_page_is_what_results_and_planner_give() -> None:
    """If it fails, a result or the planner has changed: `make decks` writes the page anew."""
    rows = build_rows()
    assert PAGE.read_text(encoding="utf-8") == format_page(rows)
    assert {row.verdict.name for row in rows} <= set(NAMES)
    for row in rows:
        reason = row.verdict.text.partition(": ")[2]
        assert reason or row.verdict.name in ("reproduced", "planned"), row.figure.id


def test_claims_stand_in_their_page_as_they_are_stored() -> None:
    claims = from_results.read_claims()
    used = {figure.ours.partition(":")[2] for figure in read_figures() if figure.ours.startswith("claim:")}
    assert used <= claims.keys()
    pages = {one["page"]: (ROOT / one["page"]).read_text(encoding="utf-8") for one in claims.values()}
    for name, one in claims.items():
        lines = [line for line in pages[one["page"]].splitlines() if one["shown"] in line]
        assert lines, f"{one['page']} has no {one['shown']!r} of {name}"
        if f"`{name}`" in pages[one["page"]]:
            assert any(f"`{name}`" in line for line in lines), f"{name} stands in another line"
        numbers_shown = [float(number.replace(",", "")) for number in re.findall(r"-?[\d,]*\d(?:\.\d+)?", one["shown"])]
        for value in (one["value"], one.get("low"), one.get("high")):
            assert value is None or any(is_shown(value, number) for number in numbers_shown), name


def is_shown(value: float, number: float) -> bool:
    """Millions are words in a page, and bytes over a formula's are shown as the difference."""
    return any(math.isclose(value, one) for one in (number, number * 1e6, 1 + number)) or value == 0


def test_figures_of_the_inference_tables_are_those_that_a_table_compares() -> None:
    figures = {figure.id: figure for figure in read_figures()}
    for row in read_deck():
        key = "e-cpu-" + re.sub(r"[^a-z0-9]", "", row.network.lower())
        found = [figures[f"{key}-{end}"].number for end in ("ms-without", "ms-with", "rate-without", "rate-with")]
        assert found == [row.without_ms, row.with_ms, row.without_images_s, row.with_images_s]
    gains = sorted(figure.number or 0 for figure in figures.values() if figure.slide == "TensorRT")
    assert gains == sorted([40, *(gain for *_, gain in TENSORRT)])


@pytest.mark.parametrize(
    ("rule", "value", "ours", "name"),
    [
        ("=", "5", Ours("counted", 5.0), "reproduced"),
        ("=", "5", Ours("counted", 4.0), "refuted here"),
        ("~10", "2", Ours("measured", 1.81), "reproduced"),
        ("~10", "2", Ours("measured", 1.79), "refuted here"),
        ("at least 80 %", "10", Ours("measured", 8.0), "reproduced"),
        ("at least 80 %", "10", Ours("measured", 7.9), "refuted here"),
        (">=2", "2", Ours("measured", 2.1, low=2.0, high=2.2), "reproduced"),
        (">=2", "2", Ours("measured", 2.1, low=1.9, high=2.2), "undecided here"),
        (">=2", "2", Ours("measured", 1.8, low=1.7, high=1.9), "refuted here"),
        ("<=0.5", "", Ours("measured", 0.4), "reproduced"),
        (">=-1", "", Ours("measured", 0.3, low=-0.6, high=0.3), "reproduced"),
        ("order", "100", Ours("counted", 162.0), "reproduced"),
        ("order", "100", Ours("counted", 16.0), "refuted here"),
        ("plan", "200", Ours("planned", 190.0), "planned"),
        ("plan", "", Ours("planned", holds=True), "planned"),
        ("plan", "", Ours("planned", holds=False), "refuted here"),
        ("plan-order", "100", Ours("planned", 449.0), "planned"),
        ("onednn", "10", Ours("measured", 8.0), "reproduced"),
        ("onednn", "10", Ours("measured", 7.9), "undecided here"),
        ("gain", "3", Ours("measured", 2.0, low=0.1, high=3.9), "reproduced"),
        ("gain", "3", Ours("measured", 2.0, low=-0.1, high=4.1), "undecided here"),
        ("gain", "3", Ours("measured", 1.0, low=-0.1, high=2.1), "refuted here"),
        ("gain", "3", Ours("measured", -1.0, low=-2.0, high=-0.1), "refuted here"),
        ("", "3", None, "not measurable here"),
    ],
)
def test_a_verdict_follows_from_its_rule(rule: str, value: str, ours: Ours | None, name: str) -> None:
    assert judge(replace(GAIN, rule=rule, value=value, ours=GAIN.ours if ours else ""), ours).name == name


def test_a_verdict_says_how_far_off_and_why() -> None:
    assert judge(replace(GAIN, rule="plan", value="200"), Ours("planned", 190.0)).text == "planned within 5 %"
    off = judge(replace(GAIN, rule="plan", value="200"), Ours("planned", 289.0, holds=True))
    assert off.text == "planned within 45 %; in the band of 90 %"
    assert judge(replace(GAIN, rule="plan", value="36"), Ours("planned", 36.0)).text == "planned within 0 %"
    assert judge(replace(GAIN, rule="=", note="why"), Ours("counted", 1.0)).text == "refuted here: why"
    assert judge(GAIN, Ours("measured", 1.0, low=-0.1, high=2.1)).text == "refuted here: it is at most 2.1"
    assert judge(replace(GAIN, rule="", ours="", note="a GPU"), None).text == "not measurable here: a GPU"
    assert judge(GAIN, None).text == "not measured yet: `python -m bench.decks --train` does it"
    speed = replace(GAIN, ours="inference:vgg16/gain/small", rule="onednn", note="another machine")
    assert judge(speed, None).text == "not measured yet: `python -m bench.export --only deck` does it"
    assert judge(replace(speed, rule=""), None).text == "not measurable here: another machine"
    with pytest.raises(ValueError, match="has the rule 'about'"):
        judge(replace(GAIN, rule="about"), Ours("measured", 1.0))


def test_trends_are_worked_out_by_hand() -> None:
    # 0.724 billion multiply-adds x 2 x 3 x 90 x 1.2 million = 4.7e17 operations, of 8.64e19 in a PF/s-day.
    assert from_catalog.count_alexnet() == pytest.approx(0.7244e9 * 2 * 3 * 90 * 1.2e6, rel=1e-3)
    assert from_catalog.count_alexnet() / PF_S_DAY == pytest.approx(0.00543, rel=1e-2)
    # 2 PF/s are 16 V100 at 125 TFLOP/s, and 7 A100 at 312.
    assert [from_catalog.count_devices(2.0, name) for name in ("v100", "a100", "h100")] == [16, 7, 3]
    # 300,000 miles x 2 days / 5 hours on the same nodes.
    assert from_catalog.find_facility("road-days").value == pytest.approx(2.8e6 / (300_000 / 5 * 24), rel=1e-12)


def test_the_page_on_large_batches_has_the_kept_runs() -> None:
    """If it fails, write the new means into the tables of docs/accuracy.md."""
    page, tables = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8"), from_results.read_tables()
    arms = {"sgd": "SGD |", "linear": "linear", "lars": "+ LARS", "ghost": "+ no decay", "nag": "NAG"}
    arms |= {"lbsgd": "LBSGD", "muon": "Muon |", "soap": "SOAP |"}
    arms |= {"alike": "SGD with the schedule", "muon_free": "Muon without `normalise`"}
    for arm, title in arms.items():
        batches = [batch for batch in (256, 2048, 8192) if Cell(batch, arm) in CELLS]
        cells = [describe_spread(tables.accuracies(Cell(batch, arm))) for batch in batches]
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {title}") and "+-" in line]
        for cell in cells:
            assert f" {cell} |" in line
    curve = from_results.read_curve()
    steps = " | ".join(f"{steps:,.0f}" for _, steps, _ in curve.points())
    assert f"| steps to 60 %, mean of three seeds | {steps} |" in page


def test_the_page_of_advice_has_the_kept_runs() -> None:
    """If it fails, write the new means into the tables of docs/large-batches.md, and into the recipe's head."""
    page, tables = (ROOT / "docs/large-batches.md").read_text(encoding="utf-8"), from_results.read_tables()
    titles = {"sgd": "SGD", "linear": "SGD, linear scaling, warm-up", "ghost": "LARS and all other switches"}
    titles |= {"soap": "SOAP", "muon": "Muon", "muon_free": "Muon without `normalise`"}
    titles |= {"alike": "SGD, the schedule of Muon and SOAP, no decay of biases, beta and gamma"}
    means = {cell: tables.mean(cell) for cell in CELLS}
    for arm, title in titles.items():
        cells = [means.get(Cell(batch, arm)) for batch in (256, 2048, 8192)]
        assert f"| {title} |{'|'.join(' ' if one is None else f' {100 * one:.1f} ' for one in cells)}|" in page
    pairs = {"linear scaling and": ("sgd", "linear"), "LARS |": ("linear", "lars"), "no weight": ("lars", "ghost")}
    pairs |= {"Muon with its": ("ghost", "muon"), "SOAP with its": ("ghost", "soap")}
    for title, (without, with_it) in pairs.items():
        gains = [100 * (means[Cell(batch, with_it)] - means[Cell(batch, without)]) for batch in (2048, 8192)]
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {title}")]
        assert line.endswith(f"| {gains[0]:.1f} | {gains[1]:.1f} |")
    head = (ROOT / "recipes/large-batch.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
    assert (
        f"{100 * means[Cell(2048, 'muon')]:.1f} % at 2,048, where SGD has {100 * means[Cell(256, 'sgd')]:.1f} %" in head
    )


def test_what_muon_leaves_to_sgd_learns_at_the_best_rates_of_the_kept_runs() -> None:
    tables, curve = from_results.read_tables(), from_results.read_curve().curve
    assert {batch: tables.best(Cell(batch, "sgd")) for batch in batch_arms.BEST_SGD} == batch_arms.BEST_SGD
    assert {batch: curve.search(batch)[1] for batch in batch_curve.BATCHES} == batch_curve.BEST_SGD


def test_the_page_has_the_error_by_batch() -> None:
    """If it fails: `python -m bench.large_batch --error --minutes 0` draws the picture anew and prints the table."""
    page, curve = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8"), from_results.read_error_curve()
    rows = [row for row in curve.list_rows()[1:] if row[2] != "missing"]
    for title, cells in zip(("batch", "learning rate", "error %, 12 epochs"), zip(*rows, strict=True), strict=False):
        assert f"| {title} | {' | '.join(cells)} |\n" in page
    assert (FOLDER / "error-by-batch.svg").read_text(encoding="utf-8") == batch_error.draw_errors(curve)
    assert "images/error-by-batch.svg" in page


def describe_spread(accuracies: list[float]) -> str:
    assert len(accuracies) == len(TABLE_SEEDS)
    mean = sum(accuracies) / len(accuracies)
    spread = math.sqrt(sum((one - mean) ** 2 for one in accuracies) / (len(accuracies) - 1))
    return f"{100 * mean:.2f} +- {100 * spread:.2f}"


def test_every_study_is_a_grid_of_recipes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    seen = set()
    for job in Runs([]).list_missing():
        kind = (job.study, job.arm)
        if kind not in seen:
            seen.add(kind)
            path.write_text(yaml.safe_dump(job.build_recipe("packed")))
            recipe = read_recipe(path, (), TrainRecipe).recipe
            scale = getattr(recipe.optimizer, "batch_scale", 1)
            assert recipe.batch * scale == job.batch
            assert recipe.epochs == studies.EPOCHS[job.study]
    assert {study for study, _ in seen} == set(STUDIES)


def test_the_larger_batches_follow_from_the_sweep() -> None:
    kept: list[dict[str, object]] = []
    while missing := [job for job in Runs(kept).list_missing() if job.study == "rules"]:
        kept += [{**job.build_key(), "accuracy": 0.5 - abs(job.lr - 0.2)} for job in missing]
    runs = Runs(kept)
    assert runs.find_rule_rate() == 0.2
    assert len(runs.select("rules", batch=1024, arm="root")) == len(SEEDS)
    tree = Job("rules", "root", 4096, 0.2, 1).build_recipe("packed")
    assert tree["optimizer"]["lr"] == pytest.approx(0.8)
    assert tree["schedule"]["warmup_start"] == 1 / 16
    assert Runs([{**one, "settings": "other"} for one in kept]).find_rule_rate() is None
    assert {job.seed for job in Runs([]).list_missing() if job.study == "rules"} == {TUNING_SEED}


def test_the_decay_of_biases_is_compared_at_the_best_rate_of_each_arm() -> None:
    kept: list[dict[str, object]] = []
    best = {"all": 2.0, "weights": 8.0}
    while missing := [job for job in Runs(kept).list_missing() if job.study == "alexnet"]:
        assert len(set(missing)) == len(missing)
        kept += [{**job.build_key(), "accuracy": 0.5 - abs(job.lr - best[job.arm]) / 100} for job in missing]
    runs = Runs(kept)
    # The second sweep goes on from 4 to 8 and 16.
    assert {arm: runs.find_decay_rate(arm) for arm in best} == best
    assert not any(map(runs.is_decay_at_edge, best))
    assert len(kept) == 2 * (4 + len(SEEDS)) + 2
    assert [run["lr"] for run in runs.select("alexnet", arm="weights")] == [8.0] * len(SEEDS)


def test_the_small_alexnet_is_counted_by_hand() -> None:
    network = alexnet.small_alexnet(10, 3)
    convolutions = 75 * 8 + 200 * 16 + 144 * 24 + 216 * 24 + 216 * 16
    norms, linear = 2 * (8 + 16 + 24 + 24 + 16 + 16), 65 * 256 + 257 * 256 + 257 * 10
    assert sum(value.numel() for value in network.parameters()) == convolutions + norms + linear == 101_106
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_kept_runs_have_these_settings() -> None:
    """If it fails, a study has changed: `python -m bench.decks --train` makes its runs anew."""
    kept = [json.loads(line) for line in studies.RESULTS.read_text().splitlines()]
    assert {(one["study"], one["settings"]) for one in kept} == {
        (study, studies.compute_settings(study)) for study in {one["study"] for one in kept}
    }


def test_an_epoch_is_the_mean_of_its_steps() -> None:
    def step(at: int, loss: float, accuracy: float) -> dict[str, object]:
        known = {"kind": "train", "position": 60 * at, "epoch": 60 * at / 100, "batch": 60}
        return {**known, "loss": loss, "accuracy": accuracy}

    records = [step(1, 3.0, 0.25), step(2, 1.0, 0.75), step(3, 0.5, 1.0)]
    records += [
        {"kind": "evaluate", "epoch": 1.0, "accuracy": 0.5},
        {"kind": "evaluate", "epoch": 2.0, "accuracy": 0.8},
    ]
    assert summarise_epochs(records) == [
        {"loss": 2.0, "train": 0.5, "val": 0.5},
        {"loss": 0.5, "train": 1.0, "val": 0.8},
    ]


def test_a_run_diverges_by_its_loss_too() -> None:
    # Batch norm keeps outputs finite while the loss is in the millions.
    (first,) = Results(studies.RESULTS).where(study="divergence", arm="sgd", seed=1)
    assert not first["diverged"]
    assert has_diverged(first)
    (good,) = Results(studies.RESULTS).where(study="norm", arm="with", lr=1.0, seed=1)
    assert not has_diverged(good)
    assert has_diverged({"diverged": True, "epochs": []})


@pytest.mark.check
@pytest.mark.parametrize("arm", studies.NORM)
def test_a_study_trains(arm: str, tmp_path: Path) -> None:
    tree = Job("norm", arm, studies.NORM_BATCH, 0.3, 1).build_recipe(packed_digits(tmp_path, per_class=30, split=0.2))
    found, records = run_recipe(tree | {"epochs": 2.0})
    assert not found["diverged"]
    assert [one["val"] for one in summarise_epochs(records)] == [accuracy for _, accuracy in found["evaluations"]]


def test_the_pictures_of_the_statements_are_those_of_the_kept_measurements() -> None:
    """If it fails: `python -m bench.decks --statements` measures them and draws them anew."""
    pictures = drawing.draw_statements()
    assert pictures.keys() == statements.MEASURES.keys()
    page = (ROOT / "docs/statements.md").read_text(encoding="utf-8")
    for name, text in pictures.items():
        assert (FOLDER / f"statement-{name}.svg").read_text(encoding="utf-8") == text
        assert f"images/statement-{name}.svg" in page
