"""The label page's requests at a real server: queues, grids, one version for each, and who may do what."""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests._support import headway
from tests.lifecycle.service._labelling import (
    CLASSES,
    JSON,
    add_pool,
    add_queue,
    build_picks,
    find_id,
    lease,
    list_versions,
    propose,
    read_labels,
    send,
    set_labels,
)
from tests.lifecycle.service._service import WAIT_S, Served, check_problem, create, key, serving_data

from headway.lifecycle.service.exchange import HELD_LISTS
from headway.lifecycle.service.settings import ServiceSettings
from headway.lifecycle.store.store import Store

GRIDS = tuple(hashlib.sha256(bytes([number])).hexdigest()[:32] for number in range(9))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_data(tmp_path_factory.mktemp("labels") / "store") as found:
        yield found
        status, err = found.stop()
        assert status == 0, err
        assert "Traceback" not in err


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"set-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]}"


def test_a_grid_is_one_version_however_often_it_is_sent(served: Served, name: str) -> None:
    add_pool(served, name, range(30))
    queue = add_queue(served, name, range(30))
    grid = lease(served, name, GRIDS[0], "anna", queue=queue)
    assert [one["sha256"] for one in grid["samples"]] == [find_id(number) for number in range(24)]
    assert (grid["left"], grid["by"], grid["classes"]) == (6, "anna", sorted(CLASSES))
    assert lease(served, name, GRIDS[1], "ben", queue=queue)["samples"][0]["sha256"] == find_id(24)
    labels: dict[str, str | None] = {one["sha256"]: one["proposed"] for one in grid["samples"]}
    labels[find_id(3)] = None
    rows = [{"sha256": sample, "label": label, "seconds": 1.5} for sample, label in labels.items()]
    body = json.dumps({"queue": queue, "by": "anna", "labels": rows}).encode()
    headers = JSON | key()
    replies = [served.ask("POST", f"/datasets/{name}/labels", body, headers) for _ in range(3)]
    assert [reply.status for reply in replies] == [201] * 3
    assert replies[0].body == replies[1].body == replies[2].body
    tree = replies[0].json()
    assert (tree["relabelled"], tree["labelled"], tree["unsure"], tree["missing"]) == (23, 23, 1, [])
    assert replies[0].headers["etag"] == f'"{tree["version"]}"'
    check_problem(served.ask("POST", f"/datasets/{name}/labels", body + b" ", headers), 422, "key-reused")
    assert read_labels(served, name) == {
        find_id(number): propose(number) if number < 24 and number != 3 else None for number in range(30)
    }
    newest, *others = list_versions(served, name)
    assert (newest["number"], newest["by"]) == (2, "anna")
    assert len(others) == 2
    # Those that are done do not come again, also if nobody was sure.
    again = lease(served, name, GRIDS[2], "anna", queue=queue)
    assert again["samples"] == []


def test_the_loop_says_what_was_mined_and_what_it_cost(served: Served, name: str) -> None:
    add_pool(served, name, range(40))
    queue = add_queue(served, name, range(20), name="first round")
    wrong = {find_id(number): CLASSES[0] for number in range(10)}
    assert set_labels(served, name, queue, wrong, "anna").status == 201
    tree = served.ask("GET", f"/datasets/{name}/loop").json()
    assert [one["number"] for one in tree["versions"]] == [0, 1, 2]
    assert tree["versions"][-1]["counts"]["relabelled"] == 10
    (row,) = tree["queues"]
    assert (row["name"], row["size"], row["marked"], row["seconds"]) == ("first round", 20, 10, 20.0)
    # The queue came from version 1, and its labels went into version 2.
    assert [row["version"], row["labelled_version"]] == [one["version"] for one in tree["versions"][1:]]
    arms = {arm["name"]: arm for arm in row["arms"]}
    # The random picks are 0, 5, 10 and 15; of the first ten proposals all but that of image 0 were wrong.
    assert (arms["random"]["picks"], arms["random"]["labelled"], arms["random"]["wrong"]) == (4, 2, 1)
    assert (arms["margin"]["picks"], arms["margin"]["labelled"], arms["margin"]["wrong"]) == (16, 8, 8)
    assert arms["margin"]["low"] > 0.6
    assert tree["labellers"] == [{"by": "anna", "samples": 10, "unsure": 0, "seconds": 20.0}]


def test_samples_are_listed_by_score(served: Served, name: str) -> None:
    add_pool(served, name, range(12))
    check_problem(served.ask("GET", f"/datasets/{name}/samples?order=score"), 404, "not-found")
    order = [7, 3, 11, 0, 5]
    queue = add_queue(served, name, order)
    found, after = list[str](), ""
    while True:
        tree = served.ask("GET", f"/datasets/{name}/samples?order=score&count=2&queue={queue}&after={after}").json()
        found += [one["sha256"] for one in tree["samples"]]
        after = tree["next"]
        if after is None:
            break
    assert found == [find_id(number) for number in order]
    assert tree["samples"][0]["proposed"] == propose(5)
    assert served.ask("GET", f"/datasets/{name}/samples?order=score&split=train").json()["samples"] == []
    for wrong in ("split=none", "class=none"):
        check_problem(served.ask("GET", f"/datasets/{name}/samples?order=score&{wrong}"), 404, "not-found")


def test_bad_requests_are_refused_and_change_nothing(served: Served, name: str) -> None:
    add_pool(served, name, range(3), classes=["cat", "dog"])
    sample, versions = find_id(0), list_versions(served, name)
    path = f"/datasets/{name}"
    label = {"sha256": sample, "label": "cat", "seconds": 1}
    check_problem(send(served, "POST", f"{path}/labels", {"labels": [label]}), 400, "key-missing")
    check_problem(send(served, "POST", f"{path}/labels", {"labels": []}, key()), 400, "malformed")
    check_problem(
        send(served, "POST", f"{path}/labels", {"labels": [label], "queue": "0" * 32}, key()), 404, "not-found"
    )
    check_problem(served.ask("POST", f"{path}/labels", b"x" * (2 << 20), JSON | key()), 413, "too-large")
    check_problem(set_labels(served, name, "", {sample: "bird"}), 422, "wrong-change")
    check_problem(send(served, "PUT", f"{path}/grids/{GRIDS[0]}", {"queue": "0" * 32}), 404, "not-found")
    check_problem(send(served, "PUT", f"{path}/grids/{GRIDS[0]}", {"count": "all"}), 400, "malformed")
    check_problem(send(served, "PUT", f"{path}/grids/..", {}), 404, "not-found")
    check_problem(send(served, "POST", f"{path}/mine", {"picks": [{"name": "gone"}]}), 422, "wrong-change")
    check_problem(send(served, "POST", f"{path}/mine", {"runs": ["none"]}, key()), 422, "wrong-change")
    check_problem(send(served, "POST", f"{path}/mine", {"runs": ["none"], "to": "/"}, key()), 400, "malformed")
    check_problem(send(served, "POST", "/datasets/none/mine", build_picks([0])), 404, "not-found")
    check_problem(served.ask("GET", "/datasets/none/loop"), 404, "not-found")
    check_problem(served.ask("GET", "/datasets/none/slices"), 404, "not-found")
    assert list_versions(served, name) == versions
    # A sample that somebody has removed meanwhile is named, and the others keep their labels.
    reply = set_labels(served, name, "", {sample: "cat", "0" * 64: "cat"})
    assert (reply.status, reply.json()["missing"]) == (201, ["0" * 64])


def test_the_page_is_the_same_for_all_and_runs_no_script_of_others(served: Served) -> None:
    pages = [served.ask("GET", path) for path in ("/label", "/label/cars", "/label/%3Cscript%3Ealert(1)%3C")]
    assert [page.status for page in pages] == [200] * 3
    assert len({page.body for page in pages}) == 1
    policy = pages[0].headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    files = {line.split(b'"')[0].decode() for line in pages[0].body.split(b'"/static/')[1:]}
    assert files == {"page.css", "label.css", "label.js"}
    for name in (*files, "service.js", "loop.js"):
        reply = served.ask("GET", f"/static/{name}")
        assert (reply.status, reply.headers["x-content-type-options"]) == (200, "nosniff")
        # Nothing is loaded from outside, and no text becomes HTML.
        assert b"http://" not in reply.body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"innerHTML" not in reply.body
    check_problem(served.ask("GET", "/static/labelling.py"), 404, "not-found")
    check_problem(served.ask("GET", "/static/..%2fassets.py"), 404, "not-found")


@pytest.mark.check
def test_tokens_say_who_labels_and_who_may_queue(tmp_path: Any) -> None:
    store = Store.make(tmp_path / "store").folder
    tokens = {
        who: headway("data-token", store, "--add", who, "--scopes", scopes, "--json").json()["token"]
        for who, scopes in (("root", "admin"), ("anna", "read,label"), ("ben", "read"))
    }
    with serving_data(store, token=tokens["root"]) as served:
        add_pool(served, "cars", range(3))
        queue = add_queue(served, "cars", range(3))
        for who, method, path, status in (
            ("anna", "PUT", f"grids/{GRIDS[0]}", 200),
            ("ben", "PUT", f"grids/{GRIDS[0]}", 403),
            ("anna", "POST", "mine", 403),
            ("ben", "GET", "loop", 200),
        ):
            headers = {"Authorization": f"Bearer {tokens[who]}"}
            tree = build_picks(range(3)) if path == "mine" else {"queue": queue}
            assert send(served, method, f"/datasets/cars/{path}", tree, headers).status == status, (who, path)
        body = {"queue": queue, "by": "root", "labels": [{"sha256": find_id(0), "label": "x", "seconds": 1}]}
        headers = key() | {"Authorization": f"Bearer {tokens['anna']}"}
        assert send(served, "POST", "/datasets/cars/labels", body, headers).status == 201
        # A name beside that of the token, and not in its place.
        assert list_versions(served, "cars")[0]["by"] == "anna/root"
        assert served.ask("GET", "/label/cars", headers={"Authorization": ""}).status == 200
        reply = served.ask("GET", "/datasets/cars/loop", headers={"Authorization": ""})
        check_problem(reply, 401, "no-token")


def test_bodies_of_one_token_take_so_much_memory_and_no_more(served: Served, name: str) -> None:
    create(served, name)
    length, path = ServiceSettings().json_bytes, f"/datasets/{name}/mine"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(served.address, timeout=WAIT_S)) for _ in range(HELD_LISTS + 1)
        ]
        for client in clients:
            client.sendall(head + bytes(length - 1))
        # Without the share of one of them, the others fit.
        (refused,), _, _ = select.select(clients, [], [], WAIT_S)
        assert refused.recv(12) == b"HTTP/1.1 429"
    until = time.monotonic() + WAIT_S
    while (reply := served.ask("POST", path, bytes(length), JSON)).status == 429 and time.monotonic() < until:
        time.sleep(0.02)
    check_problem(reply, 400, "malformed")
