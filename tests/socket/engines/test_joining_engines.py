"""Engines that admins join, list and remove at run time."""

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.config.static_workers import StaticWorker
from tests.support.chat_bodies import PICTURE
from tests.support.gateway_fixtures import MakeGateway
from tests.support.http_server import Request, ServerConnection
from tests.support.recorded_engine import recorded_engine
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_server,
    said,
    status_and_code,
    wait_until,
)

PATH = "/admin/v1/engines"
REQUESTS = 60
WORD = said("What is 3 plus 4?")


@pytest.fixture
def paceline(gateway, capsys, monkeypatch) -> Callable[..., str]:
    """Return a function that returns the output of a command of an admin of the gateway."""
    monkeypatch.setenv("PACELINE_ADMIN_KEY", gateway.admin_key)

    def run(*arguments: str) -> str:
        assert main([*arguments, "--url", gateway.url]) == 0
        return capsys.readouterr().out

    return run


def engines(gateway: RunningGateway) -> dict[str, Any]:
    listed = gateway.admin.get(PATH).json()["engines"]
    return {one["id"]: one for one in listed}


def test_the_command_joins_lists_and_removes_an_engine(gateway, paceline) -> None:
    with recorded_engine("ollama") as engine:
        assert "Joined mac (ollama), 4 requests" in paceline(
            "join-engine", engine.url, "--id", "mac"
        )
        assert gateway.chat(model="qwen3:8b", **WORD).status_code == 200
        listed = paceline("engines", "list")
        assert "ollama" in listed
        assert "gemma3:4b" in listed
        assert paceline("engines", "remove", "mac") == "Removed mac.\n"
        assert status_and_code(gateway.chat(model="qwen3:8b", **WORD)) == (503, "no_worker")
        assert engines(gateway) == {}
        assert status_and_code(gateway.admin.delete(f"{PATH}/mac")) == (404, "engine_not_found")


def test_a_joined_engine_outlives_the_gateway(tmp_path: Path) -> None:
    with recorded_engine("llama_cpp") as engine:
        with RunningGateway(make_settings(tmp_path)) as gateway:
            terms = {"url": f"{engine.url}/v1", "models": {"small": "tiny"}, "labels": ["spare"]}
            joined = gateway.admin.post(PATH, json=terms)
            assert joined.status_code == 201, joined.text
            details = joined.json()
            assert details["kind"] == "llama.cpp"
            assert details["slots"] == 4, "as its /props tell"
            assert details["isolation"] == "no reuse"
            (model,) = details["models"]
            assert (model["name"], model["engine_name"]) == ("small", "tiny")
            assert "pictures" in model["lacks"]
        with RunningGateway(make_settings(tmp_path)) as gateway:
            wait_until(lambda: gateway.client.get("/readyz").status_code == 200)
            assert gateway.chat(model="small", **WORD).status_code == 200
            assert engine.generated()[-1]["model"] == "tiny"


def test_c15_an_engine_whose_record_is_damaged_is_told_and_joined_again(tmp_path: Path) -> None:
    damaged = '{"engines": {"mac": {"worker": {}}, "other": {"worker": {}}}}'
    (tmp_path / "state.json").write_text(damaged)
    with recorded_engine("omlx") as engine, RunningGateway(make_settings(tmp_path)) as gateway:
        assert gateway.status()["store"]["record_problem"].startswith(
            "This gateway cannot use what is stored as engines mac, engines other."
        )
        assert gateway.admin.post(PATH, json={"url": engine.url, "id": "mac"}).status_code == 201
        assert gateway.admin.delete(f"{PATH}/other").status_code == 204
        assert gateway.status()["store"]["state"] == "ok"


def test_gateways_that_share_redis_share_joined_engines(make_cluster_gateway) -> None:
    one, other = make_cluster_gateway(), make_cluster_gateway()
    with recorded_engine("omlx") as engine:
        terms = {"url": engine.url, "id": "mac"}
        # Redis may take longer than the gateway waits, and may have stored the record.
        wait_until(lambda: one.admin.post(PATH, json=terms).status_code in (201, 409))
        wait_until(lambda: other.client.get("/readyz").status_code == 200)
        for gateway in (one, other):
            assert gateway.chat(model="Qwen3.5-9B-4bit", **WORD).status_code == 200

        def counted() -> int:
            return int(one.status()["workers"]["mac"]["lanes"]["vlm"]["requests"])

        wait_until(lambda: counted() == 2)
        wait_until(lambda: other.admin.delete(f"{PATH}/mac").status_code in (204, 404))
        wait_until(lambda: not one.client.get("/v1/models").json()["data"])


@pytest.mark.parametrize(
    ("terms", "param"),
    [
        ({"url": "http://127.0.0.1:1"}, "url"),
        ({"url": "ftp://x"}, "url"),
        ({"api_key_env": "PACELINE_ADMIN_KEY"}, "api_key_env"),
        ({"api_key_env": "HOME"}, "api_key_env"),
        ({"api_key_env": "UNSET_API_KEY"}, "api_key_env"),
        ({"models": ["missing"]}, "models"),
        ({"pools": ["fast"]}, "pools"),
        ({"kind": "magic"}, "kind"),
    ],
)
def test_an_engine_that_cannot_be_used_is_refused_with_a_sentence(gateway, terms, param) -> None:
    with recorded_engine("omlx") as engine:
        refused = gateway.admin.post(PATH, json={"url": engine.url, **terms})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param), error
    assert error["message"].endswith(".")
    assert engines(gateway) == {}


def test_an_engine_gets_its_own_key_alone(gateway, monkeypatch) -> None:
    monkeypatch.setenv("MAC_API_KEY", "sk-of-the-mac")
    with recorded_engine("lmstudio") as engine:
        gateway.use_key(gateway.create_key()["secret"])
        joined = gateway.admin.post(PATH, json={"url": engine.url, "api_key_env": "MAC_API_KEY"})
        assert joined.status_code == 201, joined.text
        gateway.chat(model="qwen/qwen3-8b", **WORD)
        seen = {one.headers.get("authorization") for one in engine.requests}
    assert seen == {"Bearer sk-of-the-mac"}
    assert "sk-of-the-mac" not in (gateway.state_dir / "state.json").read_text()


def test_no_redirect_takes_the_gateway_elsewhere(gateway: RunningGateway) -> None:
    async def redirect(connection: ServerConnection, request: Request) -> None:
        location = f"http://127.0.0.1:{trap.getsockname()[1]}{request.path}".encode()
        await connection.send_head(307, ((b"location", location),), length=0)

    reached: list[str] = []

    async def reach(connection: ServerConnection, request: Request) -> None:
        reached.append(request.path)
        await connection.send_head(200, (), length=0)

    listener, trap = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    with running_server(redirect, sockets=[listener]), running_server(reach, sockets=[trap]):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        refused = gateway.admin.post(PATH, json={"url": url})
    assert refused.status_code == 400
    assert "redirects" in refused.json()["error"]["message"]
    assert reached == []


def test_models_are_read_again_when_they_change(make_gateway: MakeGateway) -> None:
    with recorded_engine("omlx") as engine:
        gateway = make_gateway(workers=(StaticWorker(id="mac", url=engine.url),))
        listed = engine.recording["exchanges"][0]
        listed["body"] = listed["body"].replace("Qwen3-VL-8B", "Qwen3-VL-30B")

        def models() -> set[str]:
            return {one["id"] for one in gateway.client.get("/v1/models").json()["data"]}

        gateway.clock.advance(10)
        wait_until(lambda: "Qwen3-VL-30B" in models())
        assert "Qwen3-VL-8B" not in models()


@pytest.fixture
def fleet_of(make_gateway: MakeGateway) -> Iterator[Callable[..., RunningGateway]]:
    """Return a function that starts a gateway of recorded engines, whose models have one name."""
    with contextlib.ExitStack() as running:

        def start(slots: int | None = None, **models: str) -> RunningGateway:
            return make_gateway(
                workers=tuple(
                    StaticWorker(
                        id=name,
                        url=running.enter_context(recorded_engine(name)).url,
                        models={"team": there},
                        slots=slots,
                    )
                    for name, there in models.items()
                )
            )

        yield start


def test_a_fleet_of_four_kinds_under_one_name_serves_mixed_requests_at_once(fleet_of) -> None:
    models = {"lmstudio": "qwen/qwen3-8b", "omlx": "Qwen3.5-9B-4bit", "llama_cpp": "tiny"}
    gateway = fleet_of(2, ollama="qwen3:8b", **models)

    def ask(number: int) -> bool:
        if number % 3 == 2:
            body = {"model": "team", **WORD, "max_tokens": 9}
            return gateway.client.post("/v1/messages", json=body).status_code == 200
        response = gateway.chat(model="team", **WORD, stream=bool(number % 3))
        return response.status_code == 200 and (
            not number % 3 or response.text.endswith("data: [DONE]\n\n")
        )

    with ThreadPoolExecutor(32) as executor:
        assert all(executor.map(ask, range(REQUESTS)))
    status = gateway.status()
    served = {
        name: worker["lanes"]["vlm"]["requests"] for name, worker in status["workers"].items()
    }
    assert sum(served.values()) == status["pools"]["vlm"]["requests"] == REQUESTS
    assert all(served.values()), "each engine has served some"
    written = sum(count * (7 if name == "llama_cpp" else 3) for name, count in served.items())
    assert status["models"]["team"]["tokens"]["completion"] == written


def test_a_picture_goes_to_the_engine_that_takes_pictures(fleet_of) -> None:
    gateway = fleet_of(llama_cpp="tiny", lmstudio="qwen2-vl-7b-instruct")

    def explain(**asked: Any) -> Any:
        body = {"model": "team", **asked}
        return gateway.client.post("/v1/route/explain", json=body).json()

    picture = [{"type": "image_url", "image_url": {"url": PICTURE}}]
    explained = explain(messages=[{"role": "user", "content": picture}])
    assert [one["worker_id"] for one in explained["candidates"]] == ["lmstudio"]
    assert explained["unavailable"] == {"llama_cpp": "lacks pictures"}
    scores = {one["worker_id"]: one["score_s"] for one in explain(**WORD)["candidates"]}
    assert scores["lmstudio"] - scores["llama_cpp"] > 2, "it would have to load the model"


def test_a_second_isolation_scope_ends_the_reuse_of_prompts_at_llama_cpp(make_gateway) -> None:
    with recorded_engine("llama_cpp") as engine:
        gateway = make_gateway(workers=(StaticWorker(id="mac", url=engine.url),))
        for team in ("red", "red", "blue", "red"):
            gateway.use_key(gateway.create_key(team=team)["secret"])
            assert gateway.chat(model="tiny", **WORD).status_code == 200
        reuses = [body.get("cache_prompt", True) for body in engine.generated()]
    assert reuses == [True, True, False, False]
    assert json.dumps(engine.generated()).count("max_completion_tokens") == 0
