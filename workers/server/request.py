"""The request of a client, read and checked: from a JSON body to generations for the engine."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from paceline.content_coding import coding_of, decoding
from paceline.lifecycle import first_of
from paceline.names import MODEL_PATTERN
from paceline.protocol import (
    ANSWER_FIELD,
    KEYS_HEADER,
    MAX_COUNT,
    MAX_PREFIX_KEYS,
    MAX_PREFIX_NAME_CHARS,
    MODEL_HEADER,
    NO_PREFIX,
    PROGRESS_HEADER,
    REQUEST_ID,
    SCOPE_HEADER,
    TOKENS_LIMIT_HEADER,
    salted_scope,
)
from paceline.request.call_rules import CallRules, read_call_rules
from paceline.request.constraint import (
    Constraint,
    ConstraintKind,
    read_constraint,
    strict_tools,
)
from paceline.request.content import (
    MEDIA_KINDS,
    MESSAGE_TEXTS,
    PROMPTS_LIMIT,
    TEXT_PARTS,
    read_texts,
    source_of,
)
from paceline.request.fields import read_cache_salt
from paceline.request.keys import KEYS
from paceline.request.parser import read_profile
from paceline.request.profile import Bypass, Endpoint, RequestProfile, bypass_reasons
from paceline.request.wires import canonical
from workers.engine.text.long_text import in_turn
from workers.engine.text.tool_formats import ToolFormat
from workers.engine.types import Generation, LaneName, ModelCard, Prompt, SpecPrefillOptions
from workers.server.answer_progress import GivenStream, read_given
from workers.server.engines import Json, ServingEngine
from workers.server.errors import BadRequest, BodyTooLarge, ClientLeft, CodingRefused, UnknownModel
from workers.server.pictures import PictureMemory
from workers.server.tool_calls import FORCED_CALLS

LANE_HEADER = "x-paceline-lane"
MAX_BODY_BYTES = 64 * 1024 * 1024
_PARSE_INLINE_BYTES = 64 * 1024
"""JSON of this size parses in under a millisecond; a larger body is parsed in a thread."""
# One thread: each thread that parses keeps the memory of its largest body.
_PARSER = ThreadPoolExecutor(1, "parse")

_NO_PROMPT = Prompt()

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One checked request for a chat or text completion."""

    request_id: str
    created_s: int
    """Wall time of the request, in seconds."""
    profile: RequestProfile
    shown_model: str
    """The name of the model in the answer."""
    generations: tuple[Generation, ...]
    """One for each choice, prompt by prompt."""
    call_rules: CallRules
    tool_format: ToolFormat | None = None
    """Format of the calls in the answer; None if calls are none or stay text."""
    tools: tuple[Mapping[str, Json], ...] = ()
    reasons: bool = False
    """Whether the model may reason before it answers."""
    echoes: tuple[str, ...] = ()
    """The prompts, if the texts of their choices begin with them."""
    detailed_metrics: bool = False
    """Whether the response lists the counts of every draft step, besides their sums."""
    reports_progress: bool = False
    """Whether the events of the stream have lines that name their tokens."""
    given: bool = False
    """Whether the client has the beginning of the stream from another worker."""


def request_id_of(request: Request) -> str:
    """Return the client's x-request-id if it is safe to log, else a new id."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def read_request(
    request: Request,
    engine: ServingEngine,
    pictures: PictureMemory,
    endpoint: Endpoint,
    created_s: int,
) -> CompletionRequest:
    """Read and check a request completely, before any of its generations starts.

    Raises `RequestError` or `FieldError`, which name the field, and `ClientLeft`.
    """
    asked = await read_body(request)
    given = asked.pop(ANSWER_FIELD, None)
    profile = read_profile(asked, endpoint)
    body = canonical(asked)
    if profile.model != engine.card.model:
        raise UnknownModel(profile.model, engine.card.model)
    stream = None if given is None else read_given(given, profile.prompts * profile.choices)
    calls = _read_calls(body, profile, engine)
    if endpoint is Endpoint.CHAT:
        keys = _prefix_keys(request.headers.get(KEYS_HEADER))
        preparing = _chat_prompt(body, profile, calls.tools, engine, pictures, keys=keys)
    else:
        preparing = _completion_prompts(body, profile, engine)
    prompts, echoes = await while_connected(request.receive, preparing)
    generation = _generation(request, profile, engine.card, calls, continues=stream is not None)
    scope = _prefix_scope(request.headers.get(SCOPE_HEADER), read_cache_salt(body))
    if generation.prompt_logprobs:
        scope = None  # a prompt from the cache has no scores
    prompts = [replace(prompt, scope=scope) for prompt in prompts]
    return CompletionRequest(
        request_id=request.state.request_id,
        created_s=created_s if stream is None else stream.created_s,
        profile=profile,
        shown_model=_shown_model(request.headers.get(MODEL_HEADER)) or profile.model,
        generations=_one_per_choice(generation, prompts, stream),
        tool_format=calls.read_as,
        tools=tuple(calls.declared),
        call_rules=read_call_rules(body),
        reasons=engine.prompts.reasoning_format is not None,
        echoes=echoes,
        detailed_metrics=body.get("metrics") == "detailed",
        reports_progress=generation.report_steps,
        given=stream is not None,
    )


async def read_body(request: Request) -> dict[str, Json]:
    """Return the parsed body of a request; raise `BadRequest`, `BodyTooLarge` or `ClientLeft`."""
    content = await read_content(request, MAX_BODY_BYTES)
    if len(content) <= _PARSE_INLINE_BYTES:
        return _parse(content)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, _parse, content)


async def read_content(request: Request, limit_bytes: int) -> bytearray:
    """Return the body of a request; raise `BadRequest`, `BodyTooLarge` or `ClientLeft`."""
    content = bytearray()
    if coding := coding_of(request.scope):
        receive = decoding(
            *(request.receive, coding, limit_bytes),
            unsupported=CodingRefused,
            invalid=functools.partial(BadRequest, code="invalid_json"),
            too_large=BodyTooLarge,
        )
        request = Request(request.scope, receive)
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > limit_bytes:
                raise BodyTooLarge(limit_bytes)
    except ClientDisconnect as error:
        raise ClientLeft from error
    return content


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await the work; cancel it and raise `ClientLeft` if the client disconnects first.

    The body must have been read: the next message from `receive` is then the disconnect.
    """
    working = asyncio.create_task(work)
    try:
        await first_of(working, _disconnected(receive))
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _parse(content: bytearray) -> dict[str, Json]:
    try:
        # The gateway's parser: no half of a surrogate pair, which no tokenizer accepts, and no NaN.
        body = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    return body


class _Calls(NamedTuple):
    """A request's rules for calls of tools."""

    tools: Sequence[Mapping[str, Json]] | None
    """Those of the prompt."""
    free: ToolFormat | None
    """Format of calls that the model may write; None if it must, or must not."""
    read_as: ToolFormat | None
    """Format of the calls in the answer, also of forbidden ones; None: all is text."""
    declared: Sequence[Mapping[str, Json]]
    constraint: Constraint | None


def _read_calls(body: Mapping[str, Json], profile: RequestProfile, engine: ServingEngine) -> _Calls:
    declared = tuple(map(_shown_tool, body.get("tools") or ()))
    tools, constraint = declared if profile.tools else None, read_constraint(body)
    if constraint is not None and constraint.kind is ConstraintKind.CALLS:
        return _Calls(tools, None, FORCED_CALLS, declared, constraint)
    read_as = engine.prompts.tool_format if tools or (declared and not constraint) else None
    free = read_as if tools else None
    if constraint is None and free is not None and free.style:
        constraint = strict_tools(body, free.style)
    return _Calls(tools, free, read_as, declared, constraint)


def _shown_tool(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return a tool without ignored fields, since templates write all fields into the prompt."""
    known = KEYS["CHAT tools.function"][0]
    kept = {name: value for name, value in tool["function"].items() if name in known}
    return {"type": "function", "function": kept}


def _generation(
    request: Request, profile: RequestProfile, card: ModelCard, calls: _Calls, *, continues: bool
) -> Generation:
    """Return the generation of the first choice, without its prompt."""
    lane, bypass = _choose_lane(request.headers.get(LANE_HEADER), profile, card)
    scores_prompt = profile.echo and profile.top_logprobs is not None
    return Generation(
        request_id=request.state.request_id,
        lane=lane,
        prompt=_NO_PROMPT,
        sampling=profile.sampling,
        max_tokens=profile.max_tokens,
        choices=profile.choices,
        token_limit=token_limit(request),
        min_tokens=profile.min_tokens,
        stop=profile.stop,
        stop_tokens=frozenset(profile.stop_tokens),
        ignore_eos=profile.ignore_eos,
        prompt_limit=profile.prompt_limit,
        split_reasoning=profile.endpoint is Endpoint.CHAT,
        thinking_budget=profile.thinking_budget,
        constraint=calls.constraint,
        call_marks=(calls.free.begin, calls.free.end) if calls.free else None,
        keep_call_tokens=calls.read_as not in (None, FORCED_CALLS),
        top_logprobs=profile.top_logprobs,
        prompt_logprobs=scores_prompt,
        token_sources=profile.token_sources,
        draft_tokens=profile.draft_tokens,
        exact=profile.exact,
        report_steps=profile.stream and PROGRESS_HEADER in request.headers and not scores_prompt,
        spec_prefill=SpecPrefillOptions(
            sparse=False if scores_prompt or continues else profile.spec_prefill,
            keep_share=profile.spec_prefill_keep,
        ),
        bypass=bypass,
    )


def _choose_lane(
    requested: str | None, profile: RequestProfile, card: ModelCard
) -> tuple[LaneName, tuple[Bypass, ...]]:
    """Return the lane that the gateway requested, else the one the request is eligible for."""
    bypass = bypass_reasons(profile)
    eligible = LaneName.VLM if bypass or LaneName.TEXT_MTP not in card.lanes else LaneName.TEXT_MTP
    wanted = eligible if requested is None else requested
    lane = next((lane for lane in card.lanes if lane == wanted), None)
    if lane is None:
        raise BadRequest(f"This worker does not run the lane '{wanted[:64]}'.")
    if lane is LaneName.TEXT_MTP and profile.media_count:
        raise BadRequest("The lane 'text-mtp' does not accept images.", param="messages")
    if not bypass and LaneName.TEXT_MTP not in card.lanes:
        bypass = (Bypass.NO_MTP_WORKER,)
    return lane, bypass


def _shown_model(given: str | None) -> str:
    """Return the client's name of the model; empty if it has no other."""
    name = "" if given is None else unquote(given)
    if given is not None and not re.fullmatch(MODEL_PATTERN, name):
        raise _wrong_header(MODEL_HEADER, "must be the name of a model")
    return name


def _prefix_scope(given: str | None, salt: str) -> str | None:
    """Return the isolation scope; without a salt, requests that come from no gateway share one."""
    scope = "" if given is None else _check_name(given, SCOPE_HEADER)
    if scope == NO_PREFIX:
        return None
    digest = blake2b(salt.encode(), digest_size=16).hexdigest()
    return salted_scope(scope, digest) if salt else scope


def _prefix_keys(given: str | None) -> tuple[str, ...]:
    """Return the keys of a prompt, longest first; empty without a gateway."""
    keys = () if given is None else given.split(",", MAX_PREFIX_KEYS)
    if len(keys) > MAX_PREFIX_KEYS:
        raise _wrong_header(KEYS_HEADER, f"may have at most {MAX_PREFIX_KEYS} keys")
    return tuple(_check_name(key, KEYS_HEADER) for key in keys)


def _check_name(name: str, header: str) -> str:
    """Check a key: gateways would reject every report that contains an invalid one."""
    if not name.isprintable() or not 1 <= len(name) <= MAX_PREFIX_NAME_CHARS:
        raise _wrong_header(
            header, f"must have names of 1 to {MAX_PREFIX_NAME_CHARS} printable characters"
        )
    return name


def token_limit(request: Request) -> int | None:
    """Return the most tokens that the gateway allows a request; None: no limit."""
    given = request.headers.get(TOKENS_LIMIT_HEADER)
    if given is None:
        return None
    if not re.fullmatch("[0-9]{1,16}", given) or not 1 <= int(given) <= MAX_COUNT:
        raise _wrong_header(TOKENS_LIMIT_HEADER, f"must be a number from 1 to {MAX_COUNT}")
    return int(given)


def _wrong_header(name: str, problem: str) -> BadRequest:
    return BadRequest(f"The header '{name}' {problem}.", param=name)


_Prompts = tuple[list[Prompt], tuple[str, ...]]
"""The prompts of a request, and their texts if the answers begin with them."""


async def _chat_prompt(
    body: Mapping[str, Json],
    profile: RequestProfile,
    tools: Sequence[Mapping[str, Json]] | None,
    engine: ServingEngine,
    memory: PictureMemory,
    *,
    keys: Sequence[str],
) -> _Prompts:
    messages, sources = read_messages(body["messages"])
    prefix_key = keys[-1] if keys else None
    if sources and not engine.card.vision:
        raise BadRequest(
            "This model does not support images.", param=sources[0][0], code="unsupported_value"
        )
    pictures = await memory.decode(sources) if sources else ()

    def render() -> Prompt:
        variables = engine.prompts.template_variables(
            body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        )
        prefix_text = ""
        if prefix_key != NO_PREFIX:
            prefix_text = engine.prompts.shared_prefix(messages, tools, variables)
        text = engine.prompts.chat(
            messages,
            tools,
            variables,
            add_generation_prompt=profile.generation_prompt,
            continue_final_message=profile.continues_message,
        )
        return Prompt(
            text=text,
            turn_end=engine.prompts.turn_end(text, messages, tools, variables),
            continues=engine.prompts.continues(variables),
            pictures=pictures,
            prefix_text=prefix_text,
            prefix_key=prefix_key,
            turn_key=keys[0] if len(keys) > 1 else "",
        )

    return [await in_turn(profile.text_chars, render)], ()


async def _completion_prompts(
    body: Mapping[str, Json], profile: RequestProfile, engine: ServingEngine
) -> _Prompts:
    def tokenize() -> _Prompts:
        prompts, echoes = [], []
        for prompt in read_texts(body, "prompt", PROMPTS_LIMIT):
            if isinstance(prompt, str):
                tokens = engine.prompts.tokenize_completion(prompt, profile.prompt_limit)
            else:
                tokens = tuple(prompt)
            prompts.append(Prompt(tokens=tokens))
            if profile.echo:
                text = prompt if isinstance(prompt, str) else engine.prompts.spell(tokens)
                echoes.append(text)
        return prompts, tuple(echoes)

    return await in_turn(profile.text_chars, tokenize)


def read_messages(
    messages: Sequence[Mapping[str, Json]],
) -> tuple[list[dict[str, Json]], list[tuple[str, str]]]:
    """Return the messages for the chat template, and (field, URL) of each image in order."""
    images: list[tuple[str, str]] = []
    rendered = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = "system" if message["role"] == "developer" else message["role"]
        entry: dict[str, Json] = {"role": role}
        content = message.get("content") or message.get("refusal")
        entry["content"] = _read_content(content, f"{where}.content", images)
        entry.update({name: message[name] for name in MESSAGE_TEXTS if message.get(name)})
        entry.pop("refusal", None)
        if calls := message.get("tool_calls"):
            param = f"{where}.tool_calls"
            if not isinstance(calls, list):
                raise BadRequest("'tool_calls' must be a list.", param=param)
            entry["tool_calls"] = [
                _read_tool_call(call, f"{param}[{at}]") for at, call in enumerate(calls)
            ]
        rendered.append(entry)
    return rendered, images


def _read_content(content: Json, where: str, images: list[tuple[str, str]]) -> Json:
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Json]] = []
    for index, part in enumerate(content):
        if part["type"] not in MEDIA_KINDS:
            parts.append({"type": "text", "text": part[TEXT_PARTS[part["type"]]]})
            continue
        images.append(_read_image(part, f"{where}[{index}]"))
        parts.append({"type": "image"})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_image(part: Mapping[str, Json], where: str) -> tuple[str, str]:
    if MEDIA_KINDS[part["type"]] != "image":
        raise BadRequest(
            f"This worker does not support '{part['type']}' parts.",
            param=f"{where}.type",
            code="unsupported_value",
        )
    name, source = source_of(part)
    return f"{where}.{name}", source or ""


def _read_tool_call(call: Json, where: str) -> dict[str, Json]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("A tool call needs a function with a name.", param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # OpenAI sends arguments as JSON text; chat templates iterate over them as a mapping. What a
        # model once wrote wrong must not end its conversation.
        try:
            parsed = from_json(arguments or "{}")
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, Mapping) else {"arguments": arguments}
    if not isinstance(arguments, Mapping):
        raise BadRequest(
            "The arguments of a tool call must be JSON text, or an object.",
            param=f"{where}.function.arguments",
        )
    if not isinstance(call.get("id"), str | None):
        raise BadRequest("'id' must be a string.", param=f"{where}.id")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _one_per_choice(
    generation: Generation, prompts: Sequence[Prompt], stream: GivenStream | None
) -> tuple[Generation, ...]:
    """Return the generation of each choice, prompt by prompt; only the first reads its prompt."""
    choices, seed = generation.choices, generation.sampling.seed
    answer_tokens = choices * (generation.max_tokens or 0)
    needs = [len(prompt.tokens) + answer_tokens for prompt in prompts]
    single = len(prompts) == choices == 1
    return tuple(
        replace(
            generation,
            prompt=prompt,
            further_tokens=sum(needs) - needs[at],
            request_id=generation.request_id + ("" if single else f".{at * choices + index}"),
            further_choice=index > 0,
            sampling=generation.sampling._replace(seed=None if seed is None else seed + index),
            given=None if stream is None else stream.answers[at * choices + index],
        )
        for at, prompt in enumerate(prompts)
        for index in range(choices)
    )
