"""The request of a client, read and checked: from a JSON body to generations for the engine."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import unquote

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

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
from paceline.request.constraint import ConstraintKind, read_constraint, strict_tools
from paceline.request.content import MEDIA_KINDS, MESSAGE_TEXTS, TEXT_PARTS, read_prompts, source_of
from paceline.request.fields import read_cache_salt
from paceline.request.parser import read_profile
from paceline.request.profile import Bypass, Endpoint, RequestProfile, bypass_reasons
from workers.engine.text.long_text import in_turn
from workers.engine.text.tool_formats import ToolFormat
from workers.engine.types import Generation, LaneName, ModelCard, Prompt, SpecPrefillOptions
from workers.server.answer_progress import read_given
from workers.server.errors import BadRequest, BodyTooLarge, ClientLeft, UnknownModel
from workers.server.pictures import PictureMemory
from workers.server.ports import Json, ServingEngine
from workers.server.tool_calls import FORCED_CALLS

LANE_HEADER = "x-paceline-lane"
MAX_BODY_BYTES = 64 * 1024 * 1024
_PARSE_INLINE_BYTES = 64 * 1024
"""JSON of this size parses in under a millisecond; a larger body is parsed in a thread."""
# One thread: each thread that parses keeps the memory of its largest body.
_PARSER = ThreadPoolExecutor(1, "parse")

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
    tool_format: ToolFormat | None = None
    """Format of the calls in the answer; None if calls are none or stay text."""
    tools: tuple[Mapping[str, Json], ...] = ()
    single_tool_call: bool = False
    echoes: tuple[str, ...] = ()
    """The prompts, if the texts of their choices begin with them."""
    detailed_metrics: bool = False
    """Whether the response lists the counts of every draft step, beside their sums."""
    reports_progress: bool = False
    """Whether the events of the stream have lines that tell their tokens."""
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
    body = await read_body(request)
    checked = _check(
        request,
        body,
        engine,
        pictures=pictures,
        endpoint=endpoint,
        created_s=created_s,
    )
    return await while_connected(request.receive, checked)


async def _check(
    request: Request,
    body: dict[str, Json],
    engine: ServingEngine,
    *,
    pictures: PictureMemory,
    endpoint: Endpoint,
    created_s: int,
) -> CompletionRequest:
    answer_so_far = body.pop(ANSWER_FIELD, None)
    profile = read_profile(body, endpoint)
    if profile.model != engine.card.model:
        raise UnknownModel(profile.model, engine.card.model)
    tools = body["tools"] if profile.tools else None
    constraint = read_constraint(body)
    forced = constraint is not None and constraint.kind is ConstraintKind.CALLS
    tool_format = engine.prompts.tool_format if tools and not forced else None
    if constraint is None and tool_format is not None and tool_format.style:
        constraint = strict_tools(body, tool_format.style)
    lane, bypass = _choose_lane(request.headers.get(LANE_HEADER), profile, engine.card)
    scope = _prefix_scope(request.headers.get(SCOPE_HEADER), read_cache_salt(body))
    scores_prompt = profile.echo and profile.top_logprobs is not None
    if endpoint is Endpoint.CHAT:
        keys = _prefix_keys(request.headers.get(KEYS_HEADER))
        prompts = [await _chat_prompt(body, profile, tools, engine, pictures, keys=keys)]
        echoes: tuple[str, ...] = ()
    else:
        prompts, echoes = await _completion_prompts(body, profile, engine)
        scope = None if scores_prompt else scope  # a prompt from the cache has no scores
    prompts = [replace(prompt, scope=scope) for prompt in prompts]
    given = None
    if answer_so_far is not None:
        given = read_given(answer_so_far, profile.prompts * profile.choices)
        created_s = given.created_s
    reports_progress = profile.stream and PROGRESS_HEADER in request.headers and not scores_prompt
    request_id = request.state.request_id
    generation = Generation(
        request_id=request_id,
        lane=lane,
        prompt=prompts[0],
        sampling=profile.sampling,
        max_tokens=profile.max_tokens,
        choices=profile.choices,
        token_limit=token_limit(request),
        min_tokens=profile.min_tokens,
        stop=profile.stop,
        stop_tokens=frozenset(profile.stop_tokens),
        ignore_eos=profile.ignore_eos,
        prompt_limit=profile.prompt_limit,
        split_reasoning=endpoint is Endpoint.CHAT,
        thinking_budget=profile.thinking_budget,
        constraint=constraint,
        call_marks=(tool_format.begin, tool_format.end) if tool_format else None,
        keep_call_tokens=tool_format is not None,
        top_logprobs=profile.top_logprobs,
        prompt_logprobs=scores_prompt,
        token_sources=profile.token_sources,
        draft_tokens=profile.draft_tokens,
        exact=profile.exact,
        report_steps=reports_progress,
        spec_prefill=SpecPrefillOptions(
            sparse=False if scores_prompt or given is not None else profile.spec_prefill,
            keep_share=profile.spec_prefill_keep,
        ),
        bypass=bypass,
    )
    generations = _one_per_choice(_one_per_prompt(generation, prompts), profile.choices)
    if given is not None:
        answers = zip(generations, given.answers, strict=True)
        generations = tuple(replace(one, given=answer) for one, answer in answers)
    return CompletionRequest(
        request_id=request_id,
        created_s=created_s,
        profile=profile,
        shown_model=_shown_model(request.headers.get(MODEL_HEADER)) or profile.model,
        generations=generations,
        tool_format=FORCED_CALLS if forced else tool_format,
        tools=tuple(tools or ()),
        single_tool_call=body.get("parallel_tool_calls") is False,
        echoes=echoes,
        detailed_metrics=body.get("metrics") == "detailed",
        reports_progress=reports_progress,
        given=given is not None,
    )


async def read_body(request: Request) -> dict[str, Json]:
    """Return the parsed body of a request; raise `BadRequest`, `BodyTooLarge` or `ClientLeft`."""
    content = bytearray()
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                raise BodyTooLarge(MAX_BODY_BYTES)
    except ClientDisconnect as error:
        raise ClientLeft from error
    if len(content) <= _PARSE_INLINE_BYTES:
        return _parse(content)
    return await asyncio.get_running_loop().run_in_executor(_PARSER, _parse, content)


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
    """Return the name by which the client knows the model; empty if it has no other."""
    name = "" if given is None else unquote(given)
    if given is not None and not re.fullmatch(MODEL_PATTERN, name):
        raise BadRequest(
            f"The header '{MODEL_HEADER}' must be the name of a model.", param=MODEL_HEADER
        )
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
    if given is None:
        return ()
    keys = given.split(",", MAX_PREFIX_KEYS)
    if len(keys) > MAX_PREFIX_KEYS:
        raise BadRequest(
            f"The header '{KEYS_HEADER}' may have at most {MAX_PREFIX_KEYS} keys.",
            param=KEYS_HEADER,
        )
    return tuple(_check_name(key, KEYS_HEADER) for key in keys)


def _check_name(name: str, header: str) -> str:
    """Check a key: gateways would reject every report that contains an invalid one."""
    if not name.isprintable() or not 1 <= len(name) <= MAX_PREFIX_NAME_CHARS:
        raise BadRequest(
            f"A name in the header '{header}' must have 1 to {MAX_PREFIX_NAME_CHARS} printable "
            "characters.",
            param=header,
        )
    return name


def token_limit(request: Request) -> int | None:
    """Return the most tokens that the gateway allows a request; None: no limit."""
    given = request.headers.get(TOKENS_LIMIT_HEADER)
    if given is None:
        return None
    if not re.fullmatch("[0-9]{1,16}", given) or not 1 <= int(given) <= MAX_COUNT:
        raise BadRequest(
            f"The header '{TOKENS_LIMIT_HEADER}' must be a number from 1 to {MAX_COUNT}.",
            param=TOKENS_LIMIT_HEADER,
        )
    return int(given)


async def _chat_prompt(
    body: Mapping[str, Json],
    profile: RequestProfile,
    tools: list[Mapping[str, Json]] | None,
    engine: ServingEngine,
    memory: PictureMemory,
    *,
    keys: Sequence[str],
) -> Prompt:
    messages, sources = read_messages(body["messages"])
    prefix_key = keys[-1] if keys else None
    if sources and not engine.card.vision:
        raise BadRequest(
            "This model does not support images.", param=sources[0][0], code="unsupported_value"
        )

    pictures = await memory.decode(sources) if sources else ()

    def render() -> Prompt:
        template_kwargs = engine.prompts.template_variables(
            body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        )
        prefix_text = ""
        if prefix_key != NO_PREFIX:
            prefix_text = engine.prompts.shared_prefix(messages, tools, template_kwargs)
        text = engine.prompts.chat(
            messages,
            tools,
            template_kwargs,
            add_generation_prompt=profile.generation_prompt,
            continue_final_message=profile.continues_message,
        )
        return Prompt(
            text=text,
            turn_end=engine.prompts.turn_end(text, messages, tools, template_kwargs),
            continues=engine.prompts.continues(template_kwargs),
            pictures=pictures,
            prefix_text=prefix_text,
            prefix_key=prefix_key,
            turn_key=keys[0] if len(keys) > 1 else "",
        )

    return await in_turn(profile.text_chars, render)


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
            entry["tool_calls"] = _read_tool_calls(calls, f"{where}.tool_calls")
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


def _read_tool_calls(calls: Json, where: str) -> list[dict[str, Json]]:
    if not isinstance(calls, list):
        raise BadRequest("'tool_calls' must be a list.", param=where)
    return [_read_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


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


async def _completion_prompts(
    body: Mapping[str, Json], profile: RequestProfile, engine: ServingEngine
) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts, and their texts if the answers begin with them."""

    def tokenize() -> tuple[list[Prompt], tuple[str, ...]]:
        prompts, echoes = [], []
        for prompt in read_prompts(body):
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


def _one_per_prompt(generation: Generation, prompts: Sequence[Prompt]) -> list[Generation]:
    if len(prompts) == 1:
        return [generation]
    answer_tokens = generation.choices * (generation.max_tokens or 0)
    needs = [len(prompt.tokens) + answer_tokens for prompt in prompts]
    return [
        replace(generation, prompt=prompt, further_tokens=sum(needs) - need)
        for prompt, need in zip(prompts, needs, strict=True)
    ]


def _one_per_choice(generations: Sequence[Generation], choices: int) -> tuple[Generation, ...]:
    if len(generations) == choices == 1:
        return tuple(generations)
    seed = generations[0].sampling.seed
    return tuple(
        replace(
            generation,
            request_id=f"{generation.request_id}.{at * choices + index}",
            further_choice=index > 0,
            sampling=generation.sampling._replace(seed=None if seed is None else seed + index),
        )
        for at, generation in enumerate(generations)
        for index in range(choices)
    )
