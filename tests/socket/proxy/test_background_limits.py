"""How much a gateway holds of responses in the background, and how a larger one ends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.app import create_app
from gateway.http.downstream import CancelScope
from gateway.responses.exchange import EventLog, LogLimits, ResponseExchange, ResponsesService
from gateway.routing.view import FleetView
from policies.document import PolicyDocument
from tests.support.maker_types import read_event
from tests.support.policies import single_pool_policy
from tests.support.running_gateway import make_settings

BODY = {"model": "m", "input": "Hi", "background": True}
LIMITS = LogLimits(log_bytes=20_000, ended=3, ended_bytes=40_000)
REQUEST: Any = None
POLICY = PolicyDocument.model_validate(single_pool_policy())
FLEET = FleetView.of((), frozenset())


async def service_of(state_dir: Path) -> ResponsesService:
    app = await create_app(make_settings(state_dir))
    return ResponsesService(app.gateway, LIMITS)


async def respond(service: ResponsesService, *texts: str) -> ResponseExchange:
    """Answer a request in the background with these pieces, as the handler does; wait to end it."""
    exchange = service.exchange()
    hold = service.memory.hold("ann")
    await exchange.open(BODY, "ann", hold, 0)
    exchange.format.inspect(BODY, POLICY, FLEET)
    client: Any = EventLog("req-1", 60.0, 1 << 20, hold.another())
    event_log: EventLog = client
    try:
        with CancelScope(client) as cancel_scope:
            event_log = await exchange.detach(client, cancel_scope)
            encoder = exchange.format.encoder(REQUEST)
            for text in texts:
                choice = {"index": 0, "delta": {"content": text}}
                frame = {"id": "c", "model": "m", "choices": [choice]}
                event_log.write(encoder.event(b"", frame))
                await asyncio.sleep(0)
            last = encoder.done()
            event_log.end(last + await exchange.finish())
    except errors.GatewayError as error:
        await event_log.fail(error, (), exchange.format)
    finally:
        await exchange.end()
    return exchange


def events_of(exchange: ResponseExchange) -> list[Any]:
    assert exchange.log is not None
    events = [json.loads(one.split(b"data: ")[1]) for one in exchange.log.events]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    for event in events:
        read_event(event)
    return events


def test_the_limits_are_those_that_the_page_on_errors_names() -> None:
    assert LogLimits() == (32 << 20, 256, 128 << 20)


async def test_a_response_beyond_the_limit_of_its_events_fails_unless_it_is_its_end_alone(
    tmp_path: Path,
) -> None:
    """No event is lost on the way to its end."""
    service = await service_of(tmp_path)
    exchange = await respond(service, *["word " * 200] * 40)
    *_, error, failed = events_of(exchange)
    assert (error["code"], failed["type"]) == ("response_too_large", "response.failed")
    assert exchange.response["status"] == "failed"
    kept = await service.kept(service.memory.hold("ann")).response("ann", exchange.response["id"])
    assert kept["response"]["status"] == "failed"
    exchange = await respond(service, "word " * 1600)
    assert events_of(exchange)[-1]["type"] == "response.completed"
    assert exchange.log is not None
    assert exchange.log.size_bytes > LIMITS.log_bytes


@pytest.mark.parametrize(("chars", "held"), [(10, LIMITS.ended), (2500, 2)])
async def test_the_oldest_responses_are_forgotten_beyond_the_limits(tmp_path, chars, held) -> None:
    service = await service_of(tmp_path)
    ended = [await respond(service, "x" * chars) for _ in range(5)]
    logs = [one.log for one in ended if one.log is not None]
    known = [service.background("ann", one.response["id"]) is not None for one in ended]
    assert known == [False] * (5 - held) + [True] * held
    sizes = [log.size_bytes for log in logs]
    assert sum(sizes[-held:]) <= LIMITS.ended_bytes
    assert [log.hold.size_bytes > 0 for log in logs] == known
    assert all(one.format.request is None for one in ended), "a log keeps no request in memory"
    assert held == LIMITS.ended or sum(sizes[-held - 1 :]) > LIMITS.ended_bytes
