"""S20 (CVE-2025-0330, CVE-2024-9606): what is secret, and what people say, stays where it is.

S20 (CVE-2025-0330, CVE-2024-9606): wherever in a request its words stand, nothing tells them.

Everything that leaves the process is searched, but what a worker is sent and what it answers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tests.support.images import data_url, png_header
from tests.support.log_capture import LogCapture
from tests.support.policies import PolicyAdmin, single_pool_policy
from tests.support.running_gateway import RunningGateway, chat_body, make_settings, wait_until
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, chunk, event

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
    tmp_path: Path, worker: ScriptedWorker, log_capture: LogCapture
) -> None:
    settings = make_settings(
        tmp_path,
        admin_key=SecretStr(ADMIN),
        api_key=SecretStr(STATIC),
        idle_timeout_s=2,
        access_log=str(tmp_path / "access.jsonl"),
    )
    told: dict[str, str] = {}
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        made = gateway.create_key(name="Ann", requests_a_minute=30, tokens_a_minute=100_000)
        spent = gateway.create_key(name="Bob", requests_a_minute=1)
        revoked = gateway.create_key(name="Eve")
        gateway.admin.delete(f"/admin/v1/keys/{revoked['id']}")
        secrets = {made["secret"], spent["secret"], revoked["secret"], ADMIN, STATIC, WRONG, PROMPT}
        said = chat_body(messages=[{"role": "user", "content": PROMPT}], max_tokens=5)
        for number, script in enumerate(SCRIPTS):
            worker.script = script
            for stream in (False, True):
                gateway.send_heartbeat(worker, boot_id=f"boot-{number}-{stream}")
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
        ) as response:
            next(response.iter_raw())
        wait_until(lambda: worker.in_flight == 0)
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
    assert len(worker.requests) > 2 * len(SCRIPTS)
    assert told[str(tmp_path / "access.jsonl")].count('"request.done"') > 2 * len(SCRIPTS)
    for name in ("attempt.failed", "stream.broken", "stream.cut", "attempt.lost"):
        assert any(text.startswith(name) for text in log_capture.texts), name
    for secret in secrets:
        leaks = [where for where, text in told.items() if secret in text]
        leaks += [text[:300] for text in log_capture.texts if secret in text]
        assert leaks == []


def _post(gateway: RunningGateway, secret: str, body: object) -> httpx.Response:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(
        f"{gateway.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {secret}"},
        timeout=30,
        **sent,
    )


WORD = "canary-of-a-person"
PICTURE = png_header(8, 8) + WORD.encode() * 9
JOIN = "canary-join-token"
HEADERS = {
    "cookie": WORD,
    "user-agent": WORD,
    "referer": f"http://{WORD}/",
    "x-api-key": WORD,
    "x-forwarded-for": WORD,
    "openai-organization": WORD,
    "idempotency-key": WORD,
}
FIELDS = (
    *("messages", "prompt", "stream", "stream_options", "max_tokens", "stop", "n", "seed"),
    *("temperature", "top_k", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("response_format", "guided_json", "guided_choice", "chat_template_kwargs", "metadata"),
    *("user", "prompt_cache_key", "thinking_budget", "draft_tokens", "metrics", "specprefill"),
)


def said() -> dict[str, Any]:
    """A good request that says the word wherever one may be said."""
    function = {"name": "look", "arguments": json.dumps({"word": WORD})}
    schema = {"type": "object", "properties": {WORD: {"type": "string", "description": WORD}}}
    return chat_body(
        messages=[
            {"role": "system", "content": WORD},
            {"role": "user", "name": WORD, "content": WORD},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture()}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": WORD},
        ],
        tools=[
            {"type": "function", "function": {"name": "look", "parameters": schema}},
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        stop=[WORD],
        user=WORD,
        metadata={WORD: WORD},
        prompt_cache_key=WORD,
    )


def picture() -> str:
    return data_url(PICTURE)


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return chat_body(messages=[{"role": role, "content": content}])


def wrong() -> Iterator[Any]:
    """Requests that are refused, most of them, with the word where it is wrong."""
    for field in FIELDS:
        for value in (WORD, [WORD], {WORD: WORD}, [{WORD: WORD}], [{"type": WORD}]):
            yield {**chat_body(), field: value}
    yield message(WORD, role=WORD)
    yield message([{"type": WORD}])
    yield message([{"type": "image_url", "image_url": {"url": f"https://{WORD}.example/"}}])
    yield message([{"type": "image_url", "image_url": {"url": f"file:///{WORD}"}}])
    yield message([{"type": "image_url", "image_url": {"url": f"data:image/{WORD};base64,AA"}}])
    yield message([{"type": "image_url", "image_url": {"url": picture()[:60] + f",{WORD}"}}])
    yield message([{"type": "input_audio", "input_audio": {"data": WORD, "format": WORD}}])
    yield {"model": "demo", "prompt": [WORD, 7]}
    yield b'{"model": "demo", "messages": "' + WORD.encode()
    yield WORD.encode()


class Told:
    """All that was told, by who told it."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def take(self, where: str, response: httpx.Response) -> httpx.Response:
        head = "\n".join(f"{name}: {value}" for name, value in response.headers.multi_items())
        self.texts[f"{len(self.texts)} {where}"] = f"{head}\n{response.text}"
        return response

    def leaks(self, *secrets: str) -> list[str]:
        return [
            f"{where}: {text[:300]}"
            for where, text in self.texts.items()
            if any(secret in text for secret in secrets)
        ]


def test_what_a_request_says_is_in_no_log_error_explanation_diff_metric_or_state(
    tmp_path: Path,
    worker: ScriptedWorker,
    log_capture: LogCapture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    access_log = tmp_path / "access.jsonl"
    settings = make_settings(tmp_path, admin_key=SecretStr(ADMIN), access_log=str(access_log))
    settings = settings.model_copy(update={"join_token": SecretStr(JOIN)})
    told = Told()
    with RunningGateway(settings) as gateway, PolicyAdmin(gateway.url, ADMIN) as admin:
        beat = worker.report().model_dump(mode="json")
        told.take("join", put_worker(gateway, beat, JOIN))
        told.take("join wrong", put_worker(gateway, beat, WORD))
        for field in beat.keys() - {"labels"}:  # which are told of, as a worker's name is
            told.take(f"report {field}", put_worker(gateway, {**beat, field: [WORD]}, JOIN))
        key = gateway.create_key(name="Ann", requests_a_minute=1_000_000)
        shown = {"authorization": f"Bearer {key['secret']}", **HEADERS}
        with httpx.Client(base_url=gateway.url, headers=shown, timeout=30) as client:
            for stream in (False, True):
                body = {**said(), "stream": stream}
                response = told.take("good", post(client, "/v1/chat/completions", body))
                assert response.status_code == 200, response.text
                explained = told.take("explain", post(client, "/v1/route/explain", body))
                assert explained.json()["profile"]["stop"] == 1
            asked = {"model": "demo", "prompt": WORD}
            assert told.take("good", post(client, "/v1/completions", asked)).status_code == 200
            for body in wrong():
                for path in ("/v1/chat/completions", "/v1/route/explain"):
                    told.take(f"{path} {str(body)[:100]}", post(client, path, body))
            for script in (Script(status=500), Script(drop=True), Script(cut_after=1)):
                worker.script = script
                body = {**said(), "stream": True, "seed": len(told.texts)}
                told.take("failing", post(client, "/v1/chat/completions", body))
            told.take("query", client.get("/v1/models", params={"word": WORD}))
            told.take("path", client.get(f"/{WORD}"))
            told.take("method", client.delete("/v1/chat/completions"))
            told.take("no key", client.get("/v1/models", headers={"authorization": WORD}))
            told.take("basic", client.get("/v1/models", auth=(WORD, WORD)))
            told.take("priority", priority(client))
        told.take("bad admin", admin.get(headers={"authorization": f"Bearer {WORD}"}))
        told.take("kind", admin.request("PUT", headers={**edited(admin), "content-type": WORD}))
        told.take("tag", admin.request("PUT", json={}, headers={"if-match": WORD}))
        for bad in (
            {**single_pool_policy(), "version": WORD},
            {**single_pool_policy(), "pools": [WORD]},
            WORD,
        ):
            told.take("bad policy", admin.put(bad))
            told.take("bad policy", admin.request("POST", "/validate", json=bad))
        for name in ("team", "models", "expires_at", "tokens_a_day", "priority"):
            terms = {"name": "Bob", name: f"\n{WORD}"}
            told.take(f"terms {name}", gateway.admin.post("/admin/v1/keys", json=terms))
        told.take("diff", admin.request("POST", "/diff", json=single_pool_policy("all")))
        told.take("applied", admin.put(single_pool_policy("all")))
        for path in ("", "/history"):
            told.take("policy", admin.get(path))
        for path in ("keys", "usage", "usage?format=csv", f"usage?from={WORD}", "workers"):
            told.take(path, gateway.admin.get(f"/admin/v1/{path}"))
        told.take("metrics", gateway.client.get("/metrics"))
        status = gateway.client.get("/v1/status", headers=shown)
        assert told.take("status", status).status_code == 200
    for file in tmp_path.rglob("*"):
        if file.is_file():
            told.texts[str(file)] = file.read_text()
    told.texts |= {f"log {index}": text for index, text in enumerate(log_capture.texts)}
    told.texts["terminal"] = str(capfd.readouterr())
    assert '"request.done"' in told.texts[str(access_log)]
    encoded = base64.b64encode(PICTURE).decode()[-30:]
    assert told.leaks(WORD, encoded, ADMIN, JOIN, key["secret"]) == []


def post(client: httpx.Client, path: str, body: object) -> httpx.Response:
    if isinstance(body, bytes):
        return client.post(path, content=body)
    return client.post(path, json=body)


def priority(client: httpx.Client) -> httpx.Response:
    headers = {"x-paceline-priority": WORD}
    return client.post("/v1/chat/completions", json=chat_body(), headers=headers)


def edited(admin: PolicyAdmin) -> Mapping[str, str]:
    return {"if-match": admin.etag(), "x-paceline-note": "x"}


def put_worker(gateway: RunningGateway, beat: Mapping[str, Any], token: str) -> httpx.Response:
    return gateway.client.put(
        "/admin/v1/workers/fake-a", json=beat, headers={"authorization": f"Bearer {token}"}
    )
