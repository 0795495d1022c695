"""The wire format of an OpenAI server: chat, completions, embeddings, and rerank as vLLM has it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from gateway import errors
from gateway.memory_budget import MemoryHold
from gateway.protocols.base import StreamEncoder, object_in
from gateway.protocols.documents import NO_DOCUMENTS, Document, Readable, pdfs_in
from gateway.protocols.history import BETWEEN_TEXTS, readable
from gateway.protocols.legacy_functions import as_function_call, with_tools
from gateway.routing.features import MEDIA
from gateway.routing.select import RoutingRequest
from gateway.routing.view import FleetView
from gateway.strict_json import ITEMS_LIMIT, encode_json, objects_of
from gateway.types import NO_CALLER, Caller, Header, Headers, Inspected, Json, LimitState
from paceline.protocol import RUNNING_USAGE_TOKENS
from paceline.request.content import CONTINUES
from paceline.request.fields import CACHE_SALT, FieldError, read_cache_salt
from paceline.request.parser import USAGE_INTERVAL, read_profile
from paceline.request.profile import GENERATING, Endpoint, RequestProfile
from paceline.request.wires import UNSENT, canonical
from policies.document import PolicyDocument
from policies.evaluate import resolve_model, sampling_defaults
from policies.sections import apply_limits

Message = Mapping[str, Any]
_MERGING_ROLES = frozenset(("user", "assistant"))
_RUNNING_USAGE = {"include_usage": True, "continuous_usage_stats": True}
_EXPLICIT = ("temperature", "top_p", "top_k", "min_p")
_SYSTEM_ROLES = frozenset(("system", "developer"))
ANSWER_FIELDS = {
    Endpoint.CHAT: "choices",
    Endpoint.COMPLETIONS: "choices",
    Endpoint.EMBEDDINGS: "data",
    Endpoint.RERANK: "results",
}
"""The lists without which no answer is whole."""


class InspectionContext(NamedTuple):
    """The context for the inspection of a body."""

    policy: PolicyDocument
    fleet: FleetView
    documents: Mapping[str, Document] = NO_DOCUMENTS
    caller: Caller = NO_CALLER

    def reading(self, model: object) -> Readable:
        """Return the media that the workers of a model can read and the policy allows."""
        policy, fleet = self.policy, self.fleet
        kinds, limits = frozenset(policy.media.kinds), (policy.media.pictures, policy.media.pixels)
        if not isinstance(model, str):
            return Readable(kinds, self.documents, *limits)
        served = fleet.models_of(Endpoint.CHAT)
        model = resolve_model(policy, model, served)
        if not fleet.takes_all:
            kinds = frozenset(kind for kind in kinds if fleet.takes(model, MEDIA[kind]))
        inside = model in served - fleet.untold
        return Readable(kinds, self.documents, *limits, system_inside=inside)

    def scope(self, body: Mapping[str, Any]) -> str:
        """Return the isolation scope of a body; raise `FieldError`."""
        return self.policy.prefix.scope(self.caller.key, self.caller.team, read_cache_salt(body))


class WireFormat:
    """The format in which clients send requests to one path: by default that of an OpenAI server.

    Workers are called in that format. A wire format reads the body of a client into a request for
    them, and encodes their response, whole or as a stream of events, and every error.
    """

    finishes = False
    """The last bytes of an answer come from `finish`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        """The endpoint of the worker that generates the response."""

    async def open(
        self, body: dict[str, Any], owner: str, hold: MemoryHold, size_bytes: int
    ) -> int:
        """Read the items that a parsed body of this size continues; return the size of all.

        Raise a `RequestRefused`.
        """
        return size_bytes

    async def writer(self, client: Any, cancel_scope: Any) -> Any:
        """Return the writer of the answer's events: to the client, or to a log."""
        return client

    async def finish(self) -> bytes:
        """Return the last bytes of an answer that is complete now."""
        return b""

    async def close(self) -> None:
        """End the request, however it has ended."""

    def pdfs(self, body: Mapping[str, Any]) -> tuple[object, tuple[str, ...]]:
        """Return the name of the model in a body, and the base64 text of each PDF."""
        if self.endpoint is not Endpoint.CHAT or not _has_parts(body.get("messages")):
            return None, ()
        return body.get("model"), tuple(pdfs_in(body["messages"]))

    def inspect(self, body: Mapping[str, Any], context: InspectionContext) -> Inspected:
        """Return the profile of a body and the body for workers; raise a `RequestRefused`."""
        try:
            return self._inspect(body, context)
        except FieldError as error:
            raise errors.FieldInvalid(error.message, param=error.param) from None

    def _inspect(self, body: Mapping[str, Any], context: InspectionContext) -> Inspected:
        """Do the same; raise a `RequestRefused` or a `FieldError`."""
        messages = body.get("messages")
        if isinstance(messages, list) and len(messages) > ITEMS_LIMIT:
            raise FieldError("messages", f"'messages' may have at most {ITEMS_LIMIT} messages.")
        return self._inspect_openai(body, context)

    def _inspect_openai(self, body: Mapping[str, Any], context: InspectionContext) -> Inspected:
        """Inspect a body in OpenAI's format; others were translated, within bounds of their own."""
        policy, fleet = context.policy, context.fleet
        requested = body.get("model")
        served = fleet.models_of(self.endpoint)
        model = resolve_model(policy, requested, served) if isinstance(requested, str) else ""
        legacy = self.endpoint is Endpoint.CHAT and bool(body.get("functions"))
        if legacy or _has_function_messages(body.get("messages")):
            body = with_tools(body)
        replaced: tuple[str, ...] = ()
        if _has_parts(body.get("messages")):
            body, replaced = readable(body, context.reading(requested))
        defaults = sampling_defaults(policy, model, fleet.sampling)
        rules = policy.models.get(model)
        exact = rules is not None and rules.exact
        profile = read_profile(body, self.endpoint, defaults, exact=exact)
        profile = apply_limits(profile, policy.limits, policy.media)
        asked_model = profile.model
        if replaced or legacy or model != asked_model:
            profile = profile._replace(replaced=replaced, legacy_functions=legacy, model=model)
        known = profile.model in fleet.known_models or profile.model in policy.models
        # Before any worker has joined, no model is known, so none can be called unknown.
        if not known and fleet.known_models:
            raise errors.ModelUnknown(asked_model)
        if profile.model not in served and (others := fleet.endpoints_of(profile.model)):
            raise errors.ModelUnsuited(asked_model, self.endpoint, others)
        in_place = profile.model in served - fleet.untold
        sent = _for_worker(body, profile, in_place=in_place)
        salt = sent.pop(CACHE_SALT, "")  # engines get the name of the isolation scope
        return Inspected(asked_model=asked_model, profile=profile, body=sent, cache_salt=salt)

    def is_complete(self, answer: Mapping[str, Any]) -> bool:
        """Return whether a body of status 200 is a whole answer: some engines send errors so."""
        return bool(answer.get(ANSWER_FIELDS[self.endpoint]))

    def encode(self, request: RoutingRequest, answer: Json, body: bytes) -> bytes:
        """Return the client's body for a whole answer, which is `body` parsed.

        It is the body as it came, without metrics that the client is not to get. Formats that
        translate it raise `AnswerMalformed`.
        """
        changed = "metrics" in answer and not _includes_metrics(request, usage=True)
        if changed:
            del answer["metrics"]
        if request.profile.legacy_functions:
            changed |= as_function_call(answer.get("choices"), "message")
        return encode_json(answer) if changed else body

    def encoder(
        self, request: RoutingRequest, late_headers: Sequence[Header] = ()
    ) -> StreamEncoder:
        """Return the encoder of a stream, which puts headers that its head lacks into its end."""
        include_metrics = _includes_metrics(request, usage=request.profile.include_usage)
        return OpenAIStreamEncoder(request.profile, late_headers, include_metrics=include_metrics)

    def response_headers(self, request_id: str) -> Headers:
        """Return headers of every response, errors too, that other formats lack."""
        return []

    def limit_headers(self, states: Iterable[LimitState], unix_s: float) -> Headers:
        """Return the headers with the rest of a client's limits at this time."""
        headers: Headers = []
        for unit, limit, remaining, full_in_s in states:
            headers += [
                (b"x-ratelimit-limit-" + unit.encode(), b"%d" % limit),
                (b"x-ratelimit-remaining-" + unit.encode(), b"%d" % remaining),
                (b"x-ratelimit-reset-" + unit.encode(), _duration(full_in_s)),
            ]
        return headers

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the client's bytes for a comment, while the engine of a stream is silent."""
        return comment

    def named(self, error: errors.GatewayError) -> errors.GatewayError:
        """Return an error after the inspection that names fields as the client knows them."""
        return error

    def error_body(self, error: errors.GatewayError) -> bytes:
        """Return the body of an error response."""
        return errors.to_body(error)

    def error_event(self, error: errors.GatewayError) -> bytes:
        """Return the last event of a stream that an error ends."""
        return errors.to_event(error)


class OpenAIStreamEncoder(StreamEncoder):
    """Passes events on as they come, without the usage and the metrics that were not requested."""

    passthrough = True

    def __init__(
        self, profile: RequestProfile, late_headers: Sequence[Header] = (), *, include_metrics: bool
    ) -> None:
        self._profile = profile
        self._include_metrics = include_metrics
        self._late_headers = {name.decode(): value.decode() for name, value in late_headers}

    def event(self, event: bytes, frame: Json) -> bytes:
        """Return an event unchanged, or without fields that the client did not request."""
        include_usage = self._profile.include_usage
        has_metrics = frame.get("metrics") is not None
        # The trailing chunk carries nothing else; it is there because the gateway requests it.
        has_usage = isinstance(frame.get("usage"), dict)
        trailing = has_usage and not frame.get("choices")
        if trailing and not (include_usage or (has_metrics and self._include_metrics)):
            return b""
        if self.failovers and self._include_metrics and (has_metrics or trailing):
            frame["metrics"] = {**object_in(frame, "metrics"), "failovers": self.failovers}
            event = b"data: " + encode_json(frame) + b"\n\n"
        drop_metrics = has_metrics and not self._include_metrics
        drop_usage = has_usage and not trailing and self._profile.usage_interval is None
        last = bool(self._late_headers) and (
            trailing
            or any(one.get("finish_reason") is not None for one in objects_of(frame.get("choices")))
        )
        calls = self._profile.legacy_functions and as_function_call(frame.get("choices"), "delta")
        if not (drop_metrics or drop_usage or last or calls):
            return event
        if last:
            frame["headers"] = self._late_headers
        if drop_metrics:
            del frame["metrics"]
        if drop_usage and include_usage:
            frame["usage"] = None
        elif drop_usage:
            del frame["usage"]
        return b"data: " + encode_json(frame) + b"\n\n"

    def done(self) -> bytes:
        """Return `[DONE]` as OpenAI writes it: some clients read no other spelling."""
        return b"data: [DONE]\n\n"


def _duration(seconds: float) -> bytes:
    """Format a duration as OpenAI does, rounded up: 120ms, 8s, 6m0s, 3h2m1s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    whole = math.ceil(seconds)
    if whole < 60:
        return b"%ds" % whole
    if whole < 3600:
        return b"%dm%ds" % divmod(whole, 60)
    return b"%dh%dm%ds" % (whole // 3600, whole % 3600 // 60, whole % 60)


def _includes_metrics(request: RoutingRequest, *, usage: bool) -> bool:
    """Return whether the client gets metrics, in a response with usage or without."""
    return request.policy.metrics.included_in(requested=request.profile.metrics, usage=usage)


def _has_function_messages(messages: Any) -> bool:
    """Return whether a history has calls or results of functions that are no tools."""
    return any(
        "function_call" in one or one.get("role") == "function" for one in objects_of(messages)
    )


def _has_parts(messages: Any) -> bool:
    """Return whether a message has parts, and so perhaps an unreadable one."""
    return any(isinstance(message.get("content"), list) for message in objects_of(messages))


def _for_worker(body: Mapping[str, Any], profile: RequestProfile, *, in_place: bool) -> Json:
    """Return the body for a worker; it leaves nothing to an engine's own defaults."""
    # An explicit null means "absent", and strict engines reject it.
    # Strict ones reject fields that they do not know, even at values that change nothing.
    unsent = UNSENT & set(profile.ignored)
    sent = {
        name: value
        for name, value in canonical(body).items()
        if value is not None and name not in unsent
    }
    if profile.endpoint not in GENERATING:
        return sent | {"model": profile.model}
    sampling = profile.sampling
    sent |= {name: getattr(sampling, name) for name in _EXPLICIT} | {"model": profile.model}
    if sampling.repetition_penalty != 1.0:
        sent["repetition_penalty"] = sampling.repetition_penalty
    if profile.exact:
        sent["exact"] = True
    if profile.max_tokens is not None and "max_completion_tokens" not in sent:
        sent["max_tokens"] = profile.max_tokens
    if profile.generation_prompt:
        sent.pop("add_generation_prompt", None)
    if profile.continues_message:
        sent |= {"add_generation_prompt": False, "continue_final_message": True}
    else:
        sent.pop("continue_final_message", None)
    if profile.endpoint is Endpoint.CHAT:
        sent["messages"] = normalise(body["messages"], in_place=in_place)
    if profile.stream:
        # Every request is accounted; the encoder removes usage that the client did not request.
        # A key pays for a stream that its client leaves by the usage so far.
        interval = profile.usage_interval
        interval = RUNNING_USAGE_TOKENS if interval is None else interval
        sent["stream_options"] = {**_RUNNING_USAGE, USAGE_INTERVAL: interval}
    return sent


def normalise(messages: Sequence[Message], *, in_place: bool = False) -> list[Message]:
    """Merge the system messages at the front, and adjacent text messages of a role.

    A prefix cache works only if the same text gives the same prompt. A system message behind others
    stays `in_place` for workers, which know the limits of their template. Many templates of
    other engines reject it, so for them it moves to the front. Idempotent.
    """
    leading = len(messages)
    if in_place:
        roles = (at for at, one in enumerate(messages) if one["role"] not in _SYSTEM_ROLES)
        leading = next(roles, leading)
    system: list[Message] = []
    others: list[Message] = []
    for at, given in enumerate(messages):
        marked = any(name in given for name in CONTINUES)
        message = {k: v for k, v in given.items() if k not in CONTINUES} if marked else given
        role, content = message["role"], message.get("content")
        if role in _SYSTEM_ROLES:
            (system if at < leading else others).append({**message, "role": "system"})
        elif role == "assistant" and content is None and not message.get("tool_calls"):
            # An answer that ended inside its reasoning has no content, which no template takes.
            others.append({**message, "content": ""})
        else:
            others.append(message)
    head = [{"role": "system", "content": _system_content(system)}] if system else []
    return head + _merge_adjacent(others)


def _system_content(messages: Sequence[Message]) -> str | list[Any]:
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(content, str) for content in contents):
        return BETWEEN_TEXTS.join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _merge_adjacent(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for role, run in groupby(messages, key=_merging_role):
        first, *others = run
        if role is None or not others:
            merged += [first, *others]
        else:
            content = BETWEEN_TEXTS.join(one["content"] for one in (first, *others))
            merged.append({"role": role, "content": content})
    return merged


def _merging_role(message: Message) -> str | None:
    """Return the role of a message with only text: no parts, tool calls, names or other fields."""
    given = {name for name, value in message.items() if value is not None}
    plain = given == {"role", "content"} and isinstance(message["content"], str)
    return message["role"] if plain and message["role"] in _MERGING_ROLES else None


CHAT = WireFormat(Endpoint.CHAT)
COMPLETIONS = WireFormat(Endpoint.COMPLETIONS)
EMBEDDINGS = WireFormat(Endpoint.EMBEDDINGS)
RERANK = WireFormat(Endpoint.RERANK)
