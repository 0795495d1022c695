"""Workers that are listed by hand: any OpenAI-compatible server, without a heartbeat."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from gateway.config.settings import load_settings
from gateway.config.static_workers import (
    StaticWorker,
    check_unique_ids,
    pool_problems,
    read_worker_keys,
)
from gateway.errors import StartupError
from gateway.protocols.openai import for_openai
from policies.document import default_policy
from tests.support.running_gateway import RunningGateway, make_settings, running_server, wait_until
from tests.support.scripted_worker import JOIN_TOKEN, Script, ScriptedWorker
from tests.support.static_workers import ENTRY, static_worker

ROOT = Path(__file__).parents[3]


def gateway_with(folder: Path, *workers: StaticWorker) -> RunningGateway:
    return RunningGateway(make_settings(folder, workers=workers))


def told_by_status(gateway: RunningGateway) -> str:
    """What `paceline status` prints."""
    asked = [sys.executable, "-m", "gateway", "status", "--url", gateway.url]
    ran = subprocess.run(
        asked, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True
    )
    return ran.stdout.decode()


def ready(gateway: RunningGateway) -> bool:
    return gateway.client.get("/readyz").status_code == 200


def test_a_listed_server_answers_without_a_heartbeat(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with gateway_with(tmp_path, static_worker(url=f"{worker.url}/v1")) as gateway:
        wait_until(lambda: ready(gateway))
        response = gateway.chat(temperature=0)
        assert response.status_code == 200
        assert response.headers["x-paceline-worker"] == "studio"
        assert response.headers["x-paceline-pool"] == "text-mtp"
        assert gateway.chat().headers["x-paceline-pool"] == "vlm"
        with gateway.stream() as streamed:
            assert streamed.read().endswith(b"data: [DONE]\n\n")
        shown = gateway.status()["workers"]["studio"]
        assert shown["state"] == "ready"
        assert gateway.client.get("/v1/models").json()["data"][0]["id"] == "demo"


def test_it_gets_its_own_key_and_nothing_of_ours(
    tmp_path: Path, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUDIO_KEY", "key-of-the-studio")
    with gateway_with(tmp_path, static_worker(url=worker.url, api_key_env="STUDIO_KEY")) as gateway:
        wait_until(lambda: ready(gateway))
        gateway.chat(temperature=0.5)
    heard = worker.requests[0]
    assert heard.headers["authorization"] == "Bearer key-of-the-studio"
    assert JOIN_TOKEN not in str(heard.headers)
    assert not [name for name in heard.headers if name.startswith("x-paceline")]
    assert "top_k" not in heard.body
    assert "min_p" not in heard.body
    assert heard.body["temperature"] == 0.5


def test_a_server_without_a_key_of_its_own_gets_none(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    with gateway_with(tmp_path, static_worker(url=worker.url)) as gateway:
        wait_until(lambda: ready(gateway))
        gateway.chat()
    assert "authorization" not in worker.requests[0].headers


def test_all_models_of_a_server_are_served_and_its_slots_are_shared(
    tmp_path: Path, worker: ScriptedWorker
) -> None:
    worker.script.hang = True
    two = static_worker(url=worker.url, models=["demo", "other"], slots=2)
    with gateway_with(tmp_path, two) as gateway, ThreadPoolExecutor(3) as executor:
        wait_until(lambda: ready(gateway))
        asked = [
            executor.submit(gateway.chat, temperature=0),
            executor.submit(gateway.chat, model="other"),
        ]
        wait_until(lambda: worker.in_flight == 2)
        asked.append(executor.submit(gateway.chat))
        wait_until(lambda: gateway.status()["pools"]["vlm"]["waiting"] == 1)
        assert worker.in_flight == 2
        assert told_by_status(gateway).count(" 1/2 ") >= 2, "one in each lane"
        worker.resume.set()
        assert {response.result().status_code for response in asked} == {200}
        assert gateway.status()["models"]["other"]["workers"] == ["studio"]


def test_a_server_that_is_down_is_out_and_its_model_is_known_all_the_same(tmp_path: Path) -> None:
    away = ScriptedWorker()
    with gateway_with(tmp_path, static_worker(url=away.url)) as gateway:
        away.socket.close()
        response = gateway.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert gateway.client.get("/readyz").status_code == 503


def test_a_server_that_comes_up_later_is_in_with_the_next_probe(tmp_path: Path) -> None:
    late = ScriptedWorker()
    with gateway_with(tmp_path, static_worker(url=late.url)) as gateway:
        assert not ready(gateway)
        with running_server(late, sockets=[late.socket]):
            wait_until(lambda: ready(gateway))
            assert gateway.chat().status_code == 200


def test_a_server_that_fails_is_ejected_like_any_other(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = Script(status=404, body=b'{"error": "no such model: /Users/me/x"}')
    both = (static_worker(id="a", url=worker.url), static_worker(id="b", url=second_worker.url))
    with gateway_with(tmp_path, *both) as gateway:
        wait_until(lambda: len(gateway.status()["pools"]["vlm"]["workers"]) == 2)
        responses = []
        while gateway.status()["workers"]["a"]["state"] != "ejected":
            responses.append(gateway.chat())
        assert [response.status_code for response in responses].count(502) == 5
        assert not any(b"/Users" in response.content for response in responses)
        assert {gateway.chat().status_code for _ in range(5)} == {200}


def write(folder: Path, **written: Any) -> Path:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(written))
    return file


def test_the_file_lists_workers_and_may_hold_what_is_meant_for_a_worker(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, port=1, workers=[ENTRY], worker={"model": "x"}))
    assert settings.workers == (static_worker(),)
    assert settings.port == 1


def test_a_name_that_nobody_knows_stops_the_start_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="'worker_list' in the configuration file: unknown"):
        load_settings(write(tmp_path, worker_list=[ENTRY]))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kind": "magic"}, "kind"),
        ({"url": "localhost:9200"}, "url"),
        ({"url": "ftp://a"}, "url"),
        ({"url": "http://user:secret@a"}, "url"),
        ({"url": "http://a/v1?key=secret"}, "url"),
        ({"url": "http://a:99999"}, "url"),
        ({"models": []}, "models"),
        ({"pools": []}, "pools"),
        ({"slots": 0}, "slots"),
        ({"id": "../x"}, "id"),
        ({"api_key": "secret"}, "api_key"),
        ({"api_key_env": "sk-secret"}, "api_key_env"),
    ],
)
def test_a_wrong_entry_is_named_by_field_and_its_value_is_not_repeated(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(StartupError) as refused:
        load_settings(write(tmp_path, workers=[{**ENTRY, **changes}]))
    assert f"'workers.0.{field}' in the configuration file" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_entry_field_is_named_too() -> None:
    with pytest.raises(ValidationError, match="models"):
        StaticWorker.model_validate({name: ENTRY[name] for name in ENTRY if name != "models"})


@pytest.mark.parametrize(
    ("written", "base"),
    [
        ("http://a:1", "http://a:1"),
        ("http://a:1/", "http://a:1"),
        ("https://a/v1", "https://a"),
        ("https://a/api/v1/", "https://a/api"),
    ],
)
def test_an_address_is_taken_as_people_write_it(written: str, base: str) -> None:
    assert static_worker(url=written).url == base


def test_the_list_must_fit_the_policy_and_itself() -> None:
    check_unique_ids((static_worker(), static_worker(id="other", pools=["vlm"])))
    with pytest.raises(StartupError, match=r"Two workers .* have the id 'studio'"):
        check_unique_ids((static_worker(), static_worker()))
    assert pool_problems((static_worker(),), default_policy()) == []
    (problem,) = pool_problems((static_worker(pools=["fast"]),), default_policy())
    assert re.search(r"the pool 'fast', but .* only in: text-mtp, vlm", problem)


def test_a_key_that_is_not_set_is_named_by_its_variable() -> None:
    mine = static_worker(api_key_env="STUDIO_KEY")
    assert read_worker_keys((mine, static_worker()), {"STUDIO_KEY": "x"}) == {"studio": "x"}
    with pytest.raises(StartupError, match="STUDIO_KEY"):
        read_worker_keys((mine,), {})


def test_only_what_changes_nothing_is_left_out() -> None:
    body = {"top_k": 0, "min_p": 0.0, "temperature": 0.0, "messages": []}
    assert for_openai(body) == {"temperature": 0.0, "messages": []}
    assert for_openai({"top_k": 5, "min_p": 0.1}) == {"top_k": 5, "min_p": 0.1}


def test_a_key_is_taken_without_the_end_of_its_line() -> None:
    worker = static_worker(api_key_env="STUDIO_KEY")
    for end in ("", "\n", "\r\n", "\r"):
        assert read_worker_keys([worker], {"STUDIO_KEY": f"sk-abc{end}"}) == {"studio": "sk-abc"}


@pytest.mark.parametrize("key", ["sk-\nabc", "sk-äbc", "sk-\x00abc"])
def test_a_key_that_no_header_can_hold_stops_the_start_and_is_not_repeated(key: str) -> None:
    with pytest.raises(
        StartupError, match="STUDIO_KEY, the API key of the worker 'studio'"
    ) as refused:
        read_worker_keys([static_worker(api_key_env="STUDIO_KEY")], {"STUDIO_KEY": key})
    assert key not in str(refused.value)


def test_f02_a_body_that_cost_two_listed_servers_is_sent_to_no_third(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    worker.script = second_worker.script = Script(drop=True)
    both = (
        static_worker(id="one", url=worker.url),
        static_worker(id="two", url=second_worker.url),
    )
    with gateway_with(tmp_path, *both) as gateway:
        wait_until(lambda: len(gateway.status()["workers"]) == 2)
        codes = [gateway.chat().json()["error"]["code"] for _ in range(12)]
    assert set(codes) == {"worker_lost", "request_quarantined"}
    assert codes[-1] == "request_quarantined"
