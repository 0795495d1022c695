"""The published OpenAPI: it names all that is served, and what comes is what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jsonschema_rs import validator_for
from pydantic import SecretStr
from schemathesis import APIOperation, GenerationMode
from schemathesis.checks import (
    allow_header_conformance,
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.core.result import Ok

from gateway.app import create_app
from gateway.protocols import WIRE_FORMATS
from policies.request.fields import FieldError
from policies.request.parser import KNOWN_FIELDS, read_profile
from policies.request.profile import Endpoint
from policies.request.schema import request_schema
from tests.support.gateway_routes import PAGE, PUBLIC, route_paths
from tests.support.running_gateway import RunningGateway, chat_body, make_settings
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_schema_conformance, allow_header_conformance),
]
EXAMPLES = 12
"""Of each route, good and bad ones each."""
CAN_BE_WRONG = {"parameters", "requestBody", "security"}
BODILESS = ("/cordon", "/drain")
KEYS = {"dataKey": "static-key", "adminKey": "admin-key", "joinToken": JOIN_TOKEN}


@pytest.fixture
def gateway_with_keys(tmp_path: Path, worker: ScriptedWorker) -> Iterator[RunningGateway]:
    secrets = {"api_key": SecretStr("static-key"), "admin_key": SecretStr("admin-key")}
    with RunningGateway(make_settings(tmp_path, admin_port=0, **secrets)) as gateway:
        assert gateway.send_heartbeat(worker).status_code == 200
        yield gateway


def documents(gateway: RunningGateway) -> list[tuple[str, dict[str, Any]]]:
    urls = (gateway.url, gateway.admin_url)
    return [(url, httpx.get(f"{url}/openapi.json").json()) for url in urls]


def named(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_each_port_publishes_what_it_serves(
    gateway_with_keys: RunningGateway, tmp_path: Path
) -> None:
    app = asyncio.run(create_app(make_settings(tmp_path, admin_port=0)))
    assert app.admin_app is not None
    (_, data), (_, admin) = documents(gateway_with_keys)
    relayed = {("POST", path) for path in WIRE_FORMATS}
    here = {(method, path.replace(":path", "")) for method, path in route_paths(app)} | relayed
    assert named(data) == here - PAGE
    assert named(admin) == route_paths(app.admin_app) - PAGE, "a page is for people"
    for document in (data, admin):
        for method, path, operation in operations(document):
            assert bool(operation.get("security")) == ((method, path) not in PUBLIC)
            takes_body = "requestBody" in operation
            expected = method in {"POST", "PUT", "PATCH"} and not path.endswith(BODILESS)
            assert takes_body == expected, path
            assert {"400", "421", "431"} <= set(operation["responses"])
            assert not takes_body or "413" in operation["responses"]
            assert ("401" in operation["responses"]) == bool(operation.get("security"))


def test_every_schema_that_is_pointed_to_is_there(gateway_with_keys: RunningGateway) -> None:
    for _, document in documents(gateway_with_keys):
        assert document["openapi"].startswith("3.1")
        pointed = set(pointers(document))
        assert pointed <= {
            f"#/components/schemas/{name}" for name in document["components"]["schemas"]
        }
        assert "HTTPValidationError" not in json.dumps(document)


def pointers(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from pointers(one)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 40), st.floats(-3, 3), st.text(max_size=3)
)
FIELDS = st.dictionaries(
    st.sampled_from(sorted(KNOWN_FIELDS[Endpoint.CHAT] - {"messages", "model"})), VALUES, max_size=2
)


CHAT_SCHEMA = validator_for(request_schema(Endpoint.CHAT))


@given(fields=FIELDS)
def test_what_the_reader_takes_its_schema_takes(fields: dict[str, Any]) -> None:
    body = {**chat_body(), **fields}
    try:
        read_profile(body, Endpoint.CHAT)
    except FieldError:
        return
    CHAT_SCHEMA.validate(body)


@pytest.mark.parametrize("endpoint", Endpoint)
def test_the_schema_of_a_body_names_every_field_and_its_bounds(endpoint: Endpoint) -> None:
    schema = request_schema(endpoint)
    assert set(schema["properties"]) == KNOWN_FIELDS[endpoint]
    assert schema["properties"]["n"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 16}
    valid = validator_for(schema).is_valid
    assert not valid({"model": "m", "messages": [{"role": "user"}], "prompt": "x"})
    assert not valid({"model": ""})


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("door", ["data", "admin"])
def test_whatever_is_sent_the_answer_is_one_that_is_published(
    gateway_with_keys: RunningGateway, worker: ScriptedWorker, door: str, mode: GenerationMode
) -> None:
    url = gateway_with_keys.url if door == "data" else gateway_with_keys.admin_url
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()
        told = operation.definition.raw
        if mode is GenerationMode.NEGATIVE and told.keys().isdisjoint(CAN_BE_WRONG):
            continue
        if told["responses"].get("200", {}).get("content", {}).keys() == {"text/event-stream"}:
            continue  # it has no end to wait for
        gateway_with_keys.send_heartbeat(worker)  # a worker that is silent for seconds is out
        prove(operation, mode)


def prove(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> None:
    """Ask one route, with the kind of key that it says it needs."""
    security = operation.definition.raw.get("security") or [{}]
    kind = next(iter(security[0]), "")
    shown = {"Authorization": f"Bearer {KEYS[kind]}"} if kind else {}

    @seed(5)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def published(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(headers=shown, checks=CHECKS, timeout=30)

    published()
