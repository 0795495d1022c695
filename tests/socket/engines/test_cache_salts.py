"""`cache_salt`, by which vLLM isolates requests: part of the isolation scope, on all wires."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.engines.llama_cpp import LlamaCpp
from gateway.engines.paceline import PacelineGateway
from paceline.protocol import KEYS_HEADER, MAX_PREFIX_NAME_CHARS, SCOPE_HEADER, whole_scope
from tests.support.policies import gateway_with_policy
from tests.support.running_gateway import RunningGateway, bearer_headers
from tests.support.scripted_worker import ScriptedWorker
from tests.support.static_workers import static_worker

SALT = "tenant 1 of the proxy"
TEXT = "The red fox sees the old tree. " * 20
CHAT = {"model": "demo", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "demo", "prompt": TEXT},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": "demo", "input": TEXT},
    "/v1/responses/input_tokens": {"model": "demo", "input": TEXT},
    "/v1/embeddings": {"model": "demo", "input": TEXT},
    "/v1/rerank": {"model": "demo", "query": "x", "documents": ["x"]},
}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("salt", ["", "x" * 257, 7, True, ["x"], {"x": 1}])
def test_c8_a_salt_that_is_no_short_text_is_refused_by_name(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, path: str, salt: Any
) -> None:
    body = {**BODIES[path], "cache_salt": salt}
    response = gateway_with_worker.client.post(path, json=body)
    assert response.status_code == 400
    assert "'cache_salt' must be a string of 1 to 256 characters." in response.text
    assert not worker.requests


@pytest.mark.parametrize("isolation", ["key", "team", "none"])
@pytest.mark.parametrize("path", GENERATING)
def test_c8_a_worker_gets_a_scope_for_each_salt_and_never_the_salt(
    tmp_path: Path, worker: ScriptedWorker, path: str, isolation: str
) -> None:
    with gateway_with_policy(tmp_path, worker, prefix={"isolation": isolation}) as gateway:
        red, blue = [bearer_headers(gateway.create_key(team=team)) for team in ("red", "blue")]
        salts = [SALT, SALT, "x" * 256, "☃\n\0", None, ...]
        for headers in (red, blue):
            for salt in salts:
                body = BODIES[path] | ({} if salt is ... else {"cache_salt": salt})
                response = gateway.client.post(path, headers=headers, json=body)
                assert response.status_code == 200, response.text
                assert "x-paceline-ignored" not in response.headers
    assert not any("cache_salt" in json.dumps(one.body) for one in worker.requests)
    scopes = [one.headers[SCOPE_HEADER] for one in worker.requests]
    keys = [one.headers[KEYS_HEADER] for one in worker.requests]
    assert max(map(len, scopes)) <= MAX_PREFIX_NAME_CHARS
    for names in (scopes, keys):
        of_red, of_blue = names[:6], names[6:]
        assert of_red[0] == of_red[1]
        assert of_red[4] == of_red[5]
        assert len(set(of_red)) == 4
        shared = set(of_red) & set(of_blue)
        assert shared == (set(of_red) if isolation == "none" else set())
    if isolation != "none":
        assert {whole_scope(name) for name in scopes[:6]} == {scopes[5]}


def test_c8_other_engines_get_the_name_of_the_scope_or_the_client_learns_that_they_do_not(
    tmp_path: Path, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    salted = static_worker(url=worker.url, pools=["vlm"], cache_salt=True)
    plain = static_worker(url=second_worker.url, pools=["vlm"], id="plain", models=["other"])
    with gateway_with_policy(tmp_path, static_workers=(salted, plain)) as gateway:
        key = bearer_headers(gateway.create_key(team="red"))
        for path in GENERATING:
            for salt in (SALT, SALT, "tenant 2", None):
                ignored = []
                for model in ("demo", "other"):
                    body = {**BODIES[path], "model": model, "cache_salt": salt}
                    response = gateway.client.post(path, headers=key, json=body)
                    assert response.status_code == 200, response.text
                    ignored.append(response.headers.get("x-paceline-ignored"))
                assert ignored == [None, None if salt is None else "cache_salt"]
    assert not any("cache_salt" in json.dumps(one.body) for one in second_worker.requests)
    sent = [one.body["cache_salt"] for one in worker.requests]
    assert sent == sent[:4] * len(GENERATING)
    assert sent[0] == sent[1]
    assert len({SALT, "tenant 2", *sent}) == 5


def test_c8_a_stream_that_goes_on_elsewhere_keeps_its_scope(gateway, worker, second_worker) -> None:
    for one in (worker, second_worker):
        gateway.join(one, fingerprint="f")
        one.script.tells_tokens = True
    worker.script.cut_after = 1
    while not worker.requests:
        second_worker.requests.clear()
        assert gateway.chat(cache_salt=SALT, stream=True, temperature=0).status_code == 200
    first, second = worker.requests[0], second_worker.requests[0]
    assert first.headers[SCOPE_HEADER] == second.headers[SCOPE_HEADER] != "all"


def test_c8_another_gateway_gets_the_scope_as_its_salt() -> None:
    sent = [json.loads(*PacelineGateway().body((), {"model": "demo"}, salt)) for salt in ("s", "")]
    assert [one.get("cache_salt") for one in sent] == ["s", None]


def test_c8_an_engine_without_scopes_reads_again_what_only_some_requests_isolate() -> None:
    """A prompt without a salt must not continue one with a salt, nor the other way round."""
    for salts, expected in (
        (["", "", "a", "", "a"], [None, None, False, False, False]),
        (["a", "a", ""], [None, None, False]),
    ):
        engine = LlamaCpp()
        sent = [json.loads(*engine.body((), {"model": "demo"}, salt)) for salt in salts]
        assert [one.get("cache_prompt") for one in sent] == expected
