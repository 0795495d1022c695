"""What an engine says of its faults reaches nobody: not the log, no error, no metric and no page.

Engines repeat the prompt, and some the key that the gateway has sent.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.config.static_workers import StaticWorker
from gateway.engines import KINDS
from gateway.fleet import engine_watch
from gateway.proxy import handler
from tests.support.http_server import Request, ServerConnection
from tests.support.log_capture import LogCapture
from tests.support.policies import single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker, event

PROMPT = "canary-words-of-a-person"
SAID_BY_USER = [{"role": "user", "content": PROMPT}]
KEY = "canary-key-of-the-engine"
WORDS = f"Model demo failed on: {PROMPT}; authorization was Bearer {KEY}"
ERRORS: tuple[Any, ...] = (
    {"error": {"message": WORDS, "param": PROMPT, "code": KEY, "type": KEY}},
    {"error": WORDS},
    {"detail": [{"loc": ["body", PROMPT], "msg": WORDS, "input": KEY}]},
    {"detail": WORDS},
    {"message": WORDS},
    {"error": f"jinja template: {WORDS}"},
    {"error": f"json_schema: {WORDS}"},
    {"error": f"the prompt is too long for the context length: {WORDS}"},
    {"error": f"model not found: {WORDS}"},
    {"object": KEY, "choices": PROMPT},
    [WORDS],
    WORDS,
)
STATUSES = (400, 401, 404, 405, 413, 422, 500, 501, 507)
NO_HTTP = (
    f"{WORDS}\r\n\r\n",
    f"HTTP/1.1 {PROMPT} {KEY}\r\n\r\n",
    f"HTTP/1.1 200 {KEY}\r\n{PROMPT}\r\n\r\n",
    f"HTTP/1.1 200 OK\r\ncontent-length: {KEY}\r\n\r\n",
    f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{KEY}\r\n",
    f"HTTP/1.1 307 {KEY}\r\nlocation: http://{PROMPT}/{KEY}\r\ncontent-length: 0\r\n\r\n",
    f"HTTP/1.1 500 {KEY}\r\nretry-after: {KEY}\r\nx-{PROMPT}: {KEY}\r\ncontent-length: 0\r\n\r\n",
)
HEALTHY = {
    "data": [{"id": "demo", "owned_by": "paceline"}],
    "models": [{"name": "demo", "key": "demo"}],
    "status": "ok",
    "version": "1",
}
SAID: tuple[tuple[int, Any] | str, ...] = (
    *((status, one) for status in STATUSES for one in ERRORS),
    *((200, one) for one in (*ERRORS, {"error": None, "choices": KEY})),
    *NO_HTTP,
)
"""Each kind of engine says a ninth of them, and all kinds together each."""
BUSY = ((429, ERRORS[0]), (503, ERRORS[0]))


class Server:
    """An engine of every kind, until it says nothing but these words."""

    def __init__(self) -> None:
        self.probe: tuple[int, Any] | str = (200, HEALTHY)
        self.answer: tuple[int, Any] | str = (200, HEALTHY)
        self.probes: list[str] = []

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        asked = request.path.endswith("/completions")
        sent = self.answer if asked else self.probe
        if not asked:
            self.probes.append(request.path)
        if isinstance(sent, str):
            await connection.send(sent.encode())
            connection.close()
            return
        status, said = sent
        body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
        if asked and request.json().get("stream") and status == 200:
            body = event(said)
        await connection.send_head(status, (), length=len(body))
        await connection.send_body(body)


def search(outputs: dict[str, str], folder: Path, logs: LogCapture, *words: str) -> list[str]:
    found = [source for source, text in outputs.items() if any(one in text for one in words)]
    files = [file for file in folder.rglob("*") if file.is_file()]
    found += [str(file) for file in files if any(one in file.read_text() for one in words)]
    return found + [text[:400] for text in logs.texts if any(one in text for one in words)]


def pages(gateway: RunningGateway) -> dict[str, str]:
    """Return what clients and admins read of the state of a gateway."""
    paths = ("/metrics", "/v1/status", "/v1/models", "/dashboard", "/admin")
    shown = {path: gateway.client.get(path).text for path in paths}
    for path in ("workers", "engines", "usage", "errors"):
        shown[path] = gateway.admin.get(f"/admin/v1/{path}").text
    return shown


@pytest.fixture
def of_the_gateway(log_capture: LogCapture) -> LogCapture:
    """Capture what the gateway logs at any level, and libraries at the default one."""
    log_capture.addFilter(
        lambda one: one.name.startswith("gateway") or one.levelno >= logging.WARNING
    )
    return log_capture


@pytest.mark.parametrize("kind", KINDS)
def test_f82_the_words_of_an_engine_are_in_no_log_error_metric_or_page(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_gateway: LogCapture
) -> None:
    monkeypatch.setenv("MAC_API_KEY", KEY)
    monkeypatch.setattr(engine_watch, "HEARTBEAT_INTERVAL_S", 0.02)
    server = Server()
    scripted = ScriptedWorker()  # for its socket
    terms = {"url": scripted.url, "kind": kind, "models": ["demo"], "api_key_env": "MAC_API_KEY"}
    entry = StaticWorker.model_validate({**terms, "id": "mac"})
    policy = tmp_path / "policy.yaml"
    policy.write_text(to_yaml(single_pool_policy(timeout_s=0.1)))  # nobody waits for a busy engine
    settings = make_settings(
        tmp_path, workers=(entry,), policy=policy, access_log=str(tmp_path / "log.jsonl")
    )
    outputs: dict[str, str] = {}
    with running_server(server, sockets=[scripted.socket]), RunningGateway(settings) as gateway:

        def ready() -> bool:
            return gateway.client.get("/readyz").status_code == 200

        wait_until(ready)
        messages = [{"role": "user", "content": PROMPT}]
        first = [*KINDS].index(kind)
        for number, answer in enumerate((*SAID[6:9], *SAID[first::9], *BUSY)):
            server.answer = answer
            more: dict[str, Any] = {"stream": bool(number % 2), "seed": number}
            if number % 3 == 0:
                more["response_format"] = {"type": "json_object"}
            outputs[f"{answer} {more}"] = gateway.chat(messages=messages, **more).text
            if answer in BUSY:
                gateway.clock.advance(1)  # the pause is over
                wait_until(ready)
        outputs |= pages(gateway)
        for said in SAID[-first - 1 :: -18]:
            server.probe = said
            asked = len(server.probes)
            gateway.clock.advance(40)
            wait_until(lambda asked=asked: len(server.probes) > asked)  # type: ignore[misc]
            joined = gateway.admin.post("/admin/v1/engines", json={**terms, "id": "other"})
            outputs[f"join {said}"] = joined.text
            gateway.admin.delete("/admin/v1/engines/other")
        outputs |= {f"{path} again": text for path, text in pages(gateway).items()}
    told = ("context_length_exceeded", "unsupported_value", "worker_failed", "workers_busy")
    whole = "".join(outputs.values())
    assert [one for one in told if one not in whole] == list(told[:2] * (kind == "paceline"))
    shown = {source: text for source, text in outputs.items() if kind != "paceline"}
    assert search(shown, tmp_path, of_the_gateway, PROMPT, KEY) == []


def test_f82_the_words_of_a_worker_are_in_no_log_metric_or_page(
    tmp_path: Path, worker: ScriptedWorker, of_the_gateway: LogCapture
) -> None:
    settings = make_settings(tmp_path, access_log=str(tmp_path / "log.jsonl"))
    with RunningGateway(settings) as gateway:
        gateway.join(worker)
        messages = [{"role": "user", "content": PROMPT}]
        for status in STATUSES:
            for said in (ERRORS[0], WORDS):
                worker.script = Script(status=status, body=json.dumps(said).encode())
                gateway.send_heartbeat(worker, boot_id=f"{status}-{len(said)}")
                gateway.chat(messages=messages, seed=status)
                gateway.client.post(
                    "/v1/messages/count_tokens", json={"model": "demo", "messages": messages}
                )
        for body in (ERRORS[0], WORDS, {"report": {"worker_id": PROMPT, KEY: WORDS}}):
            worker.status_body = json.dumps(body).encode()
            gateway.client.get("/v1/status")
            gateway.send_heartbeat(worker, boot_id=f"b{len(worker.status_body)}")
        worker.status_body = None
        gateway.join(worker, boot_id="last")
        outputs = pages(gateway)
    assert search(outputs, tmp_path, of_the_gateway, PROMPT, KEY) == []


def test_f82_the_words_of_a_client_are_in_no_log_of_a_fault_of_ours(
    tmp_path, worker, of_the_gateway, monkeypatch
) -> None:
    """Every wire is inspected by this function; a fault of it quotes what it reads."""

    def fail(*read: object, **also_read: object) -> None:
        raise KeyError(PROMPT, read, also_read) from ValueError(PROMPT)

    monkeypatch.setattr(handler, "inspect", fail)
    outputs: dict[str, str] = {}
    with RunningGateway(make_settings(tmp_path)) as gateway:
        gateway.join(worker)
        for path, fields in (
            ("/v1/chat/completions", {"messages": SAID_BY_USER, "stream": True}),
            ("/v1/completions", {"prompt": PROMPT}),
            ("/v1/messages", {"messages": SAID_BY_USER, "max_tokens": 9}),
            ("/v1/responses", {"input": PROMPT, "stream": True}),
            ("/v1/responses", {"input": PROMPT, "background": True}),
            ("/v1/embeddings", {"input": PROMPT}),
            ("/v1/rerank", {"query": PROMPT, "documents": [PROMPT]}),
        ):
            outputs[path] = gateway.client.post(path, json={"model": "demo", **fields}).text
            assert "error" in outputs[path]
        outputs |= pages(gateway)
    assert search(outputs, tmp_path, of_the_gateway, PROMPT) == []
    faults = [one for one in of_the_gateway.texts if one.startswith("request.broken")]
    assert len(faults) == 7
    assert all(one.endswith("KeyError") for one in faults)


def test_f82_the_log_has_status_phrase_and_length_of_a_refusal(caplog) -> None:
    caplog.set_level(logging.INFO)
    engine = KINDS["openai"](SecretStr(KEY).get_secret_value())
    fields = {"messages": [{"role": "user", "content": PROMPT}]}
    for status, words in ((400, "context length exceeded"), (500, "oops"), (404, "no such model")):
        engine.refusal(status, json.dumps({"error": words}).encode(), fields)
    assert [one.getMessage() for one in caplog.records] == [
        "engine.refused status=400 phrase=context_length_exceeded chars=23",
        "worker.failed status=500 phrase=- chars=4",
        "worker.failed status=404 phrase=model chars=13",
    ]
