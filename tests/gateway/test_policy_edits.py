"""Edits of the policy at the socket: in force at once, one after the other, signed, and undone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.policies import Admin, as_yaml, document
from tests.support.running_gateway import Gateway, chat_body, error_of
from tests.support.scripted_worker import FakeWorker


def pool_of(gateway: Gateway, **fields: Any) -> str:
    answer = gateway.chat(**fields)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-paceline-pool"])


def test_an_edit_is_in_force_for_the_next_request(line: Gateway, admin: Admin) -> None:
    assert pool_of(line, temperature=0) == "text-mtp"
    before = admin.get()
    answer = admin.put(document("all", lanes=("vlm",)), x_paceline_author="ann")
    assert answer.status_code == 200
    assert pool_of(line, temperature=0) == "all"

    version = answer.json()
    assert version | {"etag": "", "time": ""} == {
        "number": 2,
        "etag": "",
        "author": "ann",
        "time": "",
        "note": "a test",
        "reason": "edit",
        "warnings": [],
    }
    made = datetime.fromisoformat(version["time"])
    assert abs((datetime.now(UTC) - made).total_seconds()) < 60
    after = admin.get()
    assert after.json() == document("all", lanes=("vlm",))
    assert after.headers["etag"] == f'"{version["etag"]}"' != before.headers["etag"]
    assert after.headers["x-paceline-policy-version"] == "2"
    told = {"version": 2, "etag": version["etag"], "source": "admin", "file_problem": ""}
    assert line.status()["policy"] == told
    assert "paceline_policy_version 2.0" in line.client.get("/metrics").text


def test_yaml_is_taken_as_json_is(gateway: Gateway, admin: Admin) -> None:
    written = f"# with a comment\n{as_yaml(document('slow'))}"
    assert admin.put(written).json()["number"] == 2
    assert admin.document() == document("slow")
    kinds = ("application/yaml; charset=utf-8", "Application/YAML")
    for number, kind in enumerate(kinds, start=3):
        assert admin.put(written, content_type=kind).json()["number"] == number


@pytest.mark.parametrize("kind", ["application/merge-patch+json", "application/json"])
def test_a_patch_changes_what_it_names(gateway: Gateway, admin: Admin, kind: str) -> None:
    admin.put(document("vlm", limit=5, timeout_s=9.0))
    patch = {"pools": {"vlm": {"queue": {"limit": 7, "timeout_s": None}}}}
    assert admin.patch(patch, content_type=kind).status_code == 200
    assert admin.document() == document("vlm", limit=7)


def test_a_patch_may_be_yaml(gateway: Gateway, admin: Admin) -> None:
    admin.put(document("vlm", limit=5))
    assert admin.patch("pools: {vlm: {queue: null}}").status_code == 200
    assert admin.document() == document("vlm")


def test_f47_of_many_who_edit_the_same_version_one_wins(gateway: Gateway, admin: Admin) -> None:
    etag = admin.etag()
    with ThreadPoolExecutor(8) as aside:
        edits = [
            aside.submit(admin.put, document(f"pool-{number}"), if_match=etag)
            for number in range(16)
        ]
        answers = [edit.result() for edit in edits]
    (won,) = [answer for answer in answers if answer.status_code == 200]
    lost = [error_of(answer) for answer in answers if answer is not won]
    assert lost == [(412, "policy_changed")] * 15
    assert f'"{won.json()["etag"]}"' == admin.etag()
    assert [one["number"] for one in admin.get("/history").json()["versions"]] == [2, 1]


@pytest.mark.parametrize(("method", "path"), [("PUT", ""), ("PATCH", ""), ("POST", "/rollback")])
def test_f47_an_edit_says_which_version_it_was_made_from(
    gateway: Gateway, admin: Admin, method: str, path: str
) -> None:
    first = admin.etag()
    admin.put(document("b"))
    body = {"version": 1} if path else document("c")
    missing = admin.request(method, path, json=body, headers={"x-paceline-note": "x"})
    assert error_of(missing) == (428, "if_match_missing")
    for stale in (first, '"nonsense"', "", f"W/{admin.etag()}"):
        answer = admin.edit(method, body, path, if_match=stale)
        assert error_of(answer) == (412, "policy_changed")
        assert "version 2 of the policy, by loopback" in answer.json()["error"]["message"]
    for good in (admin.etag(), admin.etag().strip('"'), f'"x", {admin.etag()}', "*"):
        fresh = good if good == "*" else admin.etag()
        assert admin.edit(method, body, path, if_match=fresh).status_code == 200


@pytest.mark.parametrize(
    ("header", "value", "param"),
    [
        ("x-paceline-note", b"", "x-paceline-note"),
        ("x-paceline-note", b"%20%20", "x-paceline-note"),
        ("x-paceline-note", b"a" * 501, "x-paceline-note"),
        ("x-paceline-note", b"red%1b[31m", "x-paceline-note"),
        ("x-paceline-note", b"two%0alines", "x-paceline-note"),
        ("x-paceline-note", b"\xff", "x-paceline-note"),
        ("x-paceline-author", b"a" * 101, "x-paceline-author"),
        ("x-paceline-author", b"%E2%80%AEnna", "x-paceline-author"),
    ],
)
def test_notes_and_names_are_one_line_of_bounded_length(
    gateway: Gateway, admin: Admin, header: str, value: bytes, param: str
) -> None:
    headers = {
        b"if-match": admin.etag().encode(),
        b"x-paceline-note": b"x",
        header.encode(): value,
    }
    answer = admin.request("PUT", "", json=document("a"), headers=list(headers.items()))
    assert error_of(answer) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == param


def test_notes_may_be_in_any_language(gateway: Gateway, admin: Admin) -> None:
    note = "für alle, 100% mehr — 猫"
    for sent in (note.encode(), "f%C3%BCr alle, 100%25 mehr — 猫".encode()):
        headers = [(b"if-match", admin.etag().encode()), (b"x-paceline-note", sent)]
        answer = admin.request("PUT", "", json=document("a"), headers=headers)
        assert answer.json()["note"] == note


def test_the_way_back_is_a_new_version(line: Gateway, admin: Admin) -> None:
    first = admin.document()
    admin.put(document("a"))
    admin.put(document("b"))
    back = admin.edit("POST", {"version": 1}, "/rollback", note="too slow")
    assert (back.json()["number"], back.json()["reason"]) == (4, "rollback")
    assert admin.document() == first
    assert pool_of(line) == "vlm"
    assert line.status()["policy"]["source"] == "admin"
    shown = admin.get("/history").json()["versions"]
    assert [(one["number"], one["reason"], one["note"]) for one in shown] == [
        (4, "rollback", "back to version 1: too slow"),
        (3, "edit", "a test"),
        (2, "edit", "a test"),
        (1, "start", "the policy that comes with Paceline"),
    ]
    assert admin.get("/history/2").json()["document"] == document("a")
    again = admin.edit("POST", {"version": 4}, "/rollback", note="")
    assert again.json()["note"] == "back to version 4"


def test_there_is_no_way_back_to_what_never_was(gateway: Gateway, admin: Admin) -> None:
    for number in (0, 2, 99, -1):
        answer = admin.edit("POST", {"version": number}, "/rollback")
        assert error_of(answer) == (404, "unknown_version")
    for name in ("0", "2", "x", "1" * 5000, "-1", "²"):
        assert error_of(admin.get(f"/history/{name}")) == (404, "unknown_version")
    for body in ({}, {"version": "1"}, {"version": True}, {"version": 1, "x": 1}, [1]):
        answer = admin.edit("POST", body, "/rollback")
        assert error_of(answer) == (400, "invalid_value")


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "POST"])
def test_no_route_changes_a_version(gateway: Gateway, admin: Admin, method: str) -> None:
    for path in ("/history", "/history/1"):
        assert error_of(admin.edit(method, document("a"), path)) == (405, "method_not_allowed")
    assert error_of(admin.edit("DELETE", {})) == (405, "method_not_allowed")


def test_models_answer_to_the_names_of_the_newest_policy(
    line: Gateway, worker: FakeWorker, admin: Admin
) -> None:
    admin.patch({"models": {"demo": {"aliases": ["tiny"]}}})
    assert {one["id"] for one in line.client.get("/v1/models").json()["data"]} == {
        *("demo", "tiny", "default")
    }
    body = chat_body() | {"model": "tiny"}
    assert line.client.post("/v1/chat/completions", json=body).status_code == 200
    assert worker.heard[-1].body["model"] == "demo"
    explained = line.client.post("/v1/route/explain", json=body).json()
    assert explained["profile"]["model"] == "demo"
    assert set(explained["asker"]) == {"key", "team", "headers", "minute_of_week"}
