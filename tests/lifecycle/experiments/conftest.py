"""Indexes of MLflow's stores lie in the cache folder, which is a new one for each test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path_factory.mktemp("cache")))
