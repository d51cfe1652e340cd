"""`headway dataset` on the URL of a data service: the same words as on a folder, and what has no request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests._support import headway, refused
from tests.lifecycle.service._service import Served, serving_data
from tests.lifecycle.store._pictures import classes, write

from headway.data.store_address import STORE_VARIABLE
from headway.lifecycle.service.served_store import ServedStore
from headway.lifecycle.service.transport import TOKEN_VARIABLE


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # More than five images are a job.
    with serving_data(tmp_path_factory.mktemp("verbs") / "store", "--job-files", "5") as found:
        yield found


def list_commands(folder: Path) -> list[list[str]]:
    """A walk through all verbs that the service has requests for."""
    classes(folder / "images", 4)
    write(folder / "pool", {f"{number}.png": 100 + number for number in range(3)})
    write(folder / "sets", {f"{name}/cat/{name}.png": 200 + len(name) for name in ("train", "test")})
    write(folder / "other", {f"{number}.png": 300 + number for number in range(3)})
    (folder / "images/cat/note.txt").write_text("no image")
    (folder / "pool/broken.png").write_bytes(b"no image")
    box = {"label": "cat", "corners": [0, 0, 2, 2]}
    rows: list[dict[str, Any]] = [
        {"path": "other/0.png", "label": "dog", "split": "eval", "by": "ben", "boxes": [box]},
        {"path": "other/1.png", "split": "Validation"},
        {"path": "other/2.png", "label": "cat"},
    ]
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "labels.csv").write_text("name,label,by,split\ncat/1.png,dog,ben,eval\ncat/2.png,,,\n")
    (folder / "gone.jsonl").write_text('{"path": "dog/0.png"}\n')
    splits = "train=0.5,eval=0.5"
    return [
        ["create", "pets", "--splits", splits, "--license", "CC0", "--classes", "cat,dog", "-m", "first"],
        ["add", "pets", f"{folder}/images", "-m", "first pictures"],
        ["add", "pets", f"{folder}/images", "--prefix", "again/"],
        ["add", "pets", f"{folder}/pool", "--unlabelled", "--split", "eval", "--expect", "v1"],
        ["add", "pets", f"{folder}/sets"],
        ["add", "pets", f"{folder}/list.jsonl"],
        ["label", "pets", "cat/0.png=dog", "--list", f"{folder}/labels.csv", "--by", "anna"],
        ["label", "pets", "cat/0.png=dog"],
        ["remove", "pets", "dog/1.png", "--list", f"{folder}/gone.jsonl"],
        ["create", "fork", "--from", "pets@v1"],
        ["diff", "pets@v1", "pets"],
        ["diff", "pets", "pets"],
        ["show", "pets"],
        ["show", "pets@v1"],
        ["show", "pets", "--samples"],
        ["show", "pets/eval", "--samples"],
        ["log", "pets"],
        ["log"],
    ]


def leave_out_people(value: Any) -> Any:
    """A result without times, and without the names of whoever runs the tests and of the token."""
    if isinstance(value, list):
        return [leave_out_people(one) for one in value]
    if isinstance(value, dict):
        # The service counts what it does not list, too, and looks at images in its own words. It packs two sets as one.
        hidden = ("time", "by", "rejected_count", "near_copies_count", "reason", "shards")
        return {key: leave_out_people(one) for key, one in value.items() if key not in hidden}
    return value


def test_a_walk_is_the_same_on_a_folder_and_on_a_url(served: Served, tmp_path: Path) -> None:
    commands = list_commands(tmp_path)
    url = served.started["url"]
    for verb, *rest in commands:
        both = []
        for store in (str(tmp_path / "store"), url):
            said = headway("dataset", verb, *rest, "--store", store, "--json")
            both.append([leave_out_people(json.loads(line)) for line in said.out.splitlines()])
        assert both[0] == both[1], (verb, rest)
        if verb in ("diff", "show"):
            texts = [headway("dataset", verb, *rest, "--store", store).out for store in (tmp_path / "store", url)]
            assert len({re.sub("in [0-9]+ shards", "", text) for text in texts}) == 1, texts
    setters = headway("dataset", "show", "pets", "--setters", "--json", "--store", served.folder).json()
    assert (setters["anna"], setters["ben"]) == (1, 2)
    text = headway("dataset", "add", "pets", tmp_path / "pool", "--unlabelled", "--store", url).out
    assert text.startswith("Nothing changed: store:pets@v6 (")
    assert "Left out 3 that are there already" in text


def test_what_has_no_request_is_refused(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = served.started["url"]
    monkeypatch.setenv(STORE_VARIABLE, url)
    headway("dataset", "create", "few")
    for verb in (["merge", "few", "few"], ["tag", "few", "gold"], ["gc"], ["verify"], ["show", "few", "--setters"]):
        said = refused("dataset", *verb, status=2)
        assert "a data service has no request for" in said
        assert "--store FOLDER" in said
    write(tmp_path / "images", {"cat/1.png": 1})
    for words, sentence in (
        (["remove", "few", "x", "--by", "anna"], "names the owner of the token"),
        (["create", "more", "--by", "anna"], "names the owner of the token"),
        (["add", "few", str(tmp_path / "images"), "--ignore-near-copies"], "always looks for near copies"),
        (["add", "few", str(tmp_path / "images"), "--split", "evall"], "Did you mean 'eval'?"),
        (["add", "few", "store:few"], "this needs the folder of a store"),
        (["diff", "few", "other"], "versions of one data set"),
        (["show", f"store:{url}//few", "--store", str(tmp_path)], "both name a store"),
        (["diff", "few", "store:http://127.0.0.2:1//few"], "in another store"),
        (["show", f"store:{url}/few"], "without a data set"),
        (["log", url], "without a data set"),
        (["show", "few", "--store", "http://127.0.0.1:port"], "no address of a server"),
    ):
        assert sentence in refused("dataset", *words, status=2)
    assert "no sample 'x'" in refused("dataset", "remove", "few", "x", status=1)
    assert "headway dataset log, lists all" in refused("dataset", "log", "none", status=1)
    assert "headway dataset log few, lists all" in refused("dataset", "show", "few@v9", status=1)
    # Nothing else takes a URL, nor makes a folder of its name.
    monkeypatch.chdir(tmp_path)
    assert "the folder of a store" in refused("verify", "store:few", status=2)
    assert not (tmp_path / "http:").exists()


def test_an_address_may_name_the_service(served: Served) -> None:
    url = served.started["url"]
    headway("dataset", "create", "named", "--store", url)
    assert "store:named@v0" in headway("dataset", "show", f"store:{url}//named@v0").out
    assert ServedStore(url).resolve(f"store:{url}//named").number == 0
    assert headway("dataset", "log", "named", "--store", url.replace("http", "HTTP")).out.startswith("v0 ")


def test_the_token_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headway("dataset", "create", "mine", "--store", tmp_path / "store")
    token = headway("data-token", tmp_path / "store", "--add", "anna", "--scopes", "read").out.strip()
    with serving_data(tmp_path / "store") as served:
        monkeypatch.setenv(STORE_VARIABLE, served.started["url"])
        assert f"Set {TOKEN_VARIABLE} to a token" in refused("dataset", "log", status=1)
        monkeypatch.setenv(TOKEN_VARIABLE, f"{token}\n")
        assert "store:mine@v0" in headway("dataset", "log").out
        assert "lacks the scope" in refused("dataset", "remove", "mine", "x", status=1)
        blind = headway("data-token", tmp_path / "store", "--add", "ben", "--scopes", "write").out.strip()
        monkeypatch.setenv(TOKEN_VARIABLE, blind)
        write(tmp_path / "images", {"1.png": 1})
        assert "1 added" in headway("dataset", "add", "mine", tmp_path / "images", "--unlabelled").out
        monkeypatch.setenv(TOKEN_VARIABLE, "two\nlines")
        assert "not one line" in refused("dataset", "log", status=2)


def test_slips_in_the_options_of_a_service_are_named(tmp_path: Path) -> None:
    options = ("--bind", "0.0.0.0:0", "--runs", tmp_path / "none")
    said = headway("serve-data", tmp_path / "my store", *options, status=2).err
    assert f"There is no store in {tmp_path / 'my store'}: an empty one is made there." in said
    assert f"there is no folder {tmp_path / 'none'} yet" in said
    assert f"headway data-token '{tmp_path / 'my store'}' --add" in said
    assert "There is no store" not in headway("serve-data", tmp_path / "my store", *options, status=2).err
