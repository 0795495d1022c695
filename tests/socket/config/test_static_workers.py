"""Static workers of the settings: any OpenAI-compatible server, without heartbeats."""

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from gateway.config.settings import load_settings
from gateway.config.static_workers import (
    StaticWorker,
    check_unique_ids,
    pool_problems,
    read_worker_key,
)
from gateway.engines.ollama import Ollama
from gateway.engines.openai import OpenAIEngine
from gateway.errors import StartupError
from gateway.fleet.engine_watch import EngineWatch, WatchedEngine
from gateway.fleet.registry import WorkerRegistry
from gateway.state.counters import MemoryCounters
from policies.document import default_policy
from tests.support.policies import gateway_with_policy
from tests.support.running_gateway import (
    RunningGateway,
    make_settings,
    running_server,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import DONE, JOIN_TOKEN, Script, ScriptedWorker
from tests.support.static_workers import ENTRY, static_worker


@contextlib.contextmanager
def gateway_with(folder: Path, *workers: StaticWorker) -> Iterator[RunningGateway]:
    """Run a gateway with static workers, which it has found ready."""
    with RunningGateway(make_settings(folder, workers=workers)) as gateway:
        wait_until(lambda: len(gateway.status()["workers"]) == len(workers) and ready(gateway))
        yield gateway


def ready(gateway: RunningGateway) -> bool:
    return gateway.client.get("/readyz").status_code == 200


def test_a_static_worker_serves_requests_without_a_heartbeat_and_without_a_key(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with gateway_with(tmp_path, static_worker(url=f"{worker.url}/v1")) as gateway:
        response = gateway.chat(temperature=0)
        assert response.status_code == 200
        assert response.headers["x-paceline-worker"] == "studio"
        assert response.headers["x-paceline-pool"] == "text-mtp"
        assert gateway.chat().headers["x-paceline-pool"] == "vlm"
        with gateway.stream() as streamed:
            assert streamed.read().endswith(DONE)
        assert gateway.status()["workers"]["studio"]["state"] == "ready"
        assert gateway.client.get("/v1/models").json()["data"][0]["id"] == "demo"
    assert "authorization" not in worker.requests[0].headers


def test_a_static_worker_gets_its_own_key_and_no_gateway_headers(
    tmp_path: Path, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUDIO_KEY", "key-of-the-studio")
    with gateway_with(tmp_path, static_worker(url=worker.url, api_key_env="STUDIO_KEY")) as gateway:
        gateway.chat(temperature=0.5)
    received = worker.requests[0]
    assert received.headers["authorization"] == "Bearer key-of-the-studio"
    assert JOIN_TOKEN not in str(received.headers)
    assert not [name for name in received.headers if name.startswith("x-paceline")]
    assert not {"top_k", "min_p"} & received.body.keys()
    assert received.body["temperature"] == 0.5


@pytest.mark.parametrize("isolation", ["key", "team", "none"])
def test_c8_a_static_worker_gets_the_isolation_scope_as_its_cache_salt(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker, isolation: str
) -> None:
    salted = static_worker(url=worker.url, pools=["vlm"], cache_salt=True)
    plain = static_worker(url=second_worker.url, pools=["vlm"], id="plain", models=["other"])
    policy = {"prefix": {"isolation": isolation}}
    with gateway_with_policy(tmp_path, static_workers=(salted, plain), **policy) as gateway:
        for team in ("red", "red", "blue"):
            gateway.use_new_key(team=team)
            for model in ("demo", "other"):
                assert gateway.chat(model=model).status_code == 200
    first, second, other = (received.body.get("cache_salt") for received in worker.requests)
    assert (first is None) == (isolation == "none")
    assert (first == second, first == other) == (isolation != "key", isolation == "none")
    assert all("cache_salt" not in received.body for received in second_worker.requests)


def test_models_of_a_static_worker_share_its_slots(tmp_path, worker, capsys) -> None:
    worker.script.hang = True
    static = static_worker(url=worker.url, models=["demo", "other"], slots=2)
    with gateway_with(tmp_path, static) as gateway, ThreadPoolExecutor(3) as executor:
        requests = [
            executor.submit(gateway.chat, **one) for one in ({"temperature": 0}, {"model": "other"})
        ]
        wait_until(lambda: worker.in_flight == 2)
        requests.append(executor.submit(gateway.chat))
        wait_until(lambda: gateway.status()["pools"]["vlm"]["waiting"] == 1)
        assert worker.in_flight == 2
        assert main(["status", "--url", gateway.url]) == 0
        assert capsys.readouterr().out.count(" 1/2 ") >= 2, "one in each lane"
        worker.resume.set()
        assert {response.result().status_code for response in requests} == {200}
        assert gateway.status()["models"]["other"]["workers"] == ["studio"]


def test_a_static_worker_is_ready_after_its_first_successful_probe(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    with RunningGateway(
        make_settings(tmp_path, workers=(static_worker(url=worker.url),))
    ) as gateway:
        assert not ready(gateway)
        assert status_and_code(gateway.chat()) == (503, "no_worker")
        with running_server(worker, sockets=[worker.socket]):
            wait_until(lambda: ready(gateway))
            assert gateway.chat().status_code == 200


def test_a_failing_static_worker_is_ejected(tmp_path, worker, second_worker) -> None:
    worker.script = Script(status=404, body=b'{"error": "no such model: /Users/me/x"}')
    workers = (static_worker(id="a", url=worker.url), static_worker(id="b", url=second_worker.url))
    with gateway_with(tmp_path, *workers) as gateway:
        responses = []
        while gateway.status()["workers"]["a"]["state"] != "ejected":
            responses.append(gateway.chat())
        assert {response.status_code for response in responses} == {200}, "the other one answers"
        assert not any(b"/Users" in response.content for response in responses)
        assert {gateway.chat().status_code for _ in range(5)} == {200}


def write(folder: Path, **written: Any) -> Path:
    file = folder / "paceline.yaml"
    file.write_text(yaml.safe_dump(written))
    return file


def test_the_settings_file_may_contain_workers_and_settings_of_a_worker(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, port=1, workers=[ENTRY], worker={"model": "x"}))
    assert settings.workers == (static_worker(),)
    assert settings.port == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "magic"}, "kind"),
        ({"url": "localhost:9200"}, "url"),
        ({"url": "ftp://a"}, "url"),
        ({"url": "http://user:secret@a"}, "url"),
        ({"url": "http://a/v1?key=secret"}, "url"),
        ({"url": "http://a:99999"}, "url"),
        ({"slots": 0}, "slots"),
        ({"id": "../x"}, "id"),
        ({"api_key": "secret"}, "api_key"),
        ({"api_key_env": "sk-secret"}, "api_key_env"),
    ],
)
def test_an_invalid_entry_is_named_by_field_without_its_value(tmp_path, changes, field) -> None:
    with pytest.raises(StartupError) as error:
        load_settings(write(tmp_path, workers=[{**ENTRY, **changes}]))
    assert f"'workers.0.{field}' in the configuration file" in str(error.value)
    assert "secret" not in str(error.value)


def test_a_url_is_normalized() -> None:
    for written, base in (
        ("http://a:1", "http://a:1"),
        ("http://a:1/", "http://a:1"),
        ("https://a/v1", "https://a"),
        ("https://a/api/v1/", "https://a/api"),
    ):
        assert static_worker(url=written).url == base


def test_ids_must_be_unique_and_pools_must_be_in_the_policy() -> None:
    check_unique_ids((static_worker(), static_worker(id="other", pools=["vlm"])))
    with pytest.raises(StartupError, match=r"Two workers .* have the id 'studio'"):
        check_unique_ids((static_worker(), static_worker()))
    assert pool_problems((static_worker(),), default_policy()) == []
    (problem,) = pool_problems((static_worker(pools=["fast"]),), default_policy())
    assert re.search(r"the pool 'fast', but .* only in: embeddings, rerank, text-mtp, vlm", problem)


def test_a_key_is_read_without_its_line_break_and_named_by_its_variable_if_it_is_invalid() -> None:
    with_key = static_worker(api_key_env="STUDIO_KEY")
    for end in ("", "\n", "\r\n", "\r"):
        given = {"STUDIO_KEY": f"sk-abc{end}"}
        assert read_worker_key(with_key, given) == "sk-abc"
    with pytest.raises(StartupError, match="STUDIO_KEY"):
        read_worker_key(with_key, {})
    for key in ("sk-\nabc", "sk-äbc", "sk-\x00abc"):
        problem = "STUDIO_KEY, the API key of the worker 'studio'"
        with pytest.raises(StartupError, match=problem) as error:
            read_worker_key(with_key, {"STUDIO_KEY": key})
        assert key not in str(error.value)


def test_an_engine_gets_no_fields_without_effect() -> None:
    def sent(engine: OpenAIEngine | None = None, **fields: Any) -> dict[str, Any]:
        (raw,) = (engine or OpenAIEngine()).body((), {"model": "demo", **fields}, "")
        body: dict[str, Any] = json.loads(raw)
        del body["model"]
        return body

    assert sent(top_k=0, min_p=0.0, temperature=0.0) == {"temperature": 0.0}
    assert sent(top_k=5, min_p=0.1) == {"top_k": 5, "min_p": 0.1}
    assert sent(token_sources=True, draft_tokens=2, metrics="summary") == {}
    assert sent(tool_grammars={"patch": {"syntax": "lark", "definition": "start: A"}}) == {}
    options = {"include_usage": True, "continuous_usage_stats": True}
    for interval, engine in ((32, OpenAIEngine()), (0, Ollama())):
        asked = {**options, "usage_interval_tokens": interval}
        assert sent(engine, stream_options=asked) == {"stream_options": {"include_usage": True}}
    each = {**options, "usage_interval_tokens": 0}
    assert sent(stream_options=each) == {"stream_options": options}, "vLLM knows it"


async def test_a_worker_that_cannot_be_reached_is_logged_once_as_unhealthy(caplog) -> None:
    fleet = WorkerRegistry(lambda: 1_000_000.0, jitter=lambda: 0.0)
    watched = WatchedEngine(entry=static_worker(url="http://127.0.0.1:1"))
    async with EngineWatch(fleet, MemoryCounters(), lambda: 1_000_000.0) as watch:
        watch.replace([watched])
        for _ in range(2):
            await watch.probe_now("studio")
    warnings = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    reason = "The engine does not answer: nothing listens at its URL."
    assert warnings == [f"worker.unhealthy worker=studio reason={reason}"]
