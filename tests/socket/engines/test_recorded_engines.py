"""Engines of other kinds, played from recordings of real ones or from their published API."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.config.static_workers import StaticWorker
from tests.support.gateway_fixtures import MakeGateway
from tests.support.recorded_engine import FOLDER, RecordedEngine, recorded_engine
from tests.support.running_gateway import RunningGateway, said

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
WORD = "What is 3 plus 4?"
WEATHER = "What is the weather in Paris?"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("weather", "get_weather")
]
LONG = ("word " * 40)[:100] + " and more" * 10


class Served:
    """A gateway whose only worker is a recorded engine that it has found out itself."""

    def __init__(self, name: str, engine: RecordedEngine, gateway: RunningGateway) -> None:
        self.name, self.engine, self.gateway = name, engine, gateway
        self.model: str = engine.recording["models"][0]

    def chat(self, text: str, **fields: Any) -> Any:
        return self.gateway.chat(model=self.model, **said(text), **fields)

    def worker(self) -> Any:
        return self.gateway.status()["workers"]["studio"]


@pytest.fixture(params=NAMES)
def served(request: pytest.FixtureRequest, make_gateway: MakeGateway) -> Iterator[Served]:
    with recorded_engine(request.param) as engine:
        gateway = make_gateway(workers=(StaticWorker(id="studio", url=engine.url),))
        yield Served(request.param, engine, gateway)


def test_an_engine_of_each_kind_is_found_out_and_serves(served: Served) -> None:
    kind = served.engine.recording["engine"]
    assert served.worker()["kind"] == kind
    listed = [one["id"] for one in served.gateway.client.get("/v1/models").json()["data"]]
    assert set(served.engine.recording["models"]) <= set(listed)
    assert not [name for name in listed if "embed" in name or "bge" in name]
    assert all("authorization" not in one.headers for one in served.engine.requests)

    whole = served.chat(WORD)
    assert whole.status_code == 200, whole.text
    message = whole.json()["choices"][0]["message"]
    assert message["content"]
    events = served.chat(WORD, stream=True).content
    assert events.endswith(b"data: [DONE]\n\n")
    deltas = [
        choice["delta"]
        for line in events.decode().splitlines()
        if line.startswith("data: {")
        for choice in json.loads(line[6:])["choices"]
    ]
    assert "".join(delta.get("content") or "" for delta in deltas)
    for part in (message, *deltas):
        assert bool(part.get("reasoning")) <= bool(part.get("reasoning_content"))

    worker = served.worker()
    lane = worker["lanes"]["vlm"]
    assert lane["requests"] == 2
    usage = whole.json()["usage"]
    assert lane["completion_tokens"] >= usage["completion_tokens"] > 0
    tells = served.engine.recording["tells"]
    assert worker["unreported"] == {
        number: 0 if number in tells else 2 for number in ("usage", "cached_tokens", "drafts")
    }
    drafted = "drafts" in tells
    assert worker["mtp"]["enabled"] == drafted
    metrics = served.gateway.client.get("/metrics").text
    assert ("vllm:spec_decode_num_drafts_total{" in metrics) == drafted
    assert "paceline_worker_requests_total{" in metrics
    untold = f'number="cached_tokens",worker="studio"}} {worker["unreported"]["cached_tokens"]}.0'
    assert untold in metrics


@pytest.mark.parametrize("streamed", [False, True])
def test_cached_tokens_of_each_kind_reach_clients_of_the_other_wires(served, *, streamed) -> None:
    options = {"stream_options": {"include_usage": True}} if streamed else {}
    chat = served.chat(WORD, stream=streamed, **options).text
    texts = [line.removeprefix("data: ") for line in chat.splitlines() if '"usage"' in line]
    usage = json.loads(texts[-1])["usage"]
    cached = usage.get("prompt_tokens_details", usage).get("cached_tokens", 0)
    asked = {"model": served.model, "stream": streamed}
    post = served.gateway.client.post
    response = post("/v1/responses", json={**asked, "input": WORD}).text
    assert f'"cached_tokens":{cached},' in response
    message = post("/v1/messages", json={**asked, **said(WORD), "max_tokens": 50}).text
    assert f'"cache_read_input_tokens":{cached},' in message
    assert f'"input_tokens":{usage["prompt_tokens"] - cached},' in message


def test_a_model_of_an_engine_that_fails_to_list_any_is_the_one_that_an_admin_names(
    make_gateway: MakeGateway,
) -> None:
    """`mlx_lm.server` lists nothing on a machine without a folder of downloads."""
    with recorded_engine("mlx_lm") as engine:
        entry = StaticWorker(id="studio", url=engine.url, models={"team": "/Users/ann/models/demo"})
        gateway = make_gateway(workers=(entry,))
        assert gateway.chat(model="team", **said(WORD)).status_code == 200
        assert engine.generated()[-1]["model"] == "/Users/ann/models/demo"


def test_tool_calls_of_each_kind_reach_clients(served: Served) -> None:
    whole = served.chat(WEATHER, tools=TOOLS)
    assert whole.status_code == 200, whole.text
    (call,) = whole.json()["choices"][0]["message"]["tool_calls"]
    assert "weather" in call["function"]["name"]
    assert json.loads(call["function"]["arguments"])
    assert whole.json()["choices"][0]["finish_reason"] == "tool_calls"
    assert b"weather" in served.chat(WEATHER, tools=TOOLS, stream=True).content
    schema = {"type": "object"}
    tools = [{"name": one["function"]["name"], "input_schema": schema} for one in TOOLS]
    body = {"model": served.model, "max_tokens": 50, **said(WEATHER), "tools": tools}
    anthropic = served.gateway.client.post("/v1/messages", json=body)
    assert anthropic.json()["stop_reason"] == "tool_use", anthropic.text


def test_a_mistake_of_a_client_is_its_own_and_ejects_no_engine(served: Served) -> None:
    if not any(
        one.get("request") and LONG[:100] in str(one["request"])
        for one in served.engine.recording["exchanges"]
    ):
        pytest.skip("the engine takes a prompt of any length")
    for stream in (False, True) * 4:
        refused = served.chat(LONG, stream=stream)
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "Users" not in refused.text
        assert "tmp" not in refused.text
    assert served.worker()["state"] == "ready"
    assert served.chat(WORD).status_code == 200


def test_a_feature_that_no_engine_takes_is_refused_by_name(served: Served) -> None:
    refused = served.chat(WORD, stop_token_ids=[7])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stop_token_ids"
    assert not [body for body in served.engine.generated() if "stop_token_ids" in body]
