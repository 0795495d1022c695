"""How much a gateway holds of responses in the background, and how a larger one ends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.app import create_app
from gateway.http.downstream import CancelScope, EventWriter
from gateway.memory_budget import MemoryBudget
from gateway.protocols.openai import InspectionContext
from gateway.responses import exchange as exchanges
from gateway.responses.exchange import ResponseExchange, ResponsesService
from gateway.routing.view import FleetView
from gateway.state.expiring import TTL_S
from policies.document import PolicyDocument
from tests.support.fake_clock import FakeClock
from tests.support.maker_types import read_event
from tests.support.policies import single_pool_policy
from tests.support.running_gateway import make_settings

BODY = {"model": "m", "input": "Hi", "background": True}
LIMITS = {"LOG_LIMIT_BYTES": 20_000, "ENDED_LIMIT": 3, "ENDED_LIMIT_BYTES": 40_000}
REQUEST: Any = None
POLICY = PolicyDocument.model_validate(single_pool_policy())
CONTEXT = InspectionContext(POLICY, FleetView.of((), frozenset()))


@pytest.fixture
async def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResponsesService:
    app = await create_app(make_settings(tmp_path))
    for name, limit in LIMITS.items():
        monkeypatch.setattr(exchanges, name, limit)
    return ResponsesService(app.gateway)


class Client(EventWriter):
    """A client that stays, and reads nothing."""

    def attach(self, cancel_scope: CancelScope | None) -> None:
        pass


async def respond(service: ResponsesService, *texts: str) -> ResponseExchange:
    """Answer a request in the background with these pieces, as the handler does; wait to end it."""
    exchange = service.exchange()
    hold = MemoryBudget().hold("ann")
    await exchange.open(BODY, "ann", hold, 0)
    exchange.inspect(BODY, CONTEXT)
    client: Any = Client("req-1", lambda _: None)
    writer: EventWriter = client
    try:
        with CancelScope(client) as cancel_scope:
            writer = await exchange.writer(client, cancel_scope)
            encoder = exchange.encoder(REQUEST)
            for text in texts:
                choice = {"index": 0, "delta": {"content": text}}
                frame = {"id": "c", "model": "m", "choices": [choice]}
                writer.write(encoder.event(b"", frame))
                await asyncio.sleep(0)
            last = encoder.done()
            writer.end(last + await exchange.finish())
    except errors.GatewayError as error:
        await writer.fail(error, (), exchange)
    finally:
        await exchange.close()
    return exchange


def events_of(exchange: ResponseExchange) -> list[Any]:
    assert exchange.log is not None
    events = [json.loads(one.split(b"data: ")[1]) for one in exchange.log.events]
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    for event in events:
        read_event(event)
    return events


async def test_a_response_in_the_background_leaves_memory_a_day_after_its_end(
    service, monkeypatch
) -> None:
    """Its events too, whether its owner returns or not."""
    clock = FakeClock()
    monkeypatch.setattr(service.gateway, "clock", clock)
    exchange = await respond(service, "one")
    clock.now_s += TTL_S - 1
    await service.check()
    assert service.background("ann", exchange.response_id) is exchange
    clock.now_s += 1
    await service.check()
    assert service.background("ann", exchange.response_id) is None
    assert exchange.log is not None
    assert exchange.log.hold.size_bytes == 0


def test_the_limits_are_those_that_the_page_on_errors_names() -> None:
    limits = [getattr(exchanges, name) for name in LIMITS]
    assert limits == [32 << 20, 256, 128 << 20]


async def test_a_response_beyond_the_limit_of_its_events_fails_unless_it_is_its_end_alone(
    service: ResponsesService,
) -> None:
    """No event is lost on the way to its end."""
    exchange = await respond(service, *["word " * 200] * 40)
    *_, error, failed = events_of(exchange)
    assert (error["code"], failed["type"]) == ("response_too_large", "response.failed")
    assert exchange.builder.response["status"] == "failed"
    kept = service.kept(MemoryBudget().hold("ann"))
    record = await kept.get("Response", "ann", exchange.builder.response["id"])
    assert record["response"]["status"] == "failed"
    exchange = await respond(service, "word " * 1600)
    assert events_of(exchange)[-1]["type"] == "response.completed"
    assert exchange.log is not None
    assert exchange.log.size_bytes > LIMITS["LOG_LIMIT_BYTES"]


@pytest.mark.parametrize(("chars", "held"), [(10, 3), (2500, 2)])
async def test_the_oldest_responses_are_forgotten_beyond_the_limits(service, chars, held) -> None:
    ended = [await respond(service, "x" * chars) for _ in range(5)]
    logs = [one.log for one in ended if one.log is not None]
    known = [service.background("ann", one.builder.response["id"]) is not None for one in ended]
    assert known == [False] * (5 - held) + [True] * held
    sizes = [log.size_bytes for log in logs]
    assert sum(sizes[-held:]) <= LIMITS["ENDED_LIMIT_BYTES"]
    assert [log.hold.size_bytes > 0 for log in logs] == known
    assert all(one.request is None for one in ended), "a log keeps no request in memory"
    assert held == 3 or sum(sizes[-held - 1 :]) > LIMITS["ENDED_LIMIT_BYTES"]
