"""Kept responses: how much of them one request may go on from."""

from typing import Any

import pytest

from gateway.errors import FieldInvalid, PreviousUnknown
from gateway.inspection_thread import InspectionThread
from gateway.memory_budget import MemoryBudget
from gateway.protocols.responses import ResponsesFormat
from gateway.protocols.responses.request import ResponsesRequest
from gateway.protocols.sealing import Sealer
from gateway.responses import kept_items
from gateway.responses.kept_items import KeptItems, new_id
from gateway.state.expiring import MemoryRecords
from tests.support.fake_clock import FakeClock


def request(text: str, **fields: Any) -> ResponsesRequest:
    body = {"model": "m", "input": text, **fields}
    return ResponsesFormat("resp_1", Sealer(b"x"), lambda: 0.0).read(body)


async def keep(kept: KeptItems, given: ResponsesRequest, status: str = "completed") -> str:
    """Keep a response to a request, after what it goes on from; return its id."""
    _, after = await kept.open("ann", given)
    response = {"id": new_id("resp"), "status": status, "conversation": None}
    response["previous_response_id"] = given.previous_id or None
    assert await kept.keep_response("ann", response, given, [], after)
    return str(response["id"])


async def test_a_request_goes_on_from_conversations_within_a_limit(monkeypatch) -> None:
    memory = MemoryBudget()
    kept = KeptItems(
        MemoryRecords(FakeClock(), memory), lambda: 0.0, InspectionThread(), memory.hold("ann")
    )
    first = await keep(kept, request("one"))
    second = await keep(kept, request("two", previous_response_id=first))
    then = request("three", previous_response_id=second)
    items, _ = await kept.open("ann", then)
    assert [item["content"] for item in items] == ["one", "two"]
    monkeypatch.setattr(kept_items, "_HISTORY_LIMIT_BYTES", 100)
    with pytest.raises(FieldInvalid):
        await kept.open("ann", then)


async def test_a_request_does_not_go_on_from_a_response_that_has_not_ended() -> None:
    memory = MemoryBudget()
    kept = KeptItems(
        MemoryRecords(FakeClock(), memory), lambda: 0.0, InspectionThread(), memory.hold("ann")
    )
    running = await keep(kept, request("one"), status="in_progress")
    for name in (running, new_id("resp"), "resp_../x"):
        with pytest.raises(PreviousUnknown):
            await kept.open("ann", request("two", previous_response_id=name))
