"""The published OpenAPI documents list all routes, and responses conform to them."""

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
from gateway.protocols import PROXY_PATHS
from paceline.request.fields import FieldError
from paceline.request.parser import read_profile
from paceline.request.profile import Endpoint
from paceline.request.schema import request_schema
from paceline.request.wires import HONOURED, IGNORED, IGNORED_ON, NEUTRAL, Wire
from tests.support.gateway_fixtures import MakeGateway
from tests.support.gateway_routes import PAGE, PUBLIC, route_paths
from tests.support.running_gateway import RunningGateway, chat_body, make_settings
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker

CHECKS = [
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_schema_conformance, allow_header_conformance),
]
INVALIDATABLE = {"parameters", "requestBody", "security"}
ROUTES_WITHOUT_BODY = ("/cordon", "/drain", "/cancel", "/compact", "/rotate", "/code")
KEYS = {"dataKey": "static-key", "adminKey": "admin-key", "joinToken": JOIN_TOKEN}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_each_port_documents_the_routes_that_it_serves_and_every_schema_that_they_name(
    tmp_path: Path,
) -> None:
    app = asyncio.run(create_app(make_settings(tmp_path, admin_port=0)))
    assert app.admin_app is not None
    with RunningGateway(make_settings(tmp_path, admin_port=0)) as gateway:
        data, admin = (
            httpx.get(f"{url}/openapi.json", timeout=60).json()
            for url in (gateway.url, gateway.admin_url)
        )
    relayed = {("POST", path) for path in PROXY_PATHS}
    served = route_paths(app) | relayed
    for document, found in ((data, served), (admin, route_paths(app.admin_app))):
        routes = {(method, path.replace(":path", "")) for method, path in found - PAGE}
        documented = {(method, path) for method, path, _ in operations(document)}
        assert documented == routes, "pages are not part of the API"
        for method, path, operation in operations(document):
            assert bool(operation.get("security")) == ((method, path) not in PUBLIC)
            has_body = "requestBody" in operation
            takes_body = method in {"POST", "PUT", "PATCH"} and not path.endswith(
                ROUTES_WITHOUT_BODY
            )
            assert has_body == takes_body, path
            assert {"400", "421", "431"} <= set(operation["responses"])
            assert not has_body or "413" in operation["responses"]
            assert ("401" in operation["responses"]) == bool(operation.get("security"))
        assert document["openapi"].startswith("3.1")
        defined = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
        assert set(references(document)) <= defined
        assert "HTTPValidationError" not in json.dumps(document)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


FIELDS = st.dictionaries(
    st.sampled_from(sorted((HONOURED[Wire.CHAT] | NEUTRAL.keys()) - {"messages", "model"})),
    st.none() | st.booleans() | st.integers(-5, 40) | st.floats(-3, 3) | st.text(max_size=3),
    max_size=2,
)
CHAT_SCHEMA = validator_for(request_schema(Wire.CHAT))


@given(fields=FIELDS)
def test_the_schema_accepts_every_body_that_the_parser_accepts(fields: dict[str, Any]) -> None:
    body = {**chat_body(), **fields}
    try:
        read_profile(body, Endpoint.CHAT)
    except FieldError:
        return
    CHAT_SCHEMA.validate(body)


@pytest.mark.parametrize(
    ("wire", "name", "high"),
    [
        (Wire.CHAT, "n", 16),
        (Wire.COMPLETIONS, "n", 16),
        (Wire.EMBEDDINGS, "dimensions", 65_536),
        (Wire.RERANK, "top_n", 2**31 - 1),
        (Wire.RESPONSES, "max_tool_calls", 2**31 - 1),
        (Wire.MESSAGES, "max_tokens", 2**31 - 1),
    ],
)
def test_the_schema_of_a_body_lists_every_field_and_its_bounds(wire, name, high) -> None:
    schema = request_schema(wire)
    assert set(schema["properties"]) == HONOURED[wire].union(IGNORED, IGNORED_ON[wire], NEUTRAL)
    bounds = {"minimum": 1, "maximum": high}
    assert schema["properties"][name] == {"type": ["integer", "null"], **bounds}
    valid = validator_for(schema).is_valid
    assert not valid({"model": "m", "messages": [{"role": "user"}], "prompt": "x"})
    assert not valid({"model": ""})


@pytest.mark.parametrize("examples", [2, pytest.param(30, marks=pytest.mark.proof)])
@pytest.mark.parametrize("port", ["data", "admin"])
def test_valid_and_invalid_requests_get_documented_responses(
    make_gateway: MakeGateway, worker: ScriptedWorker, port: str, examples: int
) -> None:
    """A few requests of each kind to each route; the proof sends more."""
    gateway = make_gateway(
        worker, admin_port=0, api_key=SecretStr("static-key"), admin_key=SecretStr("admin-key")
    )
    url = gateway.url if port == "data" else gateway.admin_url
    for result in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        definition = operation.definition.raw
        answer = definition["responses"].get("200", {}).get("content", {})
        if answer.keys() == {"text/event-stream"}:
            continue  # the stream never ends
        # A worker without heartbeats leaves the pool within seconds.
        gateway.join(worker)
        check_operation(operation, GenerationMode.POSITIVE, examples)
        if definition.keys() & INVALIDATABLE:
            check_operation(operation, GenerationMode.NEGATIVE, examples)


def check_operation(
    operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode, examples: int
) -> None:
    """Send generated requests to one route with the kind of key that its document requires."""
    security = operation.definition.raw.get("security") or [{}]
    kind = next(iter(security[0]), "")
    headers = {"Authorization": f"Bearer {KEYS[kind]}"} if kind else {}

    @seed(5)
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def conforms(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(headers=headers, checks=CHECKS, timeout=30)

    conforms()
    conforms()
