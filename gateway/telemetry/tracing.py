"""Traces: a span of each request and one of each attempt at a worker, sent to a collector.

Their names are OpenTelemetry's (HTTP for the request, `gen_ai` for an attempt). A trace that the
client began goes on here, and by W3C's `traceparent` in a worker that traces (ours does not yet).
Nothing else of what a client wrote is in a span. Needs the extra `otel`; whoever asks for no
traces never imports this.
"""

from __future__ import annotations

import asyncio
import os
import threading
from types import TracebackType
from typing import Self

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.http.downstream import Scope, header
from gateway.routing.select import Candidate
from gateway.telemetry.request_record import RequestRecord
from gateway.types import Outcome
from policies.request.profile import Endpoint, RequestProfile

_OPERATIONS = {Endpoint.CHAT: "chat", Endpoint.COMPLETIONS: "text_completion"}
_CONTEXT_HEADERS = ("traceparent", "tracestate")
_LAST_WORDS_S = 3.0
"""So long the end of the gateway waits for spans that are not sent yet."""


class Traces:
    """Where spans go: an async context. Endpoint, headers and sampler come from `OTEL_*`."""

    def __init__(self) -> None:
        service = {} if os.getenv("OTEL_SERVICE_NAME") else {"service.name": "paceline-gateway"}
        self._provider = TracerProvider(resource=Resource.create(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("paceline.gateway")
        self._context = TraceContextTextMapPropagator()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A thread of its own that nobody waits for: a collector that is away must not hold us up.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, _LAST_WORDS_S)

    def begin(self, scope: Scope) -> Trace:
        """Begin the span of a request, within the client's trace where it has one."""
        given = {name: header(scope, name.encode()) for name in _CONTEXT_HEADERS}
        carrier = {name: value.decode("latin-1") for name, value in given.items() if value}
        span = self._tracer.start_span(
            f"POST {scope['path']}",
            context=self._context.extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "url.path": scope["path"]},
        )
        return Trace(self, span)

    def attempt(self, parent: Span, profile: RequestProfile, candidate: Candidate) -> Span:
        """Begin the span of one attempt at a worker."""
        operation = _OPERATIONS[profile.endpoint]
        attributes: dict[str, str | int | float | bool] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": profile.model,
            "gen_ai.request.stream": profile.stream,
            "gen_ai.request.choice.count": profile.choices,
            "gen_ai.request.temperature": profile.sampling.temperature,
            "gen_ai.request.top_p": profile.sampling.top_p,
            "gen_ai.request.top_k": profile.sampling.top_k,
            "paceline.worker": candidate.worker_id,
            "paceline.lane": candidate.lane,
        }
        if profile.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = profile.max_tokens
        return self._tracer.start_span(
            f"{operation} {profile.model}",
            context=set_span_in_context(parent),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )

    def headers(self, span: Span) -> dict[str, str]:
        """Say to a worker which span its own would be within."""
        carrier: dict[str, str] = {}
        self._context.inject(carrier, set_span_in_context(span))
        return carrier


class Trace:
    """The spans of one request."""

    def __init__(self, traces: Traces, span: Span) -> None:
        self._traces = traces
        self._span = span
        self._attempt: Span | None = None

    def attempt(self, profile: RequestProfile, candidate: Candidate) -> dict[str, str]:
        """Begin the next attempt; return the headers for its worker."""
        if self._attempt is not None:
            self._attempt.set_status(Status(StatusCode.ERROR))
            self._attempt.end()
        self._attempt = self._traces.attempt(self._span, profile, candidate)
        return self._traces.headers(self._attempt)

    def end(self, served: RequestRecord) -> None:
        """End all spans with what became of the request."""
        if self._attempt is not None:
            _close(self._attempt, served)
            self._attempt.set_attributes(_usage(served))
            self._attempt.end()
        _close(self._span, served)
        self._span.set_attributes(_way(served))
        self._span.end()


def _close(span: Span, served: RequestRecord) -> None:
    if served.code:
        span.set_attribute("error.type", served.code)
    if served.outcome in (Outcome.FAILED, Outcome.UNSERVED):
        span.set_status(Status(StatusCode.ERROR))


def _way(served: RequestRecord) -> dict[str, str | int | float]:
    """Say where a request went and why."""
    told: dict[str, str | int | float] = {
        "http.response.status_code": served.status,
        "paceline.request": served.request_id,
        "paceline.outcome": served.outcome.value,
        "paceline.prefix": served.prefix,
        "paceline.attempts": served.attempts,
        "paceline.waited_s": served.waited_s,
    }
    if served.decision is not None and served.candidate is not None:
        told |= {
            "paceline.route": served.decision.route,
            "paceline.pool": served.candidate.pool,
            "paceline.reason": served.candidate.reason,
        }
    if served.added_s is not None:
        told["paceline.added_s"] = served.added_s
    return told


def _usage(served: RequestRecord) -> dict[str, int | float]:
    """Say what a worker has counted."""
    told: dict[str, int | float] = {
        "gen_ai.usage.input_tokens": served.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": served.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": served.usage.cached_tokens,
    }
    if served.first_token_s is not None:
        told["gen_ai.response.time_to_first_chunk"] = served.first_token_s
    if served.drafts is not None:
        told |= {
            "paceline.drafts": served.drafts.steps,
            "paceline.drafted_tokens": served.drafts.drafted,
            "paceline.accepted_tokens": served.drafts.accepted,
        }
    return told
