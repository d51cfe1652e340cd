"""The part `index` of the lifecycle bench: its claims, and that it compares what it says."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from bench._lifecycle import index
from bench._lifecycle.index import measure_index


@pytest.mark.check
def test_the_index_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    claims = {claim.name: claim.value for claim in measure_index(tmp_path, argparse.Namespace(quick=True))}
    assert set(claims) == {
        "index_rebuild_s",
        "index_list_ms",
        "index_series_ms",
        "index_unchanged_ms",
        "index_identical",
    }
    assert claims["index_identical"] == 1.0
    assert "built again" in capsys.readouterr().out


@pytest.mark.check
def test_an_index_that_forgets_a_run_is_not_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, builds = index._build, []

    def build(root: Path, columns: tuple[str, ...] = ()) -> tuple[float, str, list[dict[str, object]]]:
        builds.append(root)
        if len(builds) == 2:
            (root / "run-0003/recipe.yaml").unlink()
        return real(root, columns)

    monkeypatch.setattr(index, "_build", build)
    claims = {claim.name: claim.value for claim in measure_index(tmp_path, argparse.Namespace(quick=True))}
    assert claims["index_identical"] == 0.0
