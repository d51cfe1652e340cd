"""Idempotency keys and tokens: kept in files, over restarts."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import UsageError
from headway.http.problems import ProblemError
from headway.lifecycle.service import audit
from headway.lifecycle.service.answer import Answer
from headway.lifecycle.service.audit import AuditLog
from headway.lifecycle.service.bodies import Proposal, Row
from headway.lifecycle.service.checks import check_head, check_scopes, choose_author
from headway.lifecycle.service.keys import Keys, KeyState
from headway.lifecycle.service.tokens import LOCAL, Principal, Tokens

FIRST = Answer(201, {"version": "1"}, {"etag": '"1"'})
WHERE = ("anna", "cars", "k")


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Keys]:
    found = Keys(tmp_path / "keys.db", 1000.0)
    yield found
    found.close()


def test_the_first_answer_comes_again(keys: Keys) -> None:
    assert keys.begin(*WHERE, "f") == KeyState()
    keys.finish(*WHERE, FIRST)
    assert keys.begin(*WHERE, "f") == KeyState(FIRST)
    # Another principal and another data set have keys of their own.
    assert keys.begin("bert", "cars", "k", "g") == KeyState()
    assert keys.begin("anna", "dogs", "k", "g") == KeyState()


def test_another_body_and_a_running_request_are_refused(keys: Keys) -> None:
    keys.begin(*WHERE, "f")
    for fingerprint, status in (("f", 409), ("g", 422)):
        with pytest.raises(ProblemError) as refused:
            keys.begin(*WHERE, fingerprint)
        assert refused.value.status == status
    keys.forget(*WHERE)
    assert keys.begin(*WHERE, "g") == KeyState()


def test_one_of_many_begins(keys: Keys) -> None:
    begun, refused = list[KeyState](), list[int]()

    def run() -> None:
        try:
            begun.append(keys.begin(*WHERE, "f"))
        except ProblemError as problem:
            refused.append(problem.status)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == [KeyState()]
    assert refused == [409] * 7


def test_a_request_of_a_killed_server_may_come_again(tmp_path: Path) -> None:
    first = Keys(tmp_path / "keys.db", 1000.0)
    first.begin(*WHERE, "f")
    second = Keys(tmp_path / "keys.db", 1000.0)
    assert second.begin(*WHERE, "f") == KeyState()
    with pytest.raises(ProblemError):
        second.begin(*WHERE, "f")
    first.close()
    second.close()


def test_an_end_that_cannot_be_written_does_not_block_its_key(keys: Keys) -> None:
    """As on a full disk: the request has ended, and whoever sends it again must not wait for it for ever."""
    for is_done in (True, False):
        assert keys.begin(*WHERE, "f") == KeyState()
        keys._database.execute("pragma query_only = on")
        if is_done:
            with pytest.raises(sqlite3.OperationalError):
                keys.finish(*WHERE, FIRST)
        else:
            keys.forget(*WHERE)
        keys._database.execute("pragma query_only = off")
    assert keys.begin(*WHERE, "f") == KeyState()
    with pytest.raises(ProblemError):
        keys.begin(*WHERE, "f")
    keys.finish(*WHERE, FIRST)
    assert keys.begin(*WHERE, "f") == KeyState(FIRST)


def test_old_keys_are_dropped(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.db", -1.0)
    keys.begin(*WHERE, "f")
    assert keys.begin(*WHERE, "other") == KeyState()
    keys.close()


def test_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.lifecycle.service.keys.is_on_network", lambda path: True)
    with pytest.raises(UsageError, match="network file system"):
        Keys(tmp_path / "keys.db", 1.0)


def test_only_the_hash_of_a_token_is_stored(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "service/tokens.json")
    token = tokens.add("anna", ["read", "label", "read"])
    assert len(token) >= 43
    text = (tmp_path / "service/tokens.json").read_text()
    assert token not in text
    assert os.stat(tmp_path / "service/tokens.json").st_mode & 0o077 == 0
    assert tokens.find(f"Bearer {token}") == Principal("anna", ("read", "label"))
    assert tokens.find(f"bearer  {token} ").name == "anna"
    # Another process sees it, and sees at once that it is gone.
    other = Tokens(tmp_path / "service/tokens.json")
    assert other.find(f"Bearer {token}").name == "anna"
    tokens.remove("anna")
    with pytest.raises(ProblemError):
        other.find(f"Bearer {token}")
    # A server that has had a token needs one from then on.
    assert not tokens.entries
    assert tokens.were_made
    assert Tokens(tmp_path / "service/tokens.json").were_made
    assert not Tokens(tmp_path / "service/none.json").were_made
    os.remove(tmp_path / "service/tokens.json")
    assert tokens.were_made


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer \udcff"])
def test_a_wrong_token_is_refused(tmp_path: Path, header: str | None) -> None:
    tokens = Tokens(tmp_path / "tokens.json")
    tokens.add("anna", ["read"])
    with pytest.raises(ProblemError) as refused:
        tokens.find(header)
    assert refused.value.status == 401
    assert dict(refused.value.headers)[b"www-authenticate"].startswith(b"Bearer")


def test_impossible_tokens_are_refused(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens.json")
    tokens.add("anna", ["read"])
    for name, scopes in (
        ("anna", ["read"]),
        ("", ["read"]),
        ("a/b", ["read"]),
        ("local", ["read"]),
        ("x" * 90, ["read"]),
    ):
        with pytest.raises(UsageError):
            tokens.add(name, scopes)
    with pytest.raises(UsageError, match="no scope"):
        tokens.add("bert", [])
    with pytest.raises(UsageError, match="Did you mean 'write'"):
        tokens.add("bert", ["wrte"])
    with pytest.raises(UsageError, match="no token 'ana'"):
        tokens.remove("ana")


@pytest.mark.parametrize("text", ["", "[]", '{"tokens": 5}', '{"tokens": [{"name": "a"}]}', "{" * 99])
def test_a_damaged_file_of_tokens_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens.json").write_text(text)
    with pytest.raises(UsageError, match="cannot be read"):
        Tokens(tmp_path / "tokens.json")


@pytest.mark.parametrize(
    ("scopes", "op", "is_allowed"),
    [
        (("label",), "label", True),
        (("write",), "label", True),
        (("label",), "add", False),
        (("label",), "remove", False),
        (("write",), "move", True),
        (("read",), "label", False),
        (("admin",), "remove", True),
    ],
)
def test_a_scope_allows_what_it_says(scopes: tuple[str, ...], op: str, is_allowed: bool) -> None:
    proposal = Proposal([Row(op, "/0", "a.jpg")])
    if is_allowed:
        check_scopes(proposal, Principal("anna", scopes))
        return
    with pytest.raises(ProblemError) as refused:
        check_scopes(proposal, Principal("anna", scopes))
    assert refused.value.status == 403


def test_a_label_with_a_split_is_a_move() -> None:
    proposal = Proposal([Row("label", "/0", "a.jpg", label="cat", split="eval")])
    with pytest.raises(ProblemError) as refused:
        check_scopes(proposal, Principal("anna", ("label",)))
    assert refused.value.status == 403
    check_scopes(proposal, Principal("anna", ("write",)))


def test_only_an_admin_speaks_for_others() -> None:
    anna = Principal("anna", ("label",))
    assert choose_author("", anna) == "anna"
    assert choose_author("anna", anna) == "anna"
    assert choose_author("bert", anna) == "anna/bert"
    assert choose_author("bert", LOCAL) == "bert"


@pytest.mark.parametrize(
    ("op", "tags", "status"),
    [
        ("add", None, None),
        ("label", None, 428),
        ("move", None, 428),
        ("remove", None, None),
        ("label", ("h",), None),
        ("label", ("x", "h"), None),
        ("add", ("x",), 412),
        ("label", ("*",), None),
        ("label", (), 412),
    ],
)
def test_if_match_is_checked(op: str, tags: tuple[str, ...] | None, status: int | None) -> None:
    proposal = Proposal([Row(op, "/0", "a.jpg")])
    if status is None:
        check_head(proposal, tags, "h")
        return
    with pytest.raises(ProblemError) as refused:
        check_head(proposal, tags, "h")
    assert refused.value.status == status
    assert (b"etag", b'"h"') in refused.value.headers


def test_old_keys_are_swept(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.db", 1000.0)
    keys.begin(*WHERE, "f")
    keys.sweep()
    with pytest.raises(ProblemError):
        keys.begin(*WHERE, "f")
    keys.close()
    aged = Keys(tmp_path / "keys.db", -1.0)
    aged.sweep()
    assert aged._database.execute("select count(*) from keys").fetchone() == (0,)
    aged.close()


def test_two_who_make_tokens_at_once_keep_both(tmp_path: Path) -> None:
    """Each has read the file before the other one wrote it."""
    first, second = Tokens(tmp_path / "tokens.json"), Tokens(tmp_path / "tokens.json")
    threads = [
        threading.Thread(target=tokens.add, args=(f"{name}-{number}", ["read"]))
        for name, tokens in (("a", first), ("b", second))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(Tokens(tmp_path / "tokens.json").entries) == 8


def test_refused_requests_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(50):
        log.add_refusal(address="10.0.0.1", by=None, status=401, path=f"/{number}")
    log.add_refusal(address="10.0.0.2", by=None, status=401, path="/other")
    for number in range(2 * audit.REFUSALS_MINUTE):
        log.add_refusal(address=f"10.1.{number}", by=None, status=401, path="/")
    rows = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows[:2]] == ["/0", "/other"]
    assert len(rows) == audit.REFUSALS_MINUTE
    # In the next minute it says how many had no line.
    log._minute_s -= 61
    log.add_refusal(address="10.0.0.1", by=None, status=401, path="/again")
    rows = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert rows[-2]["left_out"] == 49 + audit.REFUSALS_MINUTE + 2
    assert rows[-1]["path"] == "/again"
    log.close()


def test_the_audit_log_is_set_aside_before_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "FILE_BYTES", 300)
    log = AuditLog(tmp_path / "audit.jsonl")
    for number in range(40):
        log.add(number=number)
    log.close()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["audit.jsonl", *(f"audit.jsonl.{number}" for number in range(1, audit.KEPT_FILES + 1))]
    assert all(path.stat().st_size <= 300 for path in tmp_path.iterdir())
    older = [
        json.loads(line)["number"]
        for number in range(audit.KEPT_FILES, 0, -1)
        for line in (tmp_path / f"audit.jsonl.{number}").read_text().splitlines()
    ]
    newest = [json.loads(line)["number"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [*older, *newest] == list(range(older[0], 40))


def test_nobody_writes_a_line_of_the_audit_log_of_their_own(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.add(path='/a\n{"by": "admin"}\u2028', by="x" * 5000, bytes=7)
    log.close()
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(lines) == 1
    row = json.loads(lines[0])
    assert row["path"] == '/a\n{"by": "admin"}\u2028'
    assert len(row["by"]) == 1000
    assert row["bytes"] == 7
