"""`/admin/v1/policy`: reading, editing, validating, diffing, rolling back and authorizing."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from policies.document import default_policy, default_text
from policies.json_schema import schema
from policies.yaml_io import read_yaml
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway, chat_body, status_and_code

UNKNOWN_POOL = {**single_pool_policy("vlm"), "routes": [{"name": "all", "to": ["fast"]}]}


@pytest.fixture(scope="module")
def module_admin(module_gateway: RunningGateway) -> Iterator[PolicyAdmin]:
    """Yield an admin for all tests that change nothing."""
    with PolicyAdmin(module_gateway.url, module_gateway.admin_key) as policy_admin:
        yield policy_admin


def test_an_edit_may_be_yaml_and_a_client_that_accepts_yaml_gets_it(admin: PolicyAdmin) -> None:
    document = f"# with a comment\n{to_yaml(single_pool_policy('slow'))}"
    assert admin.put(document).json()["number"] == 2
    for number, kind in enumerate(("application/yaml; charset=utf-8", "Application/YAML"), start=3):
        assert admin.put(document, content_type=kind).json()["number"] == number
    assert admin.document() == single_pool_policy("slow")
    admin.put(single_pool_policy("vlm", limit=5))
    assert admin.patch("pools: {vlm: {queue: null}}").status_code == 200
    for path in ("", "/history/6"):
        response = admin.get(path, headers={"accept": "application/yaml"})
        assert response.headers["content-type"].startswith("application/yaml")
        assert response.headers["x-paceline-policy-version"] == "6"
        assert "  vlm:\n    lanes: [vlm]" in response.text
        assert read_yaml(response.text) == single_pool_policy("vlm") == admin.document()
    assert admin.get(headers={"accept": "application/yaml"}).headers["etag"] == admin.etag()


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
@pytest.mark.parametrize(
    ("document", "param", "message"),
    [
        ({"version": 2}, "version", "version: "),
        ({**single_pool_policy("a"), "colour": 1}, "colour", "colour: unknown field"),
        (UNKNOWN_POOL, "routes.all.to.#1", "there is no pool 'fast'"),
        (to_yaml(UNKNOWN_POOL), "routes.all.to.#1", "there is no pool 'fast'"),
        ([], None, "it must be a mapping"),
        ("a: b: c", None, "line 1: this ':' is not possible here"),
        ("a: 1\na: 2", None, "line 2: 'a' is a duplicate key"),
        ("[" * 100_000, None, "nested more than 32 levels deep"),
        (
            {**single_pool_policy("a"), **{f"wrong{number}": 1 for number in range(200)}},
            "wrong0",
            "wrong31: unknown field; and 168 more problems",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_f45_an_invalid_policy_is_rejected_by_field_and_changes_nothing(
    module_admin: PolicyAdmin, method: str, document: Any, param: str | None, message: str
) -> None:
    before = module_admin.get()
    response = module_admin.edit(method, document)
    after = module_admin.get()
    assert status_and_code(response) == (400, "invalid_policy")
    error = response.json()["error"]
    assert (error["param"], message in error["message"]) == (param, True)
    assert (after.json(), after.headers["etag"]) == (before.json(), before.headers["etag"])


def test_a_body_of_an_unsupported_content_type_or_beyond_the_limit_or_not_json_is_rejected(
    module_admin: PolicyAdmin,
) -> None:
    routes = (("PUT", ""), ("PATCH", ""), ("POST", "/validate"), ("POST", "/diff"))
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        for method, path in routes:
            response = module_admin.edit(method, "version: 1", path, content_type=content_type)
            assert status_and_code(response) == (415, "unsupported_media_type")
    response = module_admin.put("{}", content_type="application/merge-patch+json")
    assert status_and_code(response) == (415, "unsupported_media_type")
    assert status_and_code(module_admin.put("#" * 300_000)) == (413, "body_too_large")
    headers = {"if-match": module_admin.etag(), "x-paceline-note": "x"}
    headers["content-type"] = "application/json"
    for body in (b"{", b"\xff", b'{"version": NaN}', b"[" * 100_000, b""):
        response = module_admin.request("PUT", "", content=body, headers=headers)
        assert status_and_code(response) == (400, "invalid_policy")
        assert "it is not valid JSON" in response.text


def test_validate_reports_problems_without_applying_the_policy(module_admin: PolicyAdmin) -> None:
    valid = {"valid": True, "problems": [], "warnings": []}
    assert module_admin.post("/validate", single_pool_policy("a")) == valid
    patch = {"routes": [{"name": "all", "to": ["vlm"]}]}
    assert module_admin.post("/validate", patch, "application/merge-patch+json") == valid
    good = "version: 1\nroutes:\n- name: all\n  to: [b]\npools: {a: {lanes: [x]}}\n"
    for text, field, message, line in (
        (good.replace("pools", "colour: red\npools"), "colour", "unknown field", 5),
        (good.replace("to:", "too:"), "routes.all.too", "unknown field; did you mean 'to'?", 4),
        (good, "routes.all.to.#1", "there is no pool 'b'", 4),
    ):
        problem = {"field": field, "message": message, "line": line}
        told = module_admin.post("/validate", text, "application/yaml")
        assert told == {"valid": False, "problems": [problem], "warnings": []}
    problem = {"field": "", "message": "it is not valid JSON", "line": None}
    broken = module_admin.post("/validate", "{")
    assert broken == {"valid": False, "problems": [problem], "warnings": []}
    assert len(module_admin.get("/history").json()["versions"]) == 1


def test_diff_lists_changed_fields_and_requests_that_would_change_pools(
    gateway_with_worker: RunningGateway, admin: PolicyAdmin
) -> None:
    for _ in range(3):
        gateway_with_worker.chat(temperature=0, stop=["canary stop"], logit_bias={"1": 5})
        gateway_with_worker.chat(temperature=0)
    gateway_with_worker.chat()
    patch = {"pools": {"text-mtp": {"queue": {"limit": 1}}}}
    limit_diff = admin.post("/diff", patch, "application/merge-patch+json")
    assert limit_diff["changes"] == [{"field": "pools.text-mtp.queue.limit", "old": 128, "new": 1}]
    assert limit_diff["moves"] == [
        {"from": "vlm", "to": "vlm", "count": 4},
        {"from": "text-mtp", "to": "text-mtp", "count": 3},
    ]
    pool_diff = admin.post("/diff", single_pool_policy("all", lanes=("text-mtp",)))
    assert pool_diff["decisions"] == 7
    assert pool_diff["onto"]["number"] == 1
    assert f'"{pool_diff["onto"]["etag"]}"' == admin.etag()
    # Without another pool, requests that the speculative lane cannot serve have no pool.
    assert pool_diff["moves"] == [
        {"from": "vlm", "to": "none", "count": 4},
        {"from": "text-mtp", "to": "all", "count": 3},
    ]
    assert {"field": "pools.all", "new": {"lanes": ["text-mtp"]}} in pool_diff["changes"]
    assert admin.document() != single_pool_policy("all", lanes=("text-mtp",)), "nothing was applied"
    invalid = admin.request("POST", "/diff", json={"version": 2})
    assert status_and_code(invalid) == (400, "invalid_policy")


def test_an_edit_applies_to_the_next_request(gateway_with_worker, admin) -> None:
    gateway = gateway_with_worker
    assert gateway.chat(temperature=0).headers["x-paceline-pool"] == "text-mtp"
    before = admin.get()
    response = admin.put(single_pool_policy("all", lanes=("vlm",)), x_paceline_author="ann")
    assert response.status_code == 200
    assert gateway.chat(temperature=0).headers["x-paceline-pool"] == "all"

    version = response.json()
    etag, created = version.pop("etag"), datetime.fromisoformat(version.pop("time"))
    told = {"number": 2, "author": "ann", "note": "a test", "reason": "edit", "warnings": []}
    assert version == told
    assert abs((datetime.now(UTC) - created).total_seconds()) < 60
    after = admin.get()
    assert after.json() == single_pool_policy("all", lanes=("vlm",))
    assert after.headers["etag"] == f'"{etag}"' != before.headers["etag"]
    assert after.headers["x-paceline-policy-version"] == "2"
    expected = {"version": 2, "source": "admin", "file_problem": ""}
    assert gateway.status()["policy"] == expected
    assert "paceline_policy_version 2.0" in gateway.client.get("/metrics").text


def test_the_text_of_the_author_is_kept_with_its_comments(admin: PolicyAdmin) -> None:
    def text(path: str = "") -> str:
        return str(admin.get(path, headers={"accept": "application/yaml"}).text)

    assert text() == default_text()
    document = f"# für alle\n{to_yaml(single_pool_policy('slow'))}\n# the end"
    admin.put(document)
    admin.put(document.replace("für alle", "for all"))
    assert text() == document.replace("für alle", "for all"), "a change of comments is an edit"
    assert admin.document() == single_pool_policy("slow")
    admin.put(single_pool_policy("b"))
    assert text() == "version: 1\nroutes:\n- name: all\n  to: [b]\npools:\n  b:\n    lanes: [vlm]\n"
    admin.patch({"limits": {"max_tokens": 7}})
    assert "max_tokens: 7" in text(), "a patch has no text"
    admin.edit("POST", {"version": 2}, "/rollback")
    assert text() == text("/history/2") == text("/history/6") == document
    assert admin.get("/history/6").json()["text"] == document
    assert "text" not in admin.get("/history").json()["versions"][0]


def test_the_shipped_policy_is_version_one_and_the_page_can_load_schema_and_valid_examples(
    module_gateway: RunningGateway, module_admin: PolicyAdmin
) -> None:
    shipped = default_policy().model_dump(mode="json", exclude_unset=True)
    assert module_admin.document() == shipped
    assert module_gateway.status()["policy"]["source"] == "shipped"
    (version,) = module_admin.get("/history").json()["versions"]
    assert (version["number"], version["reason"]) == (1, "start")
    assert module_admin.get("/schema").json() == json.loads(schema())
    examples = module_admin.get("/examples").json()["examples"]
    assert [one["name"] for one in examples][:2] == ["default", "night_batch"]
    assert len(examples) == 6
    for example in examples:
        assert 4 < len(example["title"]) < 40, example["name"]
        assert module_admin.post("/validate", example["text"], "application/yaml")["problems"] == []


@pytest.mark.parametrize("content_type", ["application/merge-patch+json", "application/json"])
def test_a_patch_changes_only_the_fields_that_it_contains(admin, content_type) -> None:
    admin.put(single_pool_policy("vlm", limit=5, timeout_s=9.0))
    patch = {"pools": {"vlm": {"queue": {"limit": 7, "timeout_s": None}}}}
    assert admin.patch(patch, content_type=content_type).status_code == 200
    assert admin.document() == single_pool_policy("vlm", limit=7)


def test_f47_one_of_many_concurrent_edits_of_a_version_succeeds(admin: PolicyAdmin) -> None:
    etag = admin.etag()
    with ThreadPoolExecutor(8) as executor:
        edits = [
            executor.submit(admin.put, single_pool_policy(f"pool-{number}"), if_match=etag)
            for number in range(16)
        ]
        responses = [edit.result() for edit in edits]
    (accepted,) = [response for response in responses if response.status_code == 200]
    rejected = [status_and_code(response) for response in responses if response is not accepted]
    assert rejected == [(412, "version_conflict")] * 15
    assert f'"{accepted.json()["etag"]}"' == admin.etag()
    assert [version["number"] for version in admin.get("/history").json()["versions"]] == [2, 1]


@pytest.mark.parametrize(("method", "path"), [("PUT", ""), ("PATCH", ""), ("POST", "/rollback")])
def test_f47_an_edit_requires_the_etag_of_the_current_version(admin, method, path) -> None:
    first = admin.etag()
    admin.put(single_pool_policy("b"))
    body = {"version": 1} if path else single_pool_policy("c")
    missing = admin.request(method, path, json=body, headers={"x-paceline-note": "x"})
    assert status_and_code(missing) == (428, "precondition_required")
    for stale in (first, '"nonsense"', "", f"W/{admin.etag()}"):
        response = admin.edit(method, body, path, if_match=stale)
        assert status_and_code(response) == (412, "version_conflict")
        assert "version 2 by admin is now active" in response.json()["error"]["message"]
    for current in (admin.etag(), admin.etag().strip('"'), f'"x", {admin.etag()}', "*"):
        fresh = current if current == "*" else admin.etag()
        assert admin.edit(method, body, path, if_match=fresh).status_code == 200


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-paceline-note", b""),
        ("x-paceline-note", b"%20%20"),
        ("x-paceline-note", b"a" * 501),
        ("x-paceline-note", b"red%1b[31m"),
        ("x-paceline-note", b"two%0alines"),
        ("x-paceline-note", b"\xff"),
        ("x-paceline-author", b"a" * 101),
        ("x-paceline-author", b"%E2%80%AEnna"),
    ],
)
def test_notes_and_authors_must_be_a_single_line_of_bounded_length(
    module_admin: PolicyAdmin, header: str, value: bytes
) -> None:
    etag = module_admin.etag().encode()
    headers = {b"if-match": etag, b"x-paceline-note": b"x", header.encode(): value}
    response = module_admin.request(
        "PUT", "", json=single_pool_policy("a"), headers=list(headers.items())
    )
    assert status_and_code(response) == (400, "invalid_value")
    assert response.json()["error"]["param"] == header


def test_notes_may_be_in_any_language(admin: PolicyAdmin) -> None:
    note = "für alle, 100% mehr — 猫"
    for encoded in (note.encode(), "f%C3%BCr alle, 100%25 mehr — 猫".encode()):
        headers = [(b"if-match", admin.etag().encode()), (b"x-paceline-note", encoded)]
        response = admin.request("PUT", "", json=single_pool_policy("a"), headers=headers)
        assert response.json()["note"] == note


def test_a_rollback_creates_a_new_version(gateway_with_worker, admin) -> None:
    first = admin.document()
    admin.put(single_pool_policy("a"))
    admin.put(single_pool_policy("b"))
    rollback = admin.edit("POST", {"version": 1}, "/rollback", note="too slow")
    assert (rollback.json()["number"], rollback.json()["reason"]) == (4, "rollback")
    assert admin.document() == first
    assert gateway_with_worker.chat().headers["x-paceline-pool"] == "vlm"
    assert gateway_with_worker.status()["policy"]["source"] == "admin"
    versions = admin.get("/history").json()["versions"]
    assert [(one["number"], one["reason"], one["note"]) for one in versions] == [
        (4, "rollback", "back to version 1: too slow"),
        (3, "edit", "a test"),
        (2, "edit", "a test"),
        (1, "start", "the policy shipped with Paceline"),
    ]
    assert admin.get("/history/2").json()["document"] == single_pool_policy("a")
    repeated = admin.edit("POST", {"version": 4}, "/rollback", note="")
    assert repeated.json()["note"] == "back to version 4"


def test_an_unknown_version_is_not_found_and_no_route_changes_one(module_admin) -> None:
    for number in (0, 2, 99, -1):
        response = module_admin.edit("POST", {"version": number}, "/rollback")
        assert status_and_code(response) == (404, "version_not_found")
    for name in ("0", "2", "x", "1" * 5000, "-1", "²"):
        assert status_and_code(module_admin.get(f"/history/{name}")) == (404, "version_not_found")
    for body in ({}, {"version": "1"}, {"version": True}, {"version": 1, "x": 1}):
        response = module_admin.edit("POST", body, "/rollback")
        assert status_and_code(response) == (400, "invalid_value")
    response = module_admin.edit("POST", [1], "/rollback")
    assert status_and_code(response) == (400, "invalid_json")
    for method, path in itertools.product(
        ("PUT", "PATCH", "DELETE", "POST"), ("/history", "/history/1")
    ):
        response = module_admin.edit(method, single_pool_policy("a"), path)
        assert status_and_code(response) == (405, "method_not_allowed")
    assert status_and_code(module_admin.edit("DELETE", {})) == (405, "method_not_allowed")


def test_a_new_alias_of_the_policy_routes_to_its_model(gateway_with_worker, worker, admin) -> None:
    gateway = gateway_with_worker
    admin.patch({"models": {"demo": {"aliases": ["tiny"]}}})
    listed = {entry["id"] for entry in gateway.client.get("/v1/models").json()["data"]}
    assert listed == {"demo", "tiny", "default"}
    assert gateway.chat(model="tiny").status_code == 200
    assert worker.requests[-1].body["model"] == "demo"
    explained = gateway.client.post("/v1/route/explain", json=chat_body(model="tiny")).json()
    assert explained["profile"]["model"] == "demo"
    assert set(explained["caller"]) == {"key", "team", "headers", "minute_of_week"}
