"""S20 (CVE-2025-0330, CVE-2024-9606): what is secret, and what people say, stays where it is."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from pydantic import SecretStr

from tests.support.log_capture import Heard
from tests.support.running_gateway import Gateway, chat_body, eventually, settings_for_tests
from tests.support.scripted_worker import DONE, FakeWorker, Script, chunk, event

PROMPT = "canary-words-of-a-person"
ADMIN = "canary-admin-key"
STATIC = "canary-static-key"
WRONG = "canary-wrong-key"


SCRIPTS = (
    Script(),
    Script(status=500, body=json.dumps({"error": {"message": PROMPT}}).encode()),
    Script(status=503, body=PROMPT.encode()),
    Script(status=404, body=PROMPT.encode()),
    Script(body=PROMPT.encode()),
    Script(raw=b"HTTP/1.1 200 OK\r\nx: " + PROMPT.encode() + b"\r\nbad header\r\n\r\n"),
    Script(raw=PROMPT.encode()),
    Script(events=(chunk({"content": "a"}), event({"error": {"message": PROMPT, "code": PROMPT}}))),
    Script(events=(b"data: " + PROMPT.encode() + b"\n\n", DONE)),
    Script(events=(chunk({"content": "a"}), DONE)),
    Script(cut_after=1),
    Script(drop=True),
)


def test_a_secret_and_a_prompt_are_in_no_log_metric_error_status_or_state(
    tmp_path: Path, worker: FakeWorker, heard: Heard
) -> None:
    settings = settings_for_tests(
        tmp_path,
        admin_key=SecretStr(ADMIN),
        api_key=SecretStr(STATIC),
        idle_timeout_s=2,
        access_log=str(tmp_path / "access.jsonl"),
    )
    told: dict[str, str] = {}
    with Gateway(settings) as gateway:
        gateway.join(worker)
        made = gateway.make_key(name="Ann", requests_a_minute=30, tokens_a_minute=100_000)
        spent = gateway.make_key(name="Bob", requests_a_minute=1)
        revoked = gateway.make_key(name="Eve")
        gateway.admin.delete(f"/admin/v1/keys/{revoked['id']}")
        secrets = {made["secret"], spent["secret"], revoked["secret"], ADMIN, STATIC, WRONG, PROMPT}
        said = chat_body(messages=[{"role": "user", "content": PROMPT}], max_tokens=5)
        for number, script in enumerate(SCRIPTS):
            worker.script = script
            for stream in (False, True):
                gateway.join(worker, boot_id=f"boot-{number}-{stream}")
                # Another seed each time: a body over which two workers were lost is not sent again.
                asked = {**said, "stream": stream, "seed": 2 * number + stream}
                told[f"{number} {stream}"] = _post(gateway, made["secret"], asked).text
        worker.script = Script()
        wrong = (
            {**said, "temperature": PROMPT},
            {**said, "model": 7},
            {**said, "messages": [{"role": PROMPT, "content": PROMPT}]},
            {**said, "tools": [{"type": "function", "function": {"name": PROMPT * 9}}]},
        )
        for index, body in enumerate(wrong):
            told[f"wrong {index}"] = _post(gateway, made["secret"], body).text
        broken = b'{"model": "demo", "messages": "' + PROMPT.encode()
        told["broken"] = _post(gateway, made["secret"], broken).text
        for secret in (WRONG, revoked["secret"], spent["secret"], spent["secret"], ADMIN):
            told[f"by {secret}"] = _post(gateway, secret, said).text
        with httpx.stream(
            *("POST", f"{gateway.url}/v1/chat/completions"),
            json={**said, "stream": True},
            headers={"authorization": f"Bearer {made['secret']}"},
        ) as answer:
            next(answer.iter_raw())
        eventually(lambda: worker.answering == 0)
        told["bad terms"] = gateway.admin.post(
            "/admin/v1/keys", json={"name": PROMPT * 9, "team": STATIC + "\n"}
        ).text
        told["metrics"] = gateway.client.get("/metrics").text
        bearer = {"authorization": f"Bearer {STATIC}"}
        told["status"] = gateway.client.get("/v1/status", headers=bearer).text
        for path in ("keys", "usage", "usage?format=csv", "workers"):
            told[path] = gateway.admin.get(f"/admin/v1/{path}").text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            told[str(file)] = file.read_text()
    assert '"usage"' in told[str(tmp_path / "state.json")]
    assert len(worker.heard) > 2 * len(SCRIPTS)
    assert told[str(tmp_path / "access.jsonl")].count('"request.done"') > 2 * len(SCRIPTS)
    for name in ("attempt.failed", "stream.broken", "stream.cut", "attempt.lost"):
        assert any(text.startswith(name) for text in heard.texts), name
    for secret in secrets:
        leaks = [where for where, text in told.items() if secret in text]
        leaks += [text[:300] for text in heard.texts if secret in text]
        assert leaks == []


def _post(gateway: Gateway, secret: str, body: object) -> httpx.Response:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(
        f"{gateway.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {secret}"},
        timeout=30,
        **sent,
    )
