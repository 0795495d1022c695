"""Reasoning that a client keeps for the gateway is of use within its isolation scope alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.policies import gateway_with_policy
from tests.support.running_gateway import RunningGateway, bearer_headers
from tests.support.scripted_worker import USAGE, ScriptedWorker

SECRET = "The code word is cormorant."
QUESTION = {"role": "user", "content": "Go on."}
PATHS = ("/v1/responses", "/v1/messages")


def reasoned() -> bytes:
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": SECRET}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "chatcmpl-1", "model": "demo", "choices": [choice], "usage": USAGE}
    return json.dumps(answer).encode()


class Wire:
    """One format at a gateway, before a worker that always reasons."""

    def __init__(self, path: str, gateway: RunningGateway, worker: ScriptedWorker) -> None:
        self._path = path
        self._gateway = gateway
        self._worker = worker
        worker.script.body = reasoned()

    def ask(self, key: dict[str, Any], said: list[Any], **fields: Any) -> list[Any]:
        """Send a conversation; return what a client adds to it."""
        messages = [QUESTION, *said, QUESTION]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/responses": {"input": messages, "include": ["reasoning.encrypted_content"]},
            "/v1/messages": {
                "messages": messages[-1 - 2 * bool(said) :],
                "max_tokens": 2048,
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
        }
        body = {"model": "demo", **bodies[self._path], **fields}
        answer = self._gateway.client.post(self._path, headers=bearer_headers(key), json=body)
        assert answer.status_code == 200, answer.text
        if self._path == "/v1/responses":
            thought, said_then = answer.json()["output"]
            return [{**thought, "content": []}, said_then]
        return [{"role": "assistant", "content": answer.json()["content"]}]

    def unseals(self, key: dict[str, Any], said: list[Any], **fields: Any) -> bool:
        """Return whether the worker gets the reasoning of what was said before."""
        self.ask(key, said, **fields)
        found = SECRET in json.dumps(self._worker.requests[-1].body["messages"])
        assert "Yes." in json.dumps(self._worker.requests[-1].body["messages"])
        return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("isolation", ["key", "team", "none"])
def test_c8_sealed_reasoning_is_unsealed_in_its_isolation_scope_alone(
    tmp_path: Path, worker: ScriptedWorker, path: str, isolation: str
) -> None:
    prefix = {"isolation": isolation}
    with gateway_with_policy(tmp_path, worker, prefix=prefix) as gateway:
        wire = Wire(path, gateway, worker)
        red, red_too, blue, alone = [
            gateway.create_key(team=team) for team in ("red", "red", "blue", "")
        ]
        said = wire.ask(red, [])
        found = [wire.unseals(key, said) for key in (red, red_too, blue, alone)]
    assert found == [True, isolation != "key", isolation == "none", isolation == "none"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "state.json").write_bytes((tmp_path / "state.json").read_bytes())
    with gateway_with_policy(other, worker, prefix=prefix) as gateway:
        wire = Wire(path, gateway, worker)
        assert [wire.unseals(key, said) for key in (red, red_too, blue, alone)] == found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("isolation", ["team", "none"])
def test_c8_sealed_reasoning_is_of_use_with_the_same_cache_salt_alone(
    tmp_path: Path, worker: ScriptedWorker, path: str, isolation: str
) -> None:
    with gateway_with_policy(tmp_path, worker, prefix={"isolation": isolation}) as gateway:
        wire = Wire(path, gateway, worker)
        key = gateway.create_key(team="red")
        said = wire.ask(key, [], cache_salt="tenant 1")
        assert wire.unseals(key, said, cache_salt="tenant 1")
        assert not wire.unseals(key, said, cache_salt="tenant 2")
        assert not wire.unseals(key, said)
        assert not wire.unseals(key, wire.ask(key, []), cache_salt="tenant 1")


def test_c8_a_kept_response_goes_on_with_its_reasoning(tmp_path, worker) -> None:
    with gateway_with_policy(tmp_path, worker) as gateway:
        worker.script.body = reasoned()
        headers = bearer_headers(gateway.create_key(team="red"))
        body = {"model": "demo", "input": "Hi"}
        first = gateway.client.post("/v1/responses", headers=headers, json=body).json()
        body["previous_response_id"] = first["id"]
        gateway.client.post("/v1/responses", headers=headers, json=body).raise_for_status()
    assert SECRET in json.dumps(worker.requests[-1].body["messages"])
