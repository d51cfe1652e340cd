"""A sweep's folder stands for its finished runs: which of them are drawn, and what is said of the others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests._support import headway, packed_digits, refused, write_recipe

from headway.core.errors import UsageError
from headway.report.landscape_runs import expand_folders, is_folder_of_runs


def make_run(folder: Path, *, finished: bool = True, weights: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("batch: 1\n")
    if finished:
        (folder / "summary.json").write_text(json.dumps({"finished": True}))
    if weights:
        (folder / "weights.safetensors").touch()
    return folder


def test_the_finished_runs_of_a_sweep_in_the_order_of_their_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sweep, alone = tmp_path / "sweep", make_run(tmp_path / "alone")
    runs = [make_run(sweep / "trials" / name) for name in ("2", "10", "1", "best")]
    assert expand_folders([sweep, alone]) == [runs[2], runs[0], runs[1], runs[3], alone]
    assert caplog.messages == []
    # Its folder of trials, and any folder of runs, do as well.
    assert expand_folders([sweep / "trials"]) == expand_folders([sweep])
    make_run(sweep / "trials/3", finished=False)
    make_run(sweep / "trials/4", weights=False)
    (sweep / "trials/5").mkdir()
    assert expand_folders([sweep]) == [runs[2], runs[0], runs[1], runs[3]]
    (said,) = caplog.messages
    assert said == f"{sweep}: 4 of 6 runs are drawn; left out: 1 not finished (3), 1 without weights (4)."


def test_a_folder_without_a_run_to_draw_is_a_sentence(tmp_path: Path) -> None:
    for number in range(7):
        make_run(tmp_path / f"sweep/trials/{number}", finished=False)
    with pytest.raises(UsageError) as found:
        expand_folders([tmp_path / "sweep"])
    words = "none of the 7 runs in this folder can be drawn: 7 not finished (0, 1, 2, 3, 4 and 2 more). Wait until"
    assert words in str(found.value)
    # What holds no runs, or is none, is explained where it is opened.
    for other in (tmp_path / "nowhere", tmp_path / "sweep/trials/0"):
        assert expand_folders([other]) == [other]
        assert not is_folder_of_runs(other)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four trials over batch and weight decay: one is trained, and the others are its copies with other recipes."""
    folder = tmp_path_factory.mktemp("sweep")
    packed_digits(folder, per_class=8)
    recipe, trials = write_recipe(folder / "recipe.yaml", epochs=1), folder / "sweep/trials"
    headway("train", recipe, "--run", trials / "0")
    text = (trials / "0/recipe.yaml").read_text()
    for number, (batch, decay) in enumerate(((30, 0.1), (60, 0.0), (60, 0.1)), start=1):
        shutil.copytree(trials / "0", trials / str(number))
        changed = text.replace("batch: 30\n", f"batch: {batch}\n").replace(
            "weight_decay: 0.0\n", f"weight_decay: {decay}\n"
        )
        assert (changed == text) is False
        (trials / str(number) / "recipe.yaml").write_text(changed)
    return folder / "sweep"


def test_a_sweep_makes_a_page_in_its_folder_with_the_grid(sweep: Path) -> None:
    found = headway("landscape", sweep, "--points", "3", "--samples", "10", "--json").json()
    assert found["page"] == str(sweep / "landscape.html")
    comparison = found["comparison"]
    assert (comparison["metric"], comparison["which"]) == ("accuracy", "evaluation")
    grid = comparison["grid"]
    assert sorted(grid["keys"]) == ["batch", "optimizer.weight_decay"]
    assert [cell["runs"] for cell in sorted(grid["cells"], key=lambda cell: cell["runs"])] == [
        ["0"],
        ["1"],
        ["2"],
        ["3"],
    ]
    first = found["runs"][0]
    (cell,) = (cell for cell in grid["cells"] if cell["runs"] == ["0"])
    assert cell["metric"] == first["numbers"]["evaluation"]["accuracy"]
    assert cell["sharpness"]["keskar"] == first["sharpness"]["keskar"]["percent"]
    assert cell["sharpness"]["eigenvalue"] == first["sharpness"]["eigenvalue"]["value"]
    # The same weights in all four, so there is nothing to rank.
    assert [(one["runs"], one["rank_correlation"]) for one in comparison["correlations"]] == [(4, None)] * 3
    html = (sweep / "landscape.html").read_text()
    for name in ("landscape-grid-metric", "landscape-grid-sharpness", "landscape-scatter-relative"):
        assert f'id="{name}"' in html


def test_the_keys_of_the_grid_are_asked_for_and_refused_before_anything_is_measured(sweep: Path) -> None:
    options = ("--points", "3", "--samples", "10", "--no-sharpness", "--json")
    found = headway("landscape", sweep, "--over", "optimizer.weight_decay,batch", *options).json()
    assert found["comparison"]["grid"]["keys"] == ["optimizer.weight_decay", "batch"]
    assert found["comparison"]["correlations"] == []
    sentence = refused("landscape", sweep, "--over", "batch,optimizer.lr", status=2)
    assert "optimizer.lr has the same value in all runs. Keys that differ: " in sentence
    assert "batch" in sentence.partition("Keys that differ: ")[2]
    assert "--over 'batch' is not two keys" in refused("landscape", sweep, "--over", "batch", status=2)
