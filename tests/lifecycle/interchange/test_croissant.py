"""`headway croissant`: the description has what the specification requires, and says the truth about the pack."""

from __future__ import annotations

import csv
import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests._support import damage, digits, headway, packed_digits, refused
from tests.data._packs import picture

from headway.data import opening
from headway.data.pack import pack
from headway.lifecycle.interchange.croissant_files import write_croissant
from headway.lifecycle.store.store import Store

FACTS = {
    "name": "digits",
    "description": "Handwritten digits.",
    "license": "https://creativecommons.org/licenses/by/4.0/",
    "creator": "The Headway authors",
    "url": "https://example.com/digits",
}
OPTIONS = [part for name, text in FACTS.items() for part in (f"--{name}", text)]
# The tables of the specification, version 1.1: "Required", FileObject, and what each object needs for its references.
REQUIRED = ("@context", "@type", "conformsTo", "description", "license", "name", "url", "creator", "datePublished")
OF_FILES = ("@type", "@id", "name", "contentUrl", "contentSize", "encodingFormat", "sha256")


def described(path: Path) -> dict[str, Any]:
    """A description, held against the specification."""
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert all(tree[name] for name in (*REQUIRED, "distribution", "recordSet"))
    assert (tree["@type"], tree["conformsTo"]) == ("sc:Dataset", "http://mlcommons.org/croissant/1.1")
    context = tree["@context"]
    assert context["cr"] == "http://mlcommons.org/croissant/"
    assert context["data"] == {"@id": "cr:data", "@type": "@json"}
    assert context["dataType"] == {"@id": "cr:dataType", "@type": "@vocab"}
    ids = [part["@id"] for part in tree["distribution"]]
    for part in tree["distribution"]:
        if part["@type"] == "cr:FileSet":
            assert part["includes"]
            assert {one["@id"] for one in part["containedIn"]} <= set(ids)
            continue
        assert part["@type"] == "cr:FileObject"
        assert all(part[name] for name in OF_FILES)
        data = (path.parent / part["contentUrl"]).read_bytes()
        assert part["contentSize"] == f"{len(data)} B"
        assert part["sha256"] == hashlib.sha256(data).hexdigest()
    fields = {}
    for one in tree["recordSet"]:
        assert one["@type"] == "cr:RecordSet"
        ids.append(one["@id"])
        for field in one["field"]:
            assert field["@type"] == "cr:Field"
            assert field["@id"].startswith(f"{one['@id']}/")
            assert field["dataType"]
            fields[field["@id"]] = field
        for row in one.get("data", []):
            assert set(row) == {field["@id"] for field in one["field"]}
        if "data" in one:
            assert one["key"]["@id"] in fields
    assert len({*ids, *fields}) == len(ids) + len(fields), "an id occurs twice"
    for field in fields.values():
        places = [field.get("references", {}).get("field")]
        places += map(field.get("source", {}).get, ("fileObject", "fileSet"))
        for reference in places:
            assert reference is None or reference["@id"] in {*ids, *fields}
    # Terms that the context does not map would mean something of schema.org.
    used = {key for part in [*tree["distribution"], *fields.values()] for key in part if not key.startswith("@")}
    ours = {"name", "description", "contentUrl", "contentSize", "encodingFormat", "sha256"}
    assert {key for key in used - ours if not key.startswith("prov:")} <= set(context)
    assert context["prov"] == "http://www.w3.org/ns/prov#"
    return tree


def rows(path: Path) -> list[dict[str, str]]:
    with (path.with_name("samples.csv")).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_digits(tmp_path, per_class=3, split=0.34)


def test_a_pack_of_two_sets_is_described(packed: Path) -> None:
    said = headway("croissant", packed, *OPTIONS, "--published", "2026-01-29")
    assert f"Wrote {packed / 'croissant.json'} and {packed / 'samples.csv'}: 30 images, version 1.0.0." in said.out
    tree = described(packed / "croissant.json")
    assert tree["creator"] == {"@type": "sc:Organization", "name": FACTS["creator"]}
    assert (tree["datePublished"], tree["version"]) == ("2026-01-29", "1.0.0")
    sets = {one["@id"]: one for one in tree["recordSet"]}
    assert sets["splits"]["data"] == [
        {"splits/name": "train", "splits/url": "cr:TrainingSplit"},
        {"splits/name": "eval", "splits/url": "cr:ValidationSplit"},
    ]
    assert [row["classes/name"] for row in sets["classes"]["data"]] == list("0123456789")
    found = rows(packed / "croissant.json")
    for split in ("train", "eval"):
        data = opening.open(packed / split)
        records = [bytes(one) for one in data.read(np.arange(len(data)))]
        assert [row for row in found if row["split"] == split] == [
            {
                "sha256": hashlib.sha256(record).hexdigest(),
                "name": data.name(sample),
                "label": data.classes[data.label[sample]],
                "split": split,
                "width": "8",
                "height": "8",
            }
            for sample, record in enumerate(records)
        ]
        data.close()
    fields = {field["name"]: field for field in sets["samples"]["field"]}
    assert set(fields) == set(found[0])
    assert fields["split"]["references"] == {"field": {"@id": "splits/name"}}
    # Readers of CSV take these classes for numbers, which are no names.
    assert "references" not in fields["label"]
    # The pack still is one.
    headway("verify", packed)


def test_what_was_said_once_is_taken_again(packed: Path) -> None:
    headway("croissant", packed, *OPTIONS, "--version", "2.0.1", "--published", "2025-12-31")
    said = headway("croissant", packed, "--version", "3.0.0", "--json").json()
    assert {name: said[name] for name in FACTS} == FACTS
    assert (said["version"], said["published"], said["samples"]) == ("3.0.0", "2025-12-31", 30)
    assert described(packed / "croissant.json")["version"] == "3.0.0"


def test_images_of_tar_shards_can_be_read(tmp_path: Path) -> None:
    images = tmp_path / "images/a"
    images.mkdir(parents=True)
    (images / "1.jpg").write_bytes(picture(1))
    (images / "2.png").write_bytes(picture(2, "PNG"))
    pack(tmp_path / "images", tmp_path / "packed", format="tar", mode="keep")
    out = tmp_path / "about/croissant.json"
    out.parent.mkdir()
    write_croissant(str(tmp_path / "packed"), out, **FACTS)
    tree = described(out)
    (files,) = (part for part in tree["distribution"] if part["@type"] == "cr:FileSet")
    assert files["encodingFormat"] == ["image/jpeg", "image/png"]
    assert files["includes"] == ["*.jpg", "*.png"]
    assert [one["@id"] for one in tree["recordSet"]] == ["classes", "samples", "images"]
    (label,) = (field for field in tree["recordSet"][1]["field"] if field["name"] == "label")
    assert label["references"] == {"field": {"@id": "classes/name"}}
    (shard,) = (part for part in tree["distribution"] if part["encodingFormat"] == "application/x-tar")
    with tarfile.open(out.parent / shard["contentUrl"]) as archive:
        for row in rows(out):
            member = archive.extractfile(row["file"])
            assert member is not None
            assert hashlib.sha256(member.read()).hexdigest() == row["sha256"]


@pytest.mark.parametrize(
    ("columns", "lines", "named"),
    [
        ("labels", ["a;b", ""], ["labels"]),
        ("value", ["0.1", "-3.0"], ["value"]),
        ("value_x,value_y", ["1.0,2.5", "3.0,1e-06"], ["value_x", "value_y"]),
    ],
)
def test_other_kinds_of_labels_have_columns_of_their_own(
    columns: str, lines: list[str], named: list[str], tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number))
    text = f"path,{columns}\n" + "".join(f"{number}.jpg,{line}\n" for number, line in enumerate(lines))
    (tmp_path / "list.csv").write_text(text)
    pack(tmp_path / "list.csv", tmp_path / "packed")
    write_croissant(str(tmp_path / "packed"), **FACTS)
    tree = described(tmp_path / "packed/croissant.json")
    (samples,) = (one for one in tree["recordSet"] if one["@id"] == "samples")
    labels = [field for field in samples["field"] if "cr:Label" in field["dataType"]]
    assert [field["name"] for field in labels] == named
    by_name = {row["name"]: ",".join(row[name] for name in named) for row in rows(tmp_path / "packed/croissant.json")}
    assert by_name == {f"{number}.jpg": line for number, line in enumerate(lines)}


def test_a_class_with_a_semicolon_is_separated_by_another_character(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number))
    rows_in = [{"path": "0.jpg", "labels": ["cat; grey", "dog"]}, {"path": "1.jpg", "labels": ["dog"]}]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_in))
    pack(tmp_path / "list.jsonl", tmp_path / "packed")
    write_croissant(str(tmp_path / "packed"), **FACTS)
    tree = described(tmp_path / "packed/croissant.json")
    (samples,) = (one for one in tree["recordSet"] if one["@id"] == "samples")
    (field,) = (one for one in samples["field"] if one["name"] == "labels")
    separator = field["source"]["transform"]["separator"]
    found = {row["name"]: row["labels"].split(separator) for row in rows(tmp_path / "packed/croissant.json")}
    assert found == {row["path"]: row["labels"] for row in rows_in}


def test_a_file_of_somebody_else_is_not_replaced(packed: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "samples.csv").write_text("mine")
    said = refused("croissant", packed, *OPTIONS, "--out", photos / "croissant.json", status=2)
    assert "no description beside it names it" in said
    assert (photos / "samples.csv").read_text() == "mine"
    assert [path.name for path in photos.iterdir()] == ["samples.csv"]


def test_the_next_version_is_proposed_once_the_data_have_changed(tmp_path: Path) -> None:
    store = Store.make(tmp_path / "store")
    about = {name: text for name, text in FACTS.items() if name != "name"}
    store.create("digits", splits={"train": 0.5, "eval": 0.5}, about=about)
    store.add("digits", digits(tmp_path / "digits", per_class=2), by="ann")
    out = tmp_path / "croissant.json"

    def describe(number: int) -> tuple[str, ...]:
        return write_croissant(f"store:{store.folder}//digits@v{number}", out).notes

    assert (describe(1), describe(1)) == ((), ())
    store.add("digits", digits(tmp_path / "more", per_class=4), prefix="more/", by="ann")
    (note,) = describe(2)
    assert note == "This is still version 1.0.0, and samples were added: give it --version 1.1.0."
    names = [sample.name for sample in store.list_samples("digits")]
    store.label("digits", {names[0]: "another class"})
    assert ["--version 2.0.0" in note for note in describe(3)] == [True]
    assert ["--version 2.0.0" in note for note in describe(1)] == [True]


def test_required_facts_are_asked_for_all_at_once(packed: Path) -> None:
    said = refused("croissant", packed, "--name", "digits", status=2)
    assert "--description, --license, --creator, --url are missing" in said
    for option, value, message in (
        ("--url", "example.com", "is not an address"),
        ("--version", "1.0", "is not a version"),
        ("--published", "yesterday", "is not a date"),
    ):
        assert message in refused("croissant", packed, *OPTIONS, option, value, status=2)
    assert not (packed / "croissant.json").exists()


def test_what_is_no_pack_or_damaged_is_refused(packed: Path, tmp_path: Path) -> None:
    assert "not a packed folder" in refused("croissant", tmp_path / "digits", *OPTIONS, status=2)
    assert "local copy" in refused("croissant", "s3://bucket/pack", *OPTIONS, status=2)
    (packed / "croissant.json").write_text("{")
    assert "cannot be read" in refused("croissant", packed, *OPTIONS, status=2)
    (packed / "croissant.json").unlink()
    damage(packed / "train", 3)
    assert "sample 3 is damaged" in refused("croissant", packed, *OPTIONS, status=1)
    assert not (packed / "croissant.json").exists()


def test_a_version_of_a_store_is_described_with_who_set_its_labels(tmp_path: Path) -> None:
    store = Store.make(tmp_path / "store")
    about = {name: text for name, text in FACTS.items() if name != "name"}
    store.create("digits", splits={"train": 0.5, "eval": 0.5}, about=about)
    store.add("digits", digits(tmp_path / "digits", per_class=3), by="ann")
    names = [sample.name for sample in store.list_samples("digits")]
    store.label("digits", {names[0]: None, names[1]: "a new class"}, by="eve")
    address, out = f"store:{store.folder}//digits@v2", tmp_path / "croissant.json"
    assert "--out" in refused("croissant", address, status=2)
    assert "whole version" in refused("croissant", f"{address}/train", "--out", out, status=2)
    headway("croissant", address, "--out", out)
    tree = described(out)
    assert (tree["name"], tree["license"]) == ("digits", FACTS["license"])
    version = store.resolve("digits@v2")
    assert version.version in tree["prov:wasGeneratedBy"]["prov:label"]
    assert tree["prov:wasDerivedFrom"] == {"@id": f"urn:sha256:{version.parent}"}
    (samples,) = (one for one in tree["recordSet"] if one["@id"] == "samples")
    (label,) = (field for field in samples["field"] if field["name"] == "label")
    assert {agent["prov:label"] for agent in label["prov:wasAttributedTo"]} == {"ann", "eve"}
    # Shards that splits share are described once; `described` has compared each file's SHA-256.
    paths = [part["contentUrl"] for part in tree["distribution"]]
    assert len(paths) == len(set(paths))
    found = {row["name"]: row for row in rows(out)}
    assert {name: row["labelled_by"] for name, row in found.items()} == {
        name: "" if name == names[0] else "eve" if name == names[1] else "ann" for name in found
    }
    expected = {sample.name: sample for sample in store.list_samples("digits@v2")}
    assert {name: (row["sha256"], row["label"], row["split"]) for name, row in found.items()} == {
        name: (sample.sample, sample.label or "", sample.split) for name, sample in expected.items()
    }
