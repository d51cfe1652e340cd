"""Images whose stored bytes other sets have, whatever they are called there and however they are packed."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from tests._support import digits, headway

from headway.data import opening
from headway.lifecycle.mining.equal_records import find_equal_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight digits of each class; and a part of them under other names."""
    folder = tmp_path_factory.mktemp("equal")
    digits(folder / "all", per_class=8)
    for number in (1, 3):
        (folder / "part" / str(number)).mkdir(parents=True)
        for place in (0, 5):
            shutil.copyfile(folder / f"all/{number}/00{place}.png", folder / f"part/{number}/other-{place}.png")
    return folder


@pytest.mark.parametrize("form", ["recordio", "tar", "store"])
def test_equal_bytes_are_found_in_every_form(folder: Path, tmp_path: Path, form: str) -> None:
    part = str(tmp_path / "part")
    if form == "store":
        store = ("--store", tmp_path / "store")
        headway("dataset", "create", "part", "--splits", "train=1", *store)
        headway("dataset", "add", "part", folder / "part", *store)
        part = f"store:{tmp_path / 'store'}//part"
    else:
        headway("pack", folder / "part", part, "--format", form, "--mode", "keep")
    with closing(opening.open(folder / "all")) as whole, closing(opening.open(part)) as other:
        found = find_equal_records(whole, [other])
        names = {whole.name(place) for place in found.nonzero()[0].tolist()}
        assert names == {f"{number}/00{place}.png" for number in (1, 3) for place in (0, 5)}
        assert find_equal_records(other, [whole]).all()
        assert find_equal_records(whole, [other, whole]).all()
        assert not find_equal_records(whole, []).any()


def test_an_equal_length_and_checksum_is_not_enough(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums have 32 bits, so of many images some agree by chance; digests decide."""
    from headway.lifecycle.mining import equal_records

    headway("pack", folder / "part", tmp_path / "part", "--mode", "keep")
    monkeypatch.setattr(equal_records, "_build_keys", lambda dataset: dataset.length.astype("uint64") * 0)
    with closing(opening.open(folder / "all")) as whole, closing(opening.open(tmp_path / "part")) as other:
        assert find_equal_records(whole, [other]).sum() == 4
