"""The record of a request, by how the request ended."""

from typing import Any

import pytest

from gateway.auth.api_keys import ApiKey
from gateway.errors import GatewayError, NoWorker, PageRefused, RequestRefused, WorkerLost
from gateway.memory_budget import MemoryBudget
from gateway.protocols.openai import CHAT
from gateway.proxy.context import RequestContext
from gateway.routing.prefix_keys import NO_KEYS, PrefixKeys
from gateway.routing.select import Candidate, Decision, RoutingRequest
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Caller, Drafts, Inspected, Outcome, Spent, Usage
from paceline.request.profile import Endpoint, RequestProfile
from policies.document import default_policy
from tests.support.prefix_claims import system_prompt

NOW_S = 1_000_000.0
PROMPT = system_prompt()
PROFILE = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=10, max_tokens=6)
CANDIDATE = Candidate("vlm", "vlm", "mac", "policy", 0.0)
CACHED = CANDIDATE._replace(prefix_cached=True)
CALLER = Caller(client="k", key="k")


def new_context(**fields: Any) -> RequestContext:
    """Return the context of a request that has just begun."""
    values = {"request_id": "r", "wire_format": CHAT, "policy": default_policy()}
    hold = MemoryBudget().hold("k")
    return RequestContext(**{**values, "began_s": NOW_S, "hold": hold, **fields})


def routed_context(prefix: PrefixKeys = NO_KEYS, **fields: Any) -> RequestContext:
    """Return the context of a request that waited a second and that a worker has begun."""
    values = {
        "inspected": Inspected("alias", PROFILE, {}),
        "routing_request": RoutingRequest(default_policy(), PROFILE, prefix=prefix),
        "api_key": ApiKey(caller=CALLER),
        "caller": CALLER,
        "candidate": CANDIDATE,
        "begun": True,
        "attempts": 1,
        "body_read_s": NOW_S + 0.5,
        "waited_s": 1.0,
        "dispatched_at_s": NOW_S + 1.75,
    }
    return new_context(**{**values, **fields})


def finished(context: RequestContext, seconds: float = 7.0) -> RequestRecord:
    """The record of a request that ends after some seconds."""
    return context.record(NOW_S + seconds)


def test_the_record_of_a_complete_stream() -> None:
    context = routed_context(
        first_token_at_s=NOW_S + 3.0, usage=Usage(5, 5, 1), drafts=Drafts(1, 2, 1, (0, 1))
    )
    context.record_decision(Decision("greedy", (), (CANDIDATE,)))
    context.record_decision(Decision("second attempt", (), ()))
    record = finished(context)
    assert (record.request_id, record.outcome, record.status) == ("r", Outcome.COMPLETED, 200)
    assert (record.code, record.seconds, record.attempts) == ("", 7.0, 1)
    assert record.profile is PROFILE
    assert record.decision is not None
    assert record.decision.route == "greedy"
    assert (record.candidate, record.caller) == (CANDIDATE, CALLER)
    assert (record.waited_s, record.added_s) == (1.0, 0.25)
    assert (record.first_token_s, record.token_s) == (2.5, 1.0)
    assert (record.usage, record.drafts) == (Usage(5, 5, 1), Drafts(1, 2, 1, (0, 1)))
    assert record.spent == Spent(1, 10)


def test_the_record_of_a_request_rejected_before_its_body() -> None:
    context = new_context()
    context.fail(PageRefused())
    record = finished(context, 0.25)
    assert (record.outcome, record.status) == (Outcome.REFUSED, 403)
    assert (record.profile, record.decision, record.candidate) == (None, None, None)
    assert (record.added_s, record.first_token_s, record.token_s) == (None, None, None)
    assert (record.prefix, record.spent, record.seconds) == ("none", Spent(), 0.25)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestRefused("no"), Outcome.REFUSED),
        (NoWorker(), Outcome.UNSERVED),
        (WorkerLost(), Outcome.FAILED),
        (GatewayError(), Outcome.FAILED),
    ],
)
def test_an_error_decides_outcome_status_and_code(error: GatewayError, outcome: Outcome) -> None:
    context = routed_context(first_token_at_s=NOW_S + 3.0, usage=Usage(5, 5, 1))
    context.fail(error)
    record = finished(context)
    assert (record.outcome, record.status, record.code) == (outcome, error.status, error.counted_as)
    assert record.token_s is None
    assert record.spent == context.cost(error)


def test_a_disconnected_client_is_logged_as_nginx_does() -> None:
    context = routed_context()
    context.disconnect()
    record = finished(context)
    assert (record.outcome, record.status, record.code) == (Outcome.CLIENT_LEFT, 499, "")
    assert record.spent == Spent(1, 10, 10)
    assert finished(routed_context(begun=False)).spent == Spent(), "no worker began"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prefix": NO_KEYS}, "none"),
        ({}, "miss"),
        ({"candidate": CACHED}, "hit"),
        ({"usage": Usage(5, 2, 1)}, "hit"),
        ({"usage": Usage(5, 2, 0)}, "miss"),
        ({"candidate": CACHED, "usage": Usage(5, 2, cached_known=False)}, "unknown"),
    ],
)
def test_the_cache_result_is_the_expected_one_until_the_worker_reports_it(fields, expected) -> None:
    context = routed_context(**{"prefix": PROMPT, **fields})
    assert finished(context).prefix == expected
    assert (b"x-paceline-prefix", expected.encode()) in context.route_headers()


def test_response_headers_show_the_route_after_routing() -> None:
    assert new_context().route_headers() == []
    assert dict(routed_context(attempts=2).route_headers()) == {
        b"x-paceline-pool": b"vlm",
        b"x-paceline-worker": b"mac",
        b"x-paceline-reason": b"policy",
        b"x-paceline-prefix": b"none",
        b"x-paceline-attempts": b"2",
    }
