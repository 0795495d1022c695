"""Play the suite of Open Responses on gateways, and write its table test by test.

`python -m bench.clients.open_responses before=URL after=URL` asks running gateways with a demo
worker, such as those of `paceline up`, and writes `bench/results/open_responses.md`. The first
seven tests ask what the public suite asks (`compliance-tests.ts`), in words of our own; those with
"more" ask for what else the specification describes. Every answer is greedy. Each body and each
event is validated as the suite does it: by the schemas as they are published, their errors
included. One is here: `JsonSchemaResponseFormat` lets a schema be null alone, so no server that
repeats its request passes "a schema for the text".
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx
from PIL import Image

from bench.harness.tables import Grid, provenance, report
from tests.support.chat_bodies import WEATHER
from tests.support.images import encode_image
from tests.support.open_responses import DONE, PATH, VERSION, problems_of, read_stream

Json = dict[str, Any]
_MODEL: Final = "demo"
_NUMBER: Final = re.compile(r"\.\d+")
_SHOWN: Final = 3
"""Of what is wrong with one answer."""
_QUESTION: Final = "What is the weather in Paris?"
_WEATHER: Final[Json] = {"type": "function", **WEATHER}
_CITY: Final[Json] = {
    "type": "json_schema",
    "name": "city",
    "schema": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
}


def _message(content: str | list[Json], role: str = "user") -> Json:
    return {"type": "message", "role": role, "content": content}


class Test(NamedTuple):
    """What one test asks, and what the answer must have."""

    body: Json
    stream: bool = False
    status: str = "completed"
    item: str = ""
    """A type of item that must be in the output."""
    events: str = ""
    """Types of events that must be in the stream, behind `response.`."""


_LOOK: Final = [
    {"type": "input_text", "text": "What colour is it?"},
    {"type": "input_image", "image_url": encode_image(Image.new("RGB", (64, 64), "red"))},
]
_CALLS: Final[Json] = {"input": [_message(_QUESTION)], "tools": [_WEATHER]}
_CALL_EVENTS: Final = "function_call_arguments.delta function_call_arguments.done output_item.done"
_ALLOWED: Final = {"type": "function", "name": "get_weather"}
SUITE: Final[Mapping[str, Test]] = {
    "basic response": Test({"input": [_message("Say hello.")]}),
    "streaming response": Test({"input": [_message("Count from 1 to 5.")]}, stream=True),
    "system prompt": Test({"input": [_message("Be brief.", "system"), _message("Say hello.")]}),
    "tool calling": Test(_CALLS, item="function_call"),
    "tool calling, streamed": Test(_CALLS, stream=True, item="function_call", events=_CALL_EVENTS),
    "image input": Test({"input": [_message([*_LOOK])]}),
    "multi-turn": Test(
        {
            "input": [
                _message("My name is Ann."),
                _message("Hello Ann!", "assistant"),
                _message("What is my name?"),
            ]
        }
    ),
}
MORE: Final[Mapping[str, Test]] = {
    "both penalties": Test({"input": "Hi", "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    "reasoning that is summarised": Test(
        {"input": "Hi", "reasoning": {"effort": "low", "summary": "auto"}}, stream=True
    ),
    "allowed tools without a mode": Test(
        {**_CALLS, "tool_choice": {"type": "allowed_tools", "tools": [_ALLOWED]}}
    ),
    "a schema for the text": Test({"input": "Hi", "text": {"format": _CITY}}),
    "log-probabilities, streamed": Test(
        {"input": "Hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}, stream=True
    ),
    "a limit of tokens": Test(
        {"input": "Count from 1 to 120.", "max_output_tokens": 16}, status="incomplete"
    ),
    "a response before, without input": Test({"previous_response_id": "?"}),
}


def play(client: httpx.Client, test: Test) -> Iterator[str]:
    """Yield what is wrong with the answer to a test; raise `httpx.HTTPError`."""
    body = {"model": _MODEL, "temperature": 0, "stream": test.stream, **test.body}
    if "previous_response_id" in body:
        first = client.post(PATH, json={"model": _MODEL, "input": "Hi"})
        body["previous_response_id"] = first.json()["id"]
    answer = client.post(PATH, json=body)
    if answer.status_code != 200:
        yield f"{answer.status_code}: {answer.json()['error']['message']}"
        return
    events = read_stream(answer.text) if test.stream else []
    response = events[-1]["response"] if events else answer.json()
    for event in events:
        yield from problems_of(event, event["type"])
    yield from problems_of(response, "ResponseResource")
    if test.stream and not answer.text.endswith(f"{DONE}\n\n"):
        yield f"no {DONE}"
    types = {event["type"] for event in events}
    yield from (f"no {one}" for one in test.events.split() if f"response.{one}" not in types)
    if response["status"] != test.status:
        yield f"the status is {response['status']}"
    if not any(item["type"] == (test.item or item["type"]) for item in response["output"]):
        yield f"no {test.item or 'item'} in the output"


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Play each test on each gateway."""
    urls = dict(one.split("=", 1) for one in arguments)
    rows = []
    for name, test in {**SUITE, **MORE}.items():
        cells = []
        for url in urls.values():
            with httpx.Client(base_url=url, timeout=120) as client:
                found = [*dict.fromkeys(_NUMBER.sub(".*", one) for one in play(client, test))]
            more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            cells.append("; ".join(found[:_SHOWN] + more) or "passes")
        rows.append((name if name in SUITE else f"more: {name}", *cells))
    grid = Grid(f"Test by test, {VERSION}", ("test", *urls), rows)
    report("open_responses.md", "Open Responses", __doc__ or "", provenance(), grid)


if __name__ == "__main__":
    main()
