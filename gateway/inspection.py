"""Turn the bytes of a request into what is decided on and what is sent on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from gateway.errors import BodyNotJson, FieldInvalid, ModelUnknown
from gateway.protocols.openai import normalise
from gateway.routing.view import FleetView
from gateway.types import Inspected
from policies.bounds import bounded
from policies.document import PolicyDocument
from policies.evaluate import resolve_model, sampling_defaults
from policies.request.fields import FieldError
from policies.request.parser import read_profile
from policies.request.profile import Endpoint, RequestProfile


def inspect(raw: bytes, endpoint: Endpoint, policy: PolicyDocument, fleet: FleetView) -> Inspected:
    """Read a body into its profile and its form for workers; raise a `RequestRefused`."""
    body = parse(raw)
    asked = body.get("model")
    served = fleet.served_models
    model = asked if not isinstance(asked, str) else resolve_model(policy, asked, served)
    defaults = sampling_defaults(policy, model if isinstance(model, str) else "")
    try:
        profile = bounded(read_profile(body, endpoint, defaults), policy.limits, policy.media)
    except FieldError as wrong:
        raise FieldInvalid(wrong.message, param=wrong.param) from None
    asked_model = profile.model
    if model != asked_model:
        profile = profile._replace(model=str(model))
    known = profile.model in fleet.known_models or profile.model in policy.models
    # An empty fleet knows no names yet, so it cannot call one unknown.
    if not known and fleet.known_models:
        raise ModelUnknown(asked_model)
    return Inspected(asked_model=asked_model, profile=profile, body=_for_worker(body, profile))


def parse(raw: bytes) -> dict[str, Any]:
    """Parse one strict JSON object: UTF-8, no NaN, no infinity, bounded depth."""
    try:
        # Never pass the client's own bytes on: a key that stands twice would mean one thing here
        # and another there. What is sent is always written from this parse.
        body = from_json(raw, allow_inf_nan=False)
    except ValueError:
        raise BodyNotJson from None
    if not isinstance(body, dict):
        raise BodyNotJson
    return body


def _for_worker(body: Mapping[str, Any], profile: RequestProfile) -> dict[str, Any]:
    """Write the body that a worker gets: nothing in it is left to an engine's own default."""
    # Explicit nulls mean "absent" to us, and strict engines refuse them.
    sent = {name: value for name, value in body.items() if value is not None}
    sampling = profile.sampling
    sent |= {
        "model": profile.model,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    if profile.max_tokens is not None and "max_completion_tokens" not in sent:
        sent["max_tokens"] = profile.max_tokens
    if profile.endpoint is Endpoint.CHAT:
        sent["messages"] = normalise(body["messages"])
    if profile.stream:
        # Always asked for, so that every request is accounted; hidden again from who did not ask.
        sent["stream_options"] = {"include_usage": True}
    return sent
