"""An engine that lists its models slowly joins, and lives as long as it answers requests."""

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gateway.config.static_workers import StaticWorker
from gateway.fleet import engine_watch, registry
from gateway.fleet import worker as fleet_worker
from tests.support.gateway_fixtures import ready_workers
from tests.support.http_server import Request, ServerConnection
from tests.support.recorded_engine import RecordedEngine
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until
from tests.support.scripted_worker import chat_completion

LISTS = {"/v1/models", "/api/tags", "/api/v1/models", "/api/v0/models"}
WORD = [{"role": "user", "content": "Say one word."}]


class SlowLists(RecordedEngine):
    """An engine whose list of models takes two seconds."""

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        if request.path in LISTS and self.answers(request):
            await asyncio.sleep(2)
        await super().__call__(connection, request)


class SilentLists:
    """An OpenAI server that answers chats at once, and soon no other request."""

    def __init__(self) -> None:
        self.silent = False
        self.waiting = 0

    async def __call__(self, connection: ServerConnection, request: Request) -> None:
        if self.silent and request.method == "GET":
            self.waiting += 1
            await connection.client_closed.wait()
            return
        answer: Any = {"data": [{"id": "demo"}]}
        if request.method == "POST":
            answer = chat_completion("word")
        body = json.dumps(answer).encode()
        await connection.send_head(200, (), length=len(body))
        await connection.send_body(body)


def test_f84_engines_that_list_their_models_in_two_seconds_join(gateway: RunningGateway) -> None:
    joining = (("omlx", "auto"), ("omlx", "openai"), ("ollama", "auto"))
    engines = [SlowLists(name) for name, _ in joining]

    def join(engine: SlowLists, kind: str) -> tuple[int, str]:
        terms = {"url": engine.url, "id": engine.url[-5:], "kind": kind}
        joined = gateway.admin.post("/admin/v1/engines", json=terms)
        return joined.status_code, joined.json().get("kind", joined.text)

    with contextlib.ExitStack() as running, ThreadPoolExecutor() as threads:
        for engine in engines:
            running.enter_context(running_server(engine, sockets=[engine.socket]))
        joined = [*threads.map(join, engines, [kind for _, kind in joining])]
        assert joined == [(201, "omlx"), (201, "openai"), (201, "ollama")]
        wait_until(lambda: len(ready_workers(gateway)) == 3)


def test_f84_answered_requests_prove_that_an_engine_lives(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(engine_watch, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_watch, "READ_TIMEOUT_S", 0.2)
    for module in (fleet_worker, registry):
        monkeypatch.setattr(module, "HEARTBEAT_TIMEOUT_S", 7.0)
    server = SilentLists()
    socket = RecordedEngine("omlx").socket
    url = f"http://127.0.0.1:{socket.getsockname()[1]}"
    entry = StaticWorker(id="mac", kind="openai", url=url, models=("demo",))
    with (
        running_server(server, sockets=[socket]),
        RunningGateway(make_settings(tmp_path, workers=(entry,))) as gateway,
    ):

        def age_s() -> float:
            workers = gateway.status()["workers"]
            return float(workers["mac"]["heartbeat_age_s"])

        def problem() -> str:
            (engine,) = gateway.admin.get("/admin/v1/engines").json()["engines"]
            return str(engine["problem"])

        wait_until(lambda: gateway.client.get("/readyz").status_code == 200)
        server.silent = True
        wait_until(lambda: server.waiting > 0)
        # A clock that jumps at each of four checks in a row looks like an overloaded loop.
        for _ in range(3):
            waiting = server.waiting
            gateway.clock.advance(14)
            answer = gateway.chat(messages=WORD)
            assert answer.status_code == 200, answer.text
            wait_until(lambda waiting=waiting: age_s() < 5 and server.waiting > waiting)  # type: ignore[misc]
        assert problem() == ""
        gateway.clock.advance(35)
        wait_until(lambda: gateway.client.get("/readyz").status_code == 503)
        wait_until(lambda: problem() != "")
        assert problem() == "The engine does not answer: no answer to GET /v1/models within 0.2 s."
        server.silent = False
        wait_until(lambda: gateway.chat(messages=WORD).status_code == 200)
