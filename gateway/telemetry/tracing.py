"""OpenTelemetry traces: one span for each request and one for each attempt at a worker.

Attributes follow OpenTelemetry's conventions: HTTP for the request, `gen_ai` for an attempt. W3C's
`traceparent` continues the client's trace and is passed on to the worker. Spans contain no other
text of a client. This module needs the extra `otel` and is imported only if traces are enabled.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from gateway.http.downstream import header
from gateway.routing.select import Candidate
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Outcome
from paceline.request.profile import GENERATING, Endpoint, RequestProfile

_OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.RERANK: "rerank",
}
_CONTEXT_HEADERS = ("traceparent", "tracestate")
_SHUTDOWN_TIMEOUT_S = 3.0
_PROPAGATOR = TraceContextTextMapPropagator()


class Traces:
    """Async context that exports spans; `OTEL_*` configures endpoint, headers and sampler."""

    def __init__(self) -> None:
        service = {} if os.getenv("OTEL_SERVICE_NAME") else {"service.name": "paceline-gateway"}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("paceline.gateway")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # A daemon thread: an unreachable collector must not delay the end of the process.
        shutdown = threading.Thread(target=self._provider.shutdown, daemon=True)
        shutdown.start()
        await asyncio.to_thread(shutdown.join, _SHUTDOWN_TIMEOUT_S)

    def begin(self, scope: Scope) -> Trace:
        """Start the span of a request, within the client's trace if it sent one."""
        values = {name: header(scope, name.encode()) for name in _CONTEXT_HEADERS}
        carrier = {name: value.decode("latin-1") for name, value in values.items() if value}
        span = self._tracer.start_span(
            f"POST {scope['path']}",
            context=_PROPAGATOR.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": scope["path"]},
        )
        return Trace(self._tracer, span)


class Trace:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._attempt: Span | None = None

    def attempt(self, profile: RequestProfile, candidate: Candidate) -> dict[str, str]:
        """Start the next attempt and end the last; return the headers for the worker."""
        if self._attempt is not None:
            self._attempt.set_status(Status(StatusCode.ERROR))
            self._attempt.end()
        operation = _OPERATIONS[profile.endpoint]
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": profile.model,
            "paceline.worker": candidate.worker_id,
            "paceline.lane": candidate.lane,
        }
        if profile.endpoint in GENERATING:
            attributes |= _generation(profile)
        self._attempt = self._tracer.start_span(
            f"{operation} {profile.model}",
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, set_span_in_context(self._attempt))
        return headers

    def end(self, record: RequestRecord) -> None:
        """End all spans with the result of the request."""
        if self._attempt is not None:
            _set_result(self._attempt, record)
            self._attempt.set_attributes(_usage(record))
            self._attempt.end()
        _set_result(self._span, record)
        self._span.set_attributes(_routing(record))
        self._span.end()


def _generation(profile: RequestProfile) -> dict[str, str | int | float | bool]:
    """Return what a request asks of the text that a model generates."""
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.stream": profile.stream,
        "gen_ai.request.choice.count": profile.prompts * profile.choices,
        "gen_ai.request.temperature": profile.sampling.temperature,
        "gen_ai.request.top_p": profile.sampling.top_p,
        "gen_ai.request.top_k": profile.sampling.top_k,
    }
    if profile.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = profile.max_tokens
    return attributes


def _set_result(span: Span, record: RequestRecord) -> None:
    if record.code:
        span.set_attribute("error.type", record.code)
    if record.outcome in (Outcome.FAILED, Outcome.UNSERVED):
        span.set_status(Status(StatusCode.ERROR))


def _routing(record: RequestRecord) -> dict[str, str | int | float]:
    """Return where the request was routed, and why."""
    attributes: dict[str, str | int | float] = {
        "http.response.status_code": record.status,
        "paceline.request": record.request_id,
        "paceline.outcome": record.outcome.value,
        "paceline.prefix": record.prefix,
        "paceline.attempts": record.attempts,
        "paceline.failovers": record.failovers,
        "paceline.wait_s": record.waited_s,
    }
    if record.missed_reuse:
        attributes["paceline.not_reused"] = record.missed_reuse
    if record.decision is not None and record.candidate is not None:
        attributes |= {
            "paceline.route": record.decision.route,
            "paceline.pool": record.candidate.pool,
            "paceline.reason": record.candidate.reason,
        }
    if record.added_s is not None:
        attributes["paceline.added_latency_s"] = record.added_s
    return attributes


def _usage(record: RequestRecord) -> dict[str, int | float]:
    """Return the counts that the worker reported."""
    attributes: dict[str, int | float] = {
        "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": record.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.usage.cached_tokens,
    }
    if record.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    if record.drafts is not None:
        attributes |= {
            "paceline.drafts": record.drafts.steps,
            "paceline.drafted_tokens": record.drafts.drafted,
            "paceline.accepted_tokens": record.drafts.accepted,
        }
    return attributes
