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
_Attributes = dict[str, str | float | None]
"""None: unknown."""
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
        attributes: _Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": profile.model,
            "paceline.worker": candidate.worker_id,
            "paceline.lane": candidate.lane,
        }
        if profile.endpoint in GENERATING:
            attributes |= {
                "gen_ai.request.stream": profile.stream,
                "gen_ai.request.choice.count": profile.prompts * profile.choices,
                "gen_ai.request.temperature": profile.sampling.temperature,
                "gen_ai.request.top_p": profile.sampling.top_p,
                "gen_ai.request.top_k": profile.sampling.top_k,
                "gen_ai.request.max_tokens": profile.max_tokens,
            }
        self._attempt = self._tracer.start_span(
            f"{operation} {profile.model}",
            context=set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=_known(attributes),
        )
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, set_span_in_context(self._attempt))
        return headers

    def end(self, record: RequestRecord) -> None:
        """End all spans with the result of the request."""
        usage, drafts = record.usage, record.drafts
        of_attempt: _Attributes = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.time_to_first_chunk": record.first_token_s,
            "paceline.drafts": drafts and drafts.steps,
            "paceline.drafted_tokens": drafts and drafts.drafted,
            "paceline.accepted_tokens": drafts and drafts.accepted,
        }
        routed = record.candidate if record.decision else None
        of_request: _Attributes = {
            "http.response.status_code": record.status,
            "paceline.request": record.request_id,
            "paceline.outcome": record.outcome.value,
            "paceline.prefix": record.prefix,
            "paceline.attempts": record.attempts,
            "paceline.failovers": record.failovers,
            "paceline.wait_s": record.waited_s,
            "paceline.not_reused": record.missed_reuse or None,
            "paceline.route": record.decision and record.decision.route if routed else None,
            "paceline.pool": routed and routed.pool,
            "paceline.reason": routed and routed.reason,
            "paceline.added_latency_s": record.added_s,
        }
        for span, attributes in ((self._attempt, of_attempt), (self._span, of_request)):
            if span is None:
                continue
            span.set_attributes(_known({**attributes, "error.type": record.code or None}))
            if record.outcome in (Outcome.FAILED, Outcome.UNSERVED):
                span.set_status(Status(StatusCode.ERROR))
            span.end()


def _known(attributes: _Attributes) -> dict[str, str | float]:
    """Return the attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}
