"""S20 (CVE-2025-0330, CVE-2024-9606): wherever in a request its words stand, nothing tells them.

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
from tests.support.log_capture import Heard
from tests.support.policies import Admin, document
from tests.support.running_gateway import Gateway, chat_body, settings_for_tests
from tests.support.scripted_worker import FakeWorker, Script

WORD = "canary-of-a-person"
PICTURE = png_header(8, 8) + WORD.encode() * 9
ADMIN = "canary-admin-key"
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

    def take(self, where: str, answer: httpx.Response) -> httpx.Response:
        head = "\n".join(f"{name}: {value}" for name, value in answer.headers.multi_items())
        self.texts[f"{len(self.texts)} {where}"] = f"{head}\n{answer.text}"
        return answer

    def leaks(self, *secrets: str) -> list[str]:
        return [
            f"{where}: {text[:300]}"
            for where, text in self.texts.items()
            if any(secret in text for secret in secrets)
        ]


def test_what_a_request_says_is_in_no_log_error_explanation_diff_metric_or_state(
    tmp_path: Path, worker: FakeWorker, heard: Heard, capfd: pytest.CaptureFixture[str]
) -> None:
    access_log = tmp_path / "access.jsonl"
    settings = settings_for_tests(tmp_path, admin_key=SecretStr(ADMIN), access_log=str(access_log))
    settings = settings.with_join_token(JOIN)
    told = Told()
    with Gateway(settings) as gateway, Admin(gateway.url, ADMIN) as admin:
        beat = worker.report().model_dump(mode="json")
        told.take("join", put_worker(gateway, beat, JOIN))
        told.take("join wrong", put_worker(gateway, beat, WORD))
        for field in beat.keys() - {"labels"}:  # which are told of, as a worker's name is
            told.take(f"report {field}", put_worker(gateway, {**beat, field: [WORD]}, JOIN))
        key = gateway.make_key(name="Ann", requests_a_minute=1_000_000)
        shown = {"authorization": f"Bearer {key['secret']}", **HEADERS}
        with httpx.Client(base_url=gateway.url, headers=shown, timeout=30) as client:
            for stream in (False, True):
                body = {**said(), "stream": stream}
                answer = told.take("good", post(client, "/v1/chat/completions", body))
                assert answer.status_code == 200, answer.text
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
        for bad in ({**document(), "version": WORD}, {**document(), "pools": [WORD]}, WORD):
            told.take("bad policy", admin.put(bad))
            told.take("bad policy", admin.request("POST", "/validate", json=bad))
        for name in ("team", "models", "expires_at", "tokens_a_day", "priority"):
            terms = {"name": "Bob", name: f"\n{WORD}"}
            told.take(f"terms {name}", gateway.admin.post("/admin/v1/keys", json=terms))
        told.take("diff", admin.request("POST", "/diff", json=document("all")))
        told.take("applied", admin.put(document("all")))
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
    told.texts |= {f"log {index}": text for index, text in enumerate(heard.texts)}
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


def edited(admin: Admin) -> Mapping[str, str]:
    return {"if-match": admin.etag(), "x-paceline-note": "x"}


def put_worker(gateway: Gateway, beat: Mapping[str, Any], token: str) -> httpx.Response:
    return gateway.client.put(
        "/admin/v1/workers/fake-a", json=beat, headers={"authorization": f"Bearer {token}"}
    )
