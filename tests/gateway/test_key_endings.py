"""A key that is revoked or expires ends its running answers too."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from tests.support.running_gateway import (
    Gateway,
    bearing,
    chat_body,
    error_of,
    eventually,
    settings_for_tests,
)
from tests.support.scripted_worker import DONE, FakeWorker, Script


def test_a_revoked_key_stops_at_once(line: Gateway) -> None:
    made, other = line.make_key(), line.make_key()
    line.bear(made["secret"])
    assert line.chat().status_code == 200
    revoked = line.admin.delete(f"/admin/v1/keys/{made['id']}").json()
    assert revoked["state"] == "revoked"
    assert error_of(line.chat()) == (401, "invalid_api_key")
    line.bear(other["secret"])
    assert line.chat().status_code == 200
    again = line.admin.delete(f"/admin/v1/keys/{made['id']}").json()
    assert again == revoked, "it was revoked when it was revoked"


def test_f51_a_revoked_key_stops_a_running_stream(line: Gateway, worker: FakeWorker) -> None:
    made, other = line.make_key(), line.make_key()
    worker.script = Script(hang_after=3)
    body = chat_body(stream=True)
    path = "/v1/chat/completions"
    with (
        line.client.stream("POST", path, json=body, headers=bearing(made)) as ended,
        line.client.stream("POST", path, json=body, headers=bearing(other)) as going,
    ):
        of_ended, of_going = ended.iter_raw(), going.iter_raw()
        next(of_ended)
        received = next(of_going)
        line.admin.delete(f"/admin/v1/keys/{made['id']}")
        rest = b"".join(of_ended)
        worker.go_on.set()
        received += b"".join(of_going)
    assert b'"code":"key_revoked"' in rest
    assert b"[DONE]" not in rest
    assert received.endswith(DONE)


def test_a_revoked_key_ends_an_answer_that_has_not_begun(line: Gateway, worker: FakeWorker) -> None:
    made = line.make_key()
    worker.script = Script(hang=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            line.client.post, "/v1/chat/completions", json=chat_body(), headers=bearing(made)
        )
        assert worker.hearing.wait(10)
        line.admin.delete(f"/admin/v1/keys/{made['id']}")
        assert error_of(waiting.result(30)) == (401, "key_revoked")


def test_an_expired_key_stops_and_so_does_its_stream(line: Gateway, worker: FakeWorker) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1.5)
    made = line.make_key(expires_at=soon.isoformat())
    line.bear(made["secret"])
    worker.script = Script(hang_after=3)
    with line.stream() as answer:
        received = b"".join(answer.iter_raw())
    assert b'"code":"key_revoked"' in received
    assert error_of(line.chat()) == (401, "invalid_api_key")
    assert line.admin.get(f"/admin/v1/keys/{made['id']}").json()["state"] == "expired"


def test_a_key_expires_also_while_the_state_cannot_be_read(line: Gateway, tmp_path: Path) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=1.5)
    line.bear(line.make_key(expires_at=soon.isoformat())["secret"])
    assert line.chat().status_code == 200
    (tmp_path / "state.json").write_text("{")
    eventually(lambda: line.chat().status_code == 401)


def test_f50_a_key_that_another_gateway_revokes_stops_here_too(
    tmp_path: Path, worker: FakeWorker
) -> None:
    """S12 (LiteLLM #35535, #9820): no process goes on with what it remembers of a key."""
    with (
        Gateway(settings_for_tests(tmp_path)) as here,
        Gateway(settings_for_tests(tmp_path)) as there,
    ):
        here.join(worker)
        made = there.make_key()
        here.bear(made["secret"])
        eventually(lambda: httpx.get(f"{here.url}/v1/models").status_code == 401)
        worker.script = Script(hang_after=3)
        with here.stream() as answer:
            pieces = answer.iter_raw()
            next(pieces)
            there.admin.delete(f"/admin/v1/keys/{made['id']}")
            rest = b"".join(pieces)
        assert b'"code":"key_revoked"' in rest
        assert error_of(here.chat()) == (401, "invalid_api_key")


def test_whoever_changes_a_revoked_key_does_not_bring_it_back(
    tmp_path: Path, worker: FakeWorker
) -> None:
    """CVE-2026-12795 and LiteLLM #9820: an update and a revocation at the same moment."""
    with Gateway(settings_for_tests(tmp_path)) as gateway:
        gateway.join(worker)
        made = gateway.make_key()
        path = f"/admin/v1/keys/{made['id']}"
        before = json.loads((tmp_path / "state.json").read_text())["keys"][made["id"]]
        gateway.admin.delete(path)
        # As another gateway would that read the key before: the whole record, written late.
        state = json.loads((tmp_path / "state.json").read_text())
        state["keys"][made["id"]] = {**before, "team": "late"}
        (tmp_path / "state.json").write_text(json.dumps(state))
        late = gateway.admin.get(path).json()
        assert (late["team"], late["state"]) == ("late", "revoked")
        assert error_of(gateway.admin.patch(path, json={"team": "x"})) == (409, "key_is_revoked")
        gateway.bear(made["secret"])
        assert error_of(gateway.chat()) == (401, "invalid_api_key")
