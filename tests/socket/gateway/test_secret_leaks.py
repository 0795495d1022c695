"""S20 (CVE-2025-0330, CVE-2024-9606): secrets and prompts appear in no output of the gateway.

The tests search all output but the requests to workers and their responses.
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


def test_secrets_and_prompts_are_in_no_log_metric_error_status_or_state(
    tmp_path: Path, worker: ScriptedWorker, log_capture: LogCapture
) -> None:
    settings = make_settings(
        tmp_path,
        admin_key=SecretStr(ADMIN),
        api_key=SecretStr(STATIC),
        idle_timeout_s=2,
        access_log=str(tmp_path / "access.jsonl"),
    )
    outputs: dict[str, str] = {}
    with RunningGateway(settings) as gateway:
        gateway.send_heartbeat(worker)
        active = gateway.create_key(name="Ann", requests_a_minute=30, tokens_a_minute=100_000)
        exhausted = gateway.create_key(name="Bob", requests_a_minute=1)
        revoked = gateway.create_key(name="Eve")
        gateway.admin.delete(f"/admin/v1/keys/{revoked['id']}")
        secrets = {
            active["secret"],
            exhausted["secret"],
            revoked["secret"],
            ADMIN,
            STATIC,
            WRONG,
            PROMPT,
        }
        body_with_prompt = chat_body(messages=[{"role": "user", "content": PROMPT}], max_tokens=5)
        for number, script in enumerate(SCRIPTS):
            worker.script = script
            for stream in (False, True):
                gateway.send_heartbeat(worker, boot_id=f"boot-{number}-{stream}")
                # A new seed each time: the gateway quarantines a body that crashed two workers.
                body = {**body_with_prompt, "stream": stream, "seed": 2 * number + stream}
                outputs[f"{number} {stream}"] = _post(gateway, active["secret"], body).text
        worker.script = Script()
        invalid_bodies = (
            {**body_with_prompt, "temperature": PROMPT},
            {**body_with_prompt, "model": 7},
            {**body_with_prompt, "messages": [{"role": PROMPT, "content": PROMPT}]},
            {**body_with_prompt, "tools": [{"type": "function", "function": {"name": PROMPT * 9}}]},
        )
        for index, body in enumerate(invalid_bodies):
            outputs[f"invalid {index}"] = _post(gateway, active["secret"], body).text
        broken = b'{"model": "demo", "messages": "' + PROMPT.encode()
        outputs["broken"] = _post(gateway, active["secret"], broken).text
        for secret in (WRONG, revoked["secret"], exhausted["secret"], exhausted["secret"], ADMIN):
            outputs[f"by {secret}"] = _post(gateway, secret, body_with_prompt).text
        with httpx.stream(
            *("POST", f"{gateway.url}/v1/chat/completions"),
            json={**body_with_prompt, "stream": True},
            headers={"authorization": f"Bearer {active['secret']}"},
            timeout=60,
        ) as response:
            next(response.iter_raw())
        wait_until(lambda: worker.in_flight == 0)
        outputs["bad terms"] = gateway.admin.post(
            "/admin/v1/keys", json={"name": PROMPT * 9, "team": STATIC + "\n"}
        ).text
        outputs["metrics"] = gateway.client.get("/metrics").text
        bearer = {"authorization": f"Bearer {STATIC}"}
        outputs["status"] = gateway.client.get("/v1/status", headers=bearer).text
        for path in ("keys", "usage", "usage?format=csv", "workers", "errors"):
            outputs[path] = gateway.admin.get(f"/admin/v1/{path}").text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            outputs[str(file)] = file.read_text()
    assert '"usage"' in outputs[str(tmp_path / "state.json")]
    assert len(worker.requests) > 2 * len(SCRIPTS)
    assert outputs[str(tmp_path / "access.jsonl")].count('"request.done"') > 2 * len(SCRIPTS)
    for name in ("attempt.failed", "stream.broken", "stream.cut", "attempt.lost"):
        assert any(text.startswith(name) for text in log_capture.texts), name
    for secret in secrets:
        leaks = [source for source, text in outputs.items() if secret in text]
        leaks += [text[:300] for text in log_capture.texts if secret in text]
        assert leaks == []


def _post(gateway: RunningGateway, secret: str, body: object) -> httpx.Response:
    payload = {"content": body} if isinstance(body, bytes) else {"json": body}
    return httpx.post(
        f"{gateway.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {secret}"},
        timeout=30,
        **payload,
    )


CANARY = "canary-of-a-person"
IMAGE = png_header(8, 8) + CANARY.encode() * 9
JOIN = "canary-join-token"
HEADERS = {
    "cookie": CANARY,
    "user-agent": CANARY,
    "referer": f"http://{CANARY}/",
    "x-api-key": CANARY,
    "x-forwarded-for": CANARY,
    "openai-organization": CANARY,
    "idempotency-key": CANARY,
}
FIELDS = (
    *("messages", "prompt", "stream", "stream_options", "max_tokens", "stop", "n", "seed"),
    *("temperature", "top_k", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("response_format", "guided_json", "guided_choice", "chat_template_kwargs", "metadata"),
    *("user", "prompt_cache_key", "thinking_budget", "draft_tokens", "metrics", "specprefill"),
)


def body_with_canary() -> dict[str, Any]:
    """Return a valid request with the canary word in every field that takes text."""
    function = {"name": "look", "arguments": json.dumps({"word": CANARY})}
    schema = {"type": "object", "properties": {CANARY: {"type": "string", "description": CANARY}}}
    return chat_body(
        messages=[
            {"role": "system", "content": CANARY},
            {"role": "user", "name": CANARY, "content": CANARY},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image_url()}}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call-1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call-1", "content": CANARY},
        ],
        tools=[
            {"type": "function", "function": {"name": "look", "parameters": schema}},
        ],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        stop=[CANARY],
        user=CANARY,
        metadata={CANARY: CANARY},
        prompt_cache_key=CANARY,
    )


def image_url() -> str:
    return data_url(IMAGE)


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return chat_body(messages=[{"role": role, "content": content}])


def invalid_bodies() -> Iterator[Any]:
    """Yield requests, most of them invalid, with the canary word in the invalid field."""
    for field in FIELDS:
        for value in (CANARY, [CANARY], {CANARY: CANARY}, [{CANARY: CANARY}], [{"type": CANARY}]):
            yield {**chat_body(), field: value}
    yield message(CANARY, role=CANARY)
    yield message([{"type": CANARY}])
    yield message([{"type": "image_url", "image_url": {"url": f"https://{CANARY}.example/"}}])
    yield message([{"type": "image_url", "image_url": {"url": f"file:///{CANARY}"}}])
    yield message([{"type": "image_url", "image_url": {"url": f"data:image/{CANARY};base64,AA"}}])
    yield message([{"type": "image_url", "image_url": {"url": image_url()[:60] + f",{CANARY}"}}])
    yield message([{"type": "input_audio", "input_audio": {"data": CANARY, "format": CANARY}}])
    yield {"model": "demo", "prompt": [CANARY, 7]}
    yield b'{"model": "demo", "messages": "' + CANARY.encode()
    yield CANARY.encode()


class Outputs:
    """Responses and other output of a gateway, by source."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, source: str, response: httpx.Response) -> httpx.Response:
        head = "\n".join(f"{name}: {value}" for name, value in response.headers.multi_items())
        self.texts[f"{len(self.texts)} {source}"] = f"{head}\n{response.text}"
        return response

    def leaks(self, *secrets: str) -> list[str]:
        return [
            f"{source}: {text[:300]}"
            for source, text in self.texts.items()
            if any(secret in text for secret in secrets)
        ]


def test_request_texts_are_in_no_log_error_explanation_diff_metric_or_state(
    tmp_path: Path,
    worker: ScriptedWorker,
    log_capture: LogCapture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    access_log = tmp_path / "access.jsonl"
    settings = make_settings(tmp_path, admin_key=SecretStr(ADMIN), access_log=str(access_log))
    settings = settings.model_copy(update={"join_token": SecretStr(JOIN)})
    outputs = Outputs()
    with RunningGateway(settings) as gateway, PolicyAdmin(gateway.url, ADMIN) as admin:
        heartbeat = worker.report().model_dump(mode="json")
        outputs.add("join", put_worker(gateway, heartbeat, JOIN))
        outputs.add("join wrong", put_worker(gateway, heartbeat, CANARY))
        # The gateway shows labels, like a worker's name.
        for field in heartbeat.keys() - {"labels"}:
            outputs.add(
                f"report {field}", put_worker(gateway, {**heartbeat, field: [CANARY]}, JOIN)
            )
        key = gateway.create_key(name="Ann", requests_a_minute=1_000_000)
        headers = {"authorization": f"Bearer {key['secret']}", **HEADERS}
        with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as client:
            for stream in (False, True):
                body = {**body_with_canary(), "stream": stream}
                response = outputs.add("good", post_body(client, "/v1/chat/completions", body))
                assert response.status_code == 200, response.text
                explained = outputs.add("explain", post_body(client, "/v1/route/explain", body))
                assert explained.json()["profile"]["stop"] == 1
            prompt_body = {"model": "demo", "prompt": CANARY}
            assert (
                outputs.add("good", post_body(client, "/v1/completions", prompt_body)).status_code
                == 200
            )
            for body in invalid_bodies():
                for path in ("/v1/chat/completions", "/v1/route/explain"):
                    outputs.add(f"{path} {str(body)[:100]}", post_body(client, path, body))
            for script in (Script(status=500), Script(drop=True), Script(cut_after=1)):
                worker.script = script
                body = {**body_with_canary(), "stream": True, "seed": len(outputs.texts)}
                outputs.add("failing", post_body(client, "/v1/chat/completions", body))
            outputs.add("query", client.get("/v1/models", params={"word": CANARY}))
            outputs.add("path", client.get(f"/{CANARY}"))
            outputs.add("method", client.delete("/v1/chat/completions"))
            outputs.add("no key", client.get("/v1/models", headers={"authorization": CANARY}))
            outputs.add("basic", client.get("/v1/models", auth=(CANARY, CANARY)))
            outputs.add("priority", post_priority(client))
        outputs.add("bad admin", admin.get(headers={"authorization": f"Bearer {CANARY}"}))
        outputs.add(
            "kind", admin.request("PUT", headers={**edit_headers(admin), "content-type": CANARY})
        )
        outputs.add("tag", admin.request("PUT", json={}, headers={"if-match": CANARY}))
        for invalid_policy in (
            {**single_pool_policy(), "version": CANARY},
            {**single_pool_policy(), "pools": [CANARY]},
            CANARY,
        ):
            outputs.add("bad policy", admin.put(invalid_policy))
            outputs.add("bad policy", admin.request("POST", "/validate", json=invalid_policy))
        for name in ("team", "models", "expires_at", "tokens_a_day", "priority"):
            terms = {"name": "Bob", name: f"\n{CANARY}"}
            outputs.add(f"terms {name}", gateway.admin.post("/admin/v1/keys", json=terms))
        outputs.add("diff", admin.request("POST", "/diff", json=single_pool_policy("all")))
        outputs.add("applied", admin.put(single_pool_policy("all")))
        for path in ("", "/history"):
            outputs.add("policy", admin.get(path))
        for path in (
            *("keys", "usage", "usage?format=csv", f"usage?from={CANARY}", "workers", "errors"),
        ):
            outputs.add(path, gateway.admin.get(f"/admin/v1/{path}"))
        outputs.add("metrics", gateway.client.get("/metrics"))
        status = gateway.client.get("/v1/status", headers=headers)
        assert outputs.add("status", status).status_code == 200
    for file in tmp_path.rglob("*"):
        if file.is_file():
            outputs.texts[str(file)] = file.read_text()
    outputs.texts |= {f"log {index}": text for index, text in enumerate(log_capture.texts)}
    outputs.texts["terminal"] = str(capfd.readouterr())
    assert '"request.done"' in outputs.texts[str(access_log)]
    encoded = base64.b64encode(IMAGE).decode()[-30:]
    assert outputs.leaks(CANARY, encoded, ADMIN, JOIN, key["secret"]) == []


def post_body(client: httpx.Client, path: str, body: object) -> httpx.Response:
    if isinstance(body, bytes):
        return client.post(path, content=body)
    return client.post(path, json=body)


def post_priority(client: httpx.Client) -> httpx.Response:
    headers = {"x-paceline-priority": CANARY}
    return client.post("/v1/chat/completions", json=chat_body(), headers=headers)


def edit_headers(admin: PolicyAdmin) -> Mapping[str, str]:
    return {"if-match": admin.etag(), "x-paceline-note": "x"}


def put_worker(gateway: RunningGateway, heartbeat: Mapping[str, Any], token: str) -> httpx.Response:
    return gateway.client.put(
        "/admin/v1/workers/fake-a", json=heartbeat, headers={"authorization": f"Bearer {token}"}
    )
