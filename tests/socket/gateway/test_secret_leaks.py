"""S20 (CVE-2025-0330, CVE-2024-9606): secrets and texts of requests are in no output of a gateway.

The test searches all output but the requests to workers and their responses.
"""

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
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    begun,
    chat_body,
    make_settings,
    wait_until,
)
from tests.support.scripted_worker import DONE, JOIN_TOKEN, Script, ScriptedWorker, chunk, event

PATH = "/v1/chat/completions"
CANARY = "canary-of-a-person"
ADMIN, STATIC, WRONG = "canary-admin-key", "canary-static-key", "canary-wrong-key"
IMAGE = png_header(8, 8) + CANARY.encode() * 9
SCRIPTS = (
    Script(),
    Script(status=500, body=json.dumps({"error": {"message": CANARY}}).encode()),
    Script(status=503, body=CANARY.encode()),
    Script(status=404, body=CANARY.encode()),
    Script(body=CANARY.encode()),
    Script(raw=b"HTTP/1.1 200 OK\r\nx: " + CANARY.encode() + b"\r\nbad header\r\n\r\n"),
    Script(raw=CANARY.encode()),
    Script(events=(chunk({"content": "a"}), event({"error": {"message": CANARY, "code": CANARY}}))),
    Script(events=(b"data: " + CANARY.encode() + b"\n\n", DONE)),
    Script(events=(chunk({"content": "a"}), DONE)),
    Script(cut_after=1),
    Script(drop=True),
)
HEADERS = dict.fromkeys(
    ("cookie", "user-agent", "x-api-key", "x-forwarded-for", "openai-organization"), CANARY
) | {"referer": f"http://{CANARY}/", "idempotency-key": CANARY}
FIELDS = (
    *("messages", "prompt", "stream", "stream_options", "max_tokens", "stop", "n", "seed"),
    *("temperature", "top_k", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice"),
    *("response_format", "guided_json", "guided_choice", "chat_template_kwargs", "metadata"),
    *("user", "prompt_cache_key", "thinking_budget", "draft_tokens", "metrics", "specprefill"),
)


def body_with_canary(**fields: Any) -> dict[str, Any]:
    """Return a valid request with the canary word in every field that takes text."""
    function = {"name": "look", "arguments": json.dumps({"word": CANARY})}
    call = {"id": "call-1", "type": "function", "function": function}
    schema = {"type": "object", "properties": {CANARY: {"type": "string", "description": CANARY}}}
    image = {"type": "image_url", "image_url": {"url": data_url(IMAGE)}}
    return chat_body(
        messages=[
            {"role": "system", "content": CANARY},
            {"role": "user", "name": CANARY, "content": CANARY},
            {"role": "user", "content": [image]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call-1", "content": CANARY},
        ],
        tools=[{"type": "function", "function": {"name": "look", "parameters": schema}}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        stop=[CANARY],
        user=CANARY,
        metadata={CANARY: CANARY},
        prompt_cache_key=CANARY,
        **fields,
    )


def message(content: Any, role: str = "user") -> dict[str, Any]:
    return chat_body(messages=[{"role": role, "content": content}])


def invalid_bodies() -> Iterator[Any]:
    """Yield requests, most of them invalid, with the canary word in the invalid field."""
    for field in FIELDS:
        # An error names what no schema knows, also to an admin.
        name = "odd" if field in ("messages", "tool_choice") else CANARY
        kind = "odd" if field == "tools" else CANARY
        for value in (CANARY, [CANARY], {name: CANARY}, [{name: CANARY}], [{"type": kind}]):
            yield {**chat_body(), field: value}
    for url in (
        f"https://{CANARY}.example/",
        f"file:///{CANARY}",
        f"data:image/{CANARY};base64,AA",
        f"{data_url(IMAGE)[:60]},{CANARY}",
    ):
        yield message([{"type": "image_url", "image_url": {"url": url}}])
    yield message(CANARY, role=CANARY)
    yield message([{"type": CANARY}])
    yield message([{"type": "input_audio", "input_audio": {"data": CANARY, "format": CANARY}}])
    yield chat_body(tools=[{"type": "function", "function": {"name": CANARY * 9}}])
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


def test_secrets_and_texts_of_requests_are_in_no_log_metric_error_status_or_state(
    tmp_path: Path,
    worker: ScriptedWorker,
    log_capture: LogCapture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    access_log = tmp_path / "access.jsonl"
    settings = make_settings(
        tmp_path,
        admin_key=SecretStr(ADMIN),
        api_key=SecretStr(STATIC),
        idle_timeout_s=2,
        access_log=str(access_log),
    )
    outputs = Outputs()
    with RunningGateway(settings) as gateway, PolicyAdmin(gateway.url, ADMIN) as admin:
        heartbeat = worker.report().model_dump(mode="json")
        outputs.add("join", put_worker(gateway, heartbeat, JOIN_TOKEN))
        outputs.add("join wrong", put_worker(gateway, heartbeat, CANARY))
        # The gateway shows labels, like a worker's name.
        for field in heartbeat.keys() - {"labels"}:
            report = {**heartbeat, field: [CANARY]}
            outputs.add(f"report {field}", put_worker(gateway, report, JOIN_TOKEN))
        key, exhausted, revoked = (
            gateway.create_key(name=name, requests_a_minute=limit)
            for name, limit in (("Ann", 1_000_000), ("Bob", 1), ("Eve", 9))
        )
        gateway.revoke_key(revoked)
        headers = {**bearer_headers(key), **HEADERS}
        with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as client:
            send_requests(gateway, client, worker, outputs)
            for secret in (WRONG, revoked["secret"], *[exhausted["secret"]] * 2, ADMIN):
                bearer = {"authorization": f"Bearer {secret}"}
                outputs.add(f"by {secret[:9]}", client.post(PATH, json=chat_body(), headers=bearer))
        use_admin_routes(gateway, admin, outputs)
        outputs.add("metrics", gateway.client.get("/metrics"))
        status = gateway.client.get("/v1/status", headers=headers)
        assert outputs.add("status", status).status_code == 200
    for file in tmp_path.rglob("*"):
        if file.is_file():
            outputs.texts[str(file)] = file.read_text()
    outputs.texts |= {f"log {index}": text for index, text in enumerate(log_capture.texts)}
    outputs.texts["terminal"] = str(capfd.readouterr())
    assert '"usage"' in outputs.texts[str(tmp_path / "state.json")]
    assert len(worker.requests) > 2 * len(SCRIPTS)
    assert outputs.texts[str(access_log)].count('"request.done"') > 2 * len(SCRIPTS)
    for name in ("attempt.failed", "stream.broken", "stream.cut", "attempt.lost"):
        assert any(text.startswith(name) for text in log_capture.texts), name
    encoded = base64.b64encode(IMAGE).decode()[-30:]
    secrets = [one["secret"] for one in (key, exhausted, revoked)]
    assert outputs.leaks(CANARY, encoded, ADMIN, STATIC, WRONG, JOIN_TOKEN, *secrets) == []


def send_requests(
    gateway: RunningGateway, client: httpx.Client, worker: ScriptedWorker, outputs: Outputs
) -> None:
    """Send valid and invalid requests, which the worker answers by all scripts."""
    for number, script in enumerate(SCRIPTS):
        worker.script = script
        for stream in (False, True):
            gateway.join(worker, boot_id=f"boot-{number}-{stream}")
            # A new seed each time: the gateway quarantines a body that crashed two workers.
            body = body_with_canary(stream=stream, seed=2 * number + stream)
            response = outputs.add(f"script {number} {stream}", client.post(PATH, json=body))
            assert number or response.status_code == 200, response.text
            explained = outputs.add("explain", client.post("/v1/route/explain", json=body))
            assert explained.json()["profile"]["stop"] == 1
    worker.script = Script()
    gateway.join(worker, boot_id="boot-last")
    completion = client.post("/v1/completions", json={"model": "demo", "prompt": CANARY})
    assert outputs.add("completion", completion).status_code == 200
    for invalid in invalid_bodies():
        sent = {"content": invalid} if isinstance(invalid, bytes) else {"json": invalid}
        for path in (PATH, "/v1/route/explain"):
            outputs.add(f"{path} {str(invalid)[:100]}", client.post(path, **sent))
    with begun(client.stream("POST", PATH, json=body_with_canary(stream=True))):
        pass
    wait_until(lambda: worker.in_flight == 0)
    outputs.add("query", client.get("/v1/models", params={"word": CANARY}))
    outputs.add("path", client.get(f"/{CANARY}"))
    outputs.add("method", client.delete(PATH))
    outputs.add("no key", client.get("/v1/models", headers={"authorization": CANARY}))
    outputs.add("basic", client.get("/v1/models", auth=(CANARY, CANARY)))
    priority = {"x-paceline-priority": CANARY}
    outputs.add("priority", client.post(PATH, json=chat_body(), headers=priority))


def use_admin_routes(gateway: RunningGateway, admin: PolicyAdmin, outputs: Outputs) -> None:
    """Send invalid edits of the policy and of keys, and read what an admin can."""
    outputs.add("bad admin", admin.get(headers={"authorization": f"Bearer {CANARY}"}))
    kind = {"if-match": admin.etag(), "x-paceline-note": "x", "content-type": CANARY}
    outputs.add("kind", admin.request("PUT", headers=kind))
    outputs.add("tag", admin.request("PUT", json={}, headers={"if-match": CANARY}))
    for invalid_policy in (
        {**single_pool_policy(), "version": CANARY},
        {**single_pool_policy(), "pools": [CANARY]},
        CANARY,
    ):
        outputs.add("bad policy", admin.put(invalid_policy))
        outputs.add("bad policy", admin.request("POST", "/validate", json=invalid_policy))
    for name in ("name", "team", "models", "expires_at", "tokens_a_day", "priority"):
        terms = {"name": "Bob", name: f"\n{CANARY}"}
        outputs.add(f"terms {name}", gateway.admin.post("/admin/v1/keys", json=terms))
    outputs.add("diff", admin.request("POST", "/diff", json=single_pool_policy("all")))
    outputs.add("applied", admin.put(single_pool_policy("all")))
    for path in ("", "/history"):
        outputs.add("policy", admin.get(path))
    for path in ("keys", "usage", "usage?format=csv", f"usage?from={CANARY}", "workers", "errors"):
        outputs.add(path, gateway.admin.get(f"/admin/v1/{path}"))


def put_worker(gateway: RunningGateway, heartbeat: Mapping[str, Any], token: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return gateway.client.put("/admin/v1/workers/fake-a", json=heartbeat, headers=headers)
