"""A stream outlives its worker: another one with the same model goes on with the next token."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.protocol import ANSWER_FIELD, PROGRESS_HEADER, TOKENS_LINE
from tests.support.failover_fleet import (
    CHAT,
    CREATED_S,
    Answer,
    check_drafts,
    running_fleet,
    serving,
)
from tests.support.fault_proxy import Fault
from tests.support.scripted_worker import JOIN_TOKEN
from workers.engine.engine import Engine

CUTS = (0, 5, 37, 68, 95, 101)
"""Percents of a stream without the lines that tell its tokens, which take some more bytes."""
QUESTION = {"role": "user", "content": "Count from 1 to 60."}
BASE = {
    "model": "demo",
    "messages": [QUESTION],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "max_tokens": 24,
}
SCHEMA = {
    "type": "object",
    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "maxItems": 6}},
    "required": ["numbers"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
BODIES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1, "seed": 7, "top_p": 0.9},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "temperature": 0.7, "seed": 3},
    "penalties": {"frequency_penalty": 1, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "stop": {"stop": ["1 2", " 8"]},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "numbers", "schema": SCHEMA, "strict": True},
        }
    },
    "calls": {"tools": [WEATHER], "tool_choice": "required"},
    "choices": {"n": 2, "temperature": 1, "seed": 5, "max_tokens": 16},
    "sources": {"token_sources": True},
    "detailed": {"metrics": "detailed"},
    "exact": {
        "exact": True,
        "logprobs": True,
        "temperature": 0.7,
        "seed": 3,
        "presence_penalty": 1,
    },
    "exact calls": {"exact": True, "tools": [WEATHER], "tool_choice": "required"},
}


@pytest.mark.parametrize("kind", BODIES)
async def test_each_event_may_be_the_last_of_a_worker(engine: Engine, kind: str) -> None:
    """A second worker continues after an event of a stream, and what it adds is the rest."""
    async with serving(engine, "a") as served, httpx.AsyncClient(timeout=60) as client:
        url = f"{served.worker.url}/v1/chat/completions"
        headers = {
            "authorization": f"Bearer {JOIN_TOKEN}",
            "x-request-id": "r",
            PROGRESS_HEADER: "1",
        }
        body = {**BASE, **BODIES[kind]}
        whole = (await client.post(url, json=body, headers=headers)).content
        expected = Answer().read(whole)
        assert expected.done
        events = whole.split(b"\n\n")[:-1]
        ends = [at + 1 for at, event in enumerate(events) if event.startswith(TOKENS_LINE)]
        for end in sorted({*ends[:2], *ends[-2:], *ends[2 : -2 : max(1, len(ends) // 3)]}):
            begin = b"".join(event + b"\n\n" for event in events[:end])
            lines = [event.split(b"\n")[0] for event in events[:end]]
            told = [line[len(TOKENS_LINE) :] for line in lines if line.startswith(TOKENS_LINE)]
            further = {**body, ANSWER_FIELD: b";".join(told).decode()}
            response = await client.post(url, json=further, headers=headers)
            assert response.status_code == 200, response.text
            answer = Answer().read(begin + response.content)
            assert answer.facts == expected.facts, (kind, end)
            assert (answer.ids, answer.created) == ({"chatcmpl-r"}, {int(CREATED_S)})
            check_drafts(answer)
            assert bool(answer.metrics) == bool(expected.metrics)


@pytest.mark.parametrize("kind", ["greedy", "seeded", "exact"])
async def test_f03_a_stream_that_is_cut_at_any_byte_equals_the_whole_one(
    engine: Engine, tmp_path: Path, kind: str
) -> None:
    async with running_fleet(engine, tmp_path) as fleet:
        body = {**BASE, **BODIES[kind]}
        whole = await fleet.ask(CHAT, body)
        assert whole.headers["x-paceline-worker"] == "a"
        expected = Answer().read(whole.content)
        size, faults = len(whole.content), 0
        for number, cut in enumerate(CUTS):
            fault = Fault(reset_after_bytes=200 + size * cut // 100)
            first, second = ("a", "b") if number % 2 else ("b", "a")
            response = await fleet.ask(CHAT, body, fault, first=first)
            answer = Answer().read(response.content)
            assert answer.facts == expected.facts, cut
            assert (answer.ids, len(answer.created)) == (expected.ids, 1)
            assert TOKENS_LINE not in response.content
            # A stream with more tokens in a step is shorter, and may end before a late cut.
            cuts = fleet.faults - faults
            faults += cuts
            assert answer.metrics.get("failovers", 0) == cuts
            if cuts:
                told = f"x-paceline-worker: {second}\n".encode() in response.content
                assert told or response.headers["x-paceline-failovers"] == "1"
            check_drafts(answer)
        status = fleet.gateway.status()
    assert len(CUTS) // 2 <= faults <= len(CUTS)
    assert status["failovers"] == faults
    assert status["outcomes"] == {"completed": len(CUTS) + 1}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_f03_other_wire_formats_go_on_too(engine: Engine, tmp_path: Path, path: str) -> None:
    text = QUESTION["content"]
    fields = (
        {"max_tokens": 60, "messages": [QUESTION]}
        if "messages" in path
        else {"input": text, "max_output_tokens": 60}
    )
    body = {"model": "demo", "stream": True, "temperature": 0, **fields}
    async with running_fleet(engine, tmp_path) as fleet:
        whole = events_of((await fleet.ask(path, body)).content)
        for at in (900, 2500):
            response = await fleet.ask(path, body, Fault(reset_after_bytes=at))
            received = response.content
            told = b": x-paceline-failovers: 1\n" in received
            assert told or response.headers["x-paceline-failovers"] == "1"
            assert texts_of(events_of(received)) == texts_of(whole), at
            kinds = [event["type"] for event in events_of(received) if "delta" not in event]
            assert kinds == [event["type"] for event in whole if "delta" not in event]


def events_of(received: bytes) -> list[dict[str, Any]]:
    lines = received.split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def texts_of(events: list[dict[str, Any]]) -> str:
    deltas = [event["delta"] for event in events if "delta" in event]
    return "".join(one if isinstance(one, str) else one.get("text", "") for one in deltas)
