"""`/admin/v1/policy` at the socket: what it shows and refuses, what edits would do, who may ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from policies.document import shipped_policy
from policies.yaml_io import read_yaml
from tests.support.policies import ROUTES, Admin, document
from tests.support.running_gateway import Gateway, error_of, settings_for_tests
from tests.support.scripted_worker import TOKEN


def test_what_is_shipped_is_version_one(gateway: Gateway, admin: Admin) -> None:
    shipped = shipped_policy().model_dump(mode="json", exclude_unset=True)
    assert admin.document() == shipped
    assert gateway.status()["policy"]["source"] == "shipped"
    (version,) = admin.get("/history").json()["versions"]
    assert (version["number"], version["reason"]) == (1, "start")


def test_who_wants_yaml_gets_what_people_write(gateway: Gateway, admin: Admin) -> None:
    admin.put(document("slow"))
    for path in ("", "/history/2"):
        answer = admin.get(path, headers={"accept": "application/yaml"})
        assert answer.headers["content-type"].startswith("application/yaml")
        assert answer.headers["x-paceline-policy-version"] == "2"
        assert "  slow:\n    lanes: [vlm]" in answer.text
        assert read_yaml(answer.text) == document("slow")
    assert admin.get(headers={"accept": "application/yaml"}).headers["etag"] == admin.etag()


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize(
    ("written", "param", "says"),
    [
        ({"version": 2}, "version", "version: "),
        ({**document("a"), "colour": 1}, "colour", "colour: there is no such field"),
        (
            {**document("vlm"), "routes": [{"name": "all", "to": ["fast"]}]},
            "routes.0.to.0",
            "there is no pool 'fast'",
        ),
        (
            "version: 1\nroutes:\n- {name: all, to: [fast]}\npools: {vlm: {lanes: [vlm]}}",
            "routes.0.to.0",
            "there is no pool 'fast'",
        ),
        ([], None, "it must be a mapping"),
        ("a: b: c", None, "line 1: it is not YAML"),
        ("a: 1\na: 2", None, "line 2: 'a' stands twice"),
        ("[" * 100_000, None, "nested more than 32 deep"),
    ],
)
def test_f45_a_bad_policy_is_refused_by_field_and_changes_nothing(
    gateway: Gateway, method: str, written: Any, param: str | None, says: str
) -> None:
    with Admin(gateway.url) as admin:
        before = admin.get()
        answer = admin.edit(method, written)
        after = admin.get()
    assert error_of(answer) == (400, "invalid_policy")
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True)
    assert (after.json(), after.headers["etag"]) == (before.json(), before.headers["etag"])


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"version": NaN}', b"[" * 100_000, b""])
def test_a_body_that_is_no_json_is_refused(gateway: Gateway, admin: Admin, body: bytes) -> None:
    headers = {"if-match": admin.etag(), "x-paceline-note": "x", "content-type": "application/json"}
    answer = admin.request("PUT", "", content=body, headers=headers)
    assert error_of(answer) == (400, "invalid_policy")
    assert "it is not JSON" in answer.text


def test_every_wrong_field_is_named_and_a_great_many_are_counted(
    gateway: Gateway, admin: Admin
) -> None:
    answer = admin.put({**document("a"), **{f"wrong{number}": 1 for number in range(200)}})
    message = answer.json()["error"]["message"]
    assert "wrong0: there is no such field; wrong1: " in message
    assert "and 168 mistakes more" in message


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_kind_is_refused_unread(
    gateway: Gateway, admin: Admin, kind: str
) -> None:
    for method, path in (("PUT", ""), ("PATCH", ""), ("POST", "/validate"), ("POST", "/diff")):
        answer = admin.edit(method, "version: 1", path, content_type=kind)
        assert error_of(answer) == (415, "media_type_not_supported")
    answer = admin.put("{}", content_type="application/merge-patch+json")
    assert error_of(answer) == (415, "media_type_not_supported")


def test_a_policy_is_bounded(gateway: Gateway, admin: Admin) -> None:
    answer = admin.put("#" * 300_000)
    assert error_of(answer) == (413, "body_too_large")


def test_a_policy_is_checked_without_being_applied(gateway: Gateway, admin: Admin) -> None:
    assert admin.ask("/validate", document("a")) == {
        "valid": True,
        "problems": [],
        "warnings": [],
    }
    patch = {"routes": [{"name": "all", "to": ["vlm"]}]}
    assert admin.ask("/validate", patch, "application/merge-patch+json")["valid"]
    written = "version: 1\nroutes:\n- name: all\n  to: [b]\ncolour: red\npools: {a: {lanes: [x]}}\n"
    assert admin.ask("/validate", written, "application/yaml") == {
        "valid": False,
        "problems": [{"field": "colour", "sentence": "there is no such field", "line": 5}],
        "warnings": [],
    }
    written = written.replace("colour: red\n", "")
    assert admin.ask("/validate", written, "application/yaml")["problems"] == [
        {"field": "routes.0.to.0", "sentence": "there is no pool 'b'", "line": 4}
    ]
    assert admin.ask("/validate", "{") == {
        "valid": False,
        "problems": [{"field": "", "sentence": "it is not JSON", "line": None}],
        "warnings": [],
    }
    assert len(admin.get("/history").json()["versions"]) == 1


def test_a_difference_tells_what_would_change_and_what_would_move(
    line: Gateway, admin: Admin
) -> None:
    for _ in range(3):
        line.chat(temperature=0, stop=["canary stop"], logit_bias={"1": 5})
        line.chat(temperature=0)
    line.chat()
    patch = {"pools": {"text-mtp": {"queue": {"limit": 1}}}}
    same = admin.ask("/diff", patch, "application/merge-patch+json")
    assert same["changes"] == [{"field": "pools.text-mtp.queue.limit", "old": 128, "new": 1}]
    assert same["moves"] == [
        {"from": "vlm", "to": "vlm", "count": 4},
        {"from": "text-mtp", "to": "text-mtp", "count": 3},
    ]
    moved = admin.ask("/diff", document("all", lanes=("text-mtp",)))
    assert moved["decisions"] == 7
    assert moved["onto"]["number"] == 1
    assert f'"{moved["onto"]["etag"]}"' == admin.etag()
    # What the speculative lane cannot do finds nobody where there is nothing else.
    assert moved["moves"] == [
        {"from": "vlm", "to": "none", "count": 4},
        {"from": "text-mtp", "to": "all", "count": 3},
    ]
    assert {"field": "pools.all", "new": {"lanes": ["text-mtp"]}} in moved["changes"]
    assert admin.document() != document("all", lanes=("text-mtp",)), "nothing was applied"
    assert error_of(admin.request("POST", "/diff", json={"version": 2})) == (400, "invalid_policy")


def test_only_the_admin_key_opens_a_route_of_the_policy(tmp_path: Path) -> None:
    keys = {"api_key": SecretStr("data"), "admin_key": SecretStr("admin")}
    with Gateway(settings_for_tests(tmp_path, **keys)) as gateway:
        for method, path in ROUTES:
            statuses = {}
            for key in ("", "data", TOKEN, "wrong", "admin"):
                with Admin(gateway.url, key) as one:
                    answer = one.request(method, path, json=document("a"))
                    statuses[key] = answer.status_code
                    if key != "admin":
                        assert error_of(answer) == (401, "invalid_api_key")
            assert statuses["admin"] not in (401, 403), (method, path)


def test_without_an_admin_key_only_this_machine_is_trusted(gateway: Gateway) -> None:
    with Admin(gateway.url) as admin:
        assert admin.get().status_code == 200
        proxied = {"x-forwarded-for": "10.0.0.1"}
        for method, path in ROUTES:
            answer = admin.request(method, path, headers=proxied, json={})
            assert error_of(answer) == (403, "not_allowed")


def test_a_page_of_a_foreign_site_cannot_edit_through_its_reader(gateway: Gateway) -> None:
    """A browser tells where a page comes from, and a name of its own is no name of ours."""
    with Admin(gateway.url) as admin:
        plain = {"content-type": "text/plain", "origin": "http://evil.example"}
        answer = admin.request("POST", "/rollback", content='{"version": 1}', headers=plain)
        assert error_of(answer) == (403, "not_allowed")
        assert "access-control-allow-origin" not in answer.headers
        rebound = {"host": "evil.example"}
        assert admin.get(headers=rebound).status_code == 421
        preflight = admin.request("OPTIONS", "", headers=plain)
        assert error_of(preflight) == (405, "method_not_allowed")
