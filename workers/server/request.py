"""From a request body to generations: what is asked, in which lane, and what is refused.

The JSON body of a request, bounded while it is read.

Chat messages of a body as a chat template wants them, and the pictures in them.

Pictures out of `data:` URLs; what their headers say was checked when the body was read.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import cast

from PIL import Image, ImageOps
from starlette.requests import ClientDisconnect, Request

from policies.request.content import (
    MEDIA_KINDS,
    PIXELS_LIMIT,
    PictureInvalid,
    content_of,
    source_of,
)
from policies.request.parser import STRUCTURED_FIELDS, read_profile
from policies.request.profile import Bypass, Endpoint, RequestProfile, bypass_reasons
from workers.engine.spec_prefill import SpecPrefillOptions
from workers.engine.types import Generation, LaneName, ModelCard, Picture, Prompt
from workers.protocol import MAX_PREFIX_NAME_CHARS, REQUEST_ID
from workers.server.errors import BadRequest, BodyTooLarge, ClientLeft, UnknownModel
from workers.server.ports import Json, Prompts, ServingEngine
from workers.server.tool_calls import ToolFormat

MAX_BODY_BYTES = 64 * 1024 * 1024
_PARSE_INLINE_BYTES = 64 * 1024
"""Parsing this much takes under a millisecond; more is parsed off the event loop."""


async def read_json(request: Request) -> dict[str, Json]:
    """Return the body as a JSON object; raise `BadRequest` or `BodyTooLarge`."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY_BYTES:
            raise BodyTooLarge(MAX_BODY_BYTES)
    if len(content) <= _PARSE_INLINE_BYTES:
        return _parse(content)
    return await asyncio.to_thread(_parse, content)


def _parse(content: bytearray) -> dict[str, Json]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest("The request body is not valid JSON.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    return cast("dict[str, Json]", body)


_CARRIED_FIELDS = ("name", "tool_call_id", "reasoning_content")


def read_messages(
    messages: Sequence[Mapping[str, Json]],
) -> tuple[list[dict[str, Json]], list[tuple[str, str]]]:
    """Return the messages for the template, and (field, URL) of each picture in order."""
    pictures: list[tuple[str, str]] = []
    rendered = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = "system" if message["role"] == "developer" else message["role"]
        turn: dict[str, Json] = {"role": role}
        turn["content"] = _read_content(message.get("content"), f"{where}.content", pictures)
        turn.update({name: message[name] for name in _CARRIED_FIELDS if message.get(name)})
        if message.get("tool_calls"):
            turn["tool_calls"] = _read_tool_calls(message["tool_calls"], f"{where}.tool_calls")
        rendered.append(turn)
    return rendered, pictures


def _read_content(content: Json, where: str, pictures: list[tuple[str, str]]) -> Json:
    if not isinstance(content, list):
        return content or ""
    parts: list[dict[str, Json]] = []
    for index, part in enumerate(content):
        if part["type"] not in MEDIA_KINDS:
            parts.append({"type": "text", "text": part["text"]})
            continue
        pictures.append(_read_picture(part, f"{where}[{index}]"))
        parts.append({"type": "image"})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _read_picture(part: Mapping[str, Json], where: str) -> tuple[str, str]:
    if MEDIA_KINDS[part["type"]] != "image":
        raise BadRequest(
            f"This worker takes no '{part['type']}' parts.",
            param=f"{where}.type",
            code="unsupported_value",
        )
    name, source = source_of(part)
    if source is None:
        raise BadRequest("A picture needs a 'data:' URL.", param=f"{where}.{name}")
    return f"{where}.{name}", source


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
        # OpenAI carries arguments as JSON text; templates walk through them as a mapping.
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise BadRequest(
            "The arguments of a tool call must be a JSON object.",
            param=f"{where}.function.arguments",
        )
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def decode_pictures(sources: Sequence[tuple[str, str]]) -> tuple[Picture, ...]:
    """Decode (field, URL) pairs in order; raise `BadRequest` naming the field.

    Takes time in proportion to the pixels: call it off the event loop.
    """
    pixels_left = PIXELS_LIMIT
    pictures = []
    for param, url in sources:
        picture = _decode(param, url, pixels_left)
        pixels_left -= picture.width_px * picture.height_px
        pictures.append(picture)
    return tuple(pictures)


def _decode(param: str, url: str, pixels_left: int) -> Picture:
    try:
        content = base64.b64decode(content_of(url), validate=True)
    except PictureInvalid as error:
        raise BadRequest(str(error), param=param) from None
    except binascii.Error as error:
        raise BadRequest("The picture is not valid base64.", param=param) from error
    try:
        with Image.open(BytesIO(content), formats=_FORMATS) as opened:  # reads the header only
            if opened.width * opened.height > pixels_left:
                raise Image.DecompressionBombError
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadRequest(
            f"The pictures of a request may have at most {PIXELS_LIMIT} pixels in all.", param=param
        ) from error
    except Exception as error:  # a hostile file raises nearly anything out of a decoder
        raise BadRequest("The picture cannot be decoded.", param=param) from error
    return Picture(width_px=upright.width, height_px=upright.height, rgb=upright.tobytes())


LANE_HEADER = "x-paceline-lane"
PREFIX_HEADER = "x-paceline-prefix-key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, ready to be generated; `created_s` is the wall time it is dated with."""

    request_id: str
    created_s: int
    model: str
    profile: RequestProfile
    generations: tuple[Generation, ...]
    tool_format: ToolFormat | None = None
    single_tool_call: bool = False
    echo: str = ""
    detailed_metrics: bool = False
    """Whether every step of the speculation is told, and not only their sums."""


def request_id_of(request: Request) -> str:
    """Take over the caller's x-request-id when it is harmless, else make one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def read_call(
    request: Request, engine: ServingEngine, endpoint: Endpoint, created_s: int
) -> Call:
    """Read and check everything about a request; raise before any of it runs."""
    try:
        body = await read_json(request)
    except ClientDisconnect as error:
        raise ClientLeft from error
    profile = read_profile(body, endpoint)
    if profile.model != engine.card.model:
        raise UnknownModel(profile.model, engine.card.model)
    _refuse_unsupported(body)
    tools = body["tools"] if profile.tools else None
    tool_format = _tool_format(engine.prompts, tools) if tools else None
    lane, bypass = _choose_lane(request.headers.get(LANE_HEADER), profile, engine.card)
    if endpoint is Endpoint.CHAT:
        prefix_key = _prefix_key(request.headers.get(PREFIX_HEADER))
        prompt = await _chat_prompt(body, tools, engine, prefix_key)
    else:
        prompt = Prompt(text=body["prompt"])
    request_id = request.state.request_id
    first = Generation(
        request_id=request_id,
        lane=lane,
        prompt=prompt,
        sampling=profile.sampling,
        max_tokens=profile.max_tokens,
        stop=profile.stop,
        keep_call_tokens=tool_format is not None,
        top_logprobs=profile.top_logprobs,
        draft_tokens=profile.draft_tokens,
        spec_prefill=SpecPrefillOptions(
            sparse=profile.spec_prefill, keep_share=profile.spec_prefill_keep
        ),
        bypass=bypass,
    )
    return Call(
        request_id=request_id,
        created_s=created_s,
        model=profile.model,
        profile=profile,
        generations=_one_for_each_choice(first, profile.choices),
        tool_format=tool_format,
        single_tool_call=body.get("parallel_tool_calls") is False,
        echo=_read_echo(body, profile),
        detailed_metrics=body.get("metrics") == "detailed",
    )


def _refuse_unsupported(body: Mapping[str, Json]) -> None:
    """Refuse, by name, what the engine cannot do: nothing is ignored in silence."""
    asked = [name for name in (*STRUCTURED_FIELDS, "thinking_budget") if body.get(name) is not None]
    if (body.get("response_format") or {}).get("type", "text") != "text":
        asked.append("response_format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        asked.append("tool_choice")
    if body.get("metrics") not in (None, "summary", "detailed"):  # vLLM's words
        asked.append("metrics")
    for name in asked:
        raise BadRequest(
            f"This worker does not support '{name}' as asked.",
            param=name,
            code="unsupported_parameter",
        )


def _tool_format(prompts: Prompts, tools: list[Mapping[str, Json]]) -> ToolFormat:
    if prompts.tool_parser_name is None:
        raise BadRequest(
            "This model does not call tools.", param="tools", code="unsupported_parameter"
        )
    return ToolFormat(prompts.tool_parser_name, tools)


def _choose_lane(
    asked: str | None, profile: RequestProfile, card: ModelCard
) -> tuple[LaneName, tuple[Bypass, ...]]:
    """Take the lane the gateway decided on, else the one the request is eligible for."""
    bypass = bypass_reasons(profile)
    if asked is None:
        lane = LaneName.VLM if bypass or LaneName.TEXT_MTP not in card.lanes else LaneName.TEXT_MTP
    else:
        lane = next((name for name in LaneName if name == asked), LaneName.VLM)
    if lane not in card.lanes or asked not in (None, lane):
        raise BadRequest(f"This worker does not run the lane '{(asked or lane)[:64]}'.")
    if lane is LaneName.TEXT_MTP and profile.media_count:
        raise BadRequest("The lane 'text-mtp' takes no pictures.", param="messages")
    if not bypass and LaneName.TEXT_MTP not in card.lanes:
        bypass = (Bypass.NO_MTP_WORKER,)
    return lane, bypass


def _prefix_key(given: str | None) -> str | None:
    """Refuse a key that no report could hold: the worker would never be heard of again."""
    if given is not None and not 1 <= len(given) <= MAX_PREFIX_NAME_CHARS:
        raise BadRequest(
            f"The header '{PREFIX_HEADER}' must have 1 to {MAX_PREFIX_NAME_CHARS} characters.",
            param=PREFIX_HEADER,
        )
    return given


async def _chat_prompt(
    body: Mapping[str, Json],
    tools: list[Mapping[str, Json]] | None,
    engine: ServingEngine,
    prefix_key: str | None,
) -> Prompt:
    messages, sources = read_messages(body["messages"])
    template_kwargs = body.get("chat_template_kwargs") or {}
    if sources and not engine.card.vision:
        raise BadRequest(
            "This model does not see pictures.", param=sources[0][0], code="unsupported_value"
        )
    pictures = await asyncio.to_thread(decode_pictures, sources) if sources else ()

    def render() -> Prompt:
        return Prompt(
            text=engine.prompts.chat(messages, tools, template_kwargs),
            pictures=pictures,
            prefix_text=engine.prompts.shared_prefix(messages, tools, template_kwargs),
            prefix_key=prefix_key,
        )

    return await asyncio.to_thread(render)


def _one_for_each_choice(first: Generation, choices: int) -> tuple[Generation, ...]:
    if choices == 1:
        return (first,)
    seed = first.sampling.seed
    return tuple(
        replace(
            first,
            request_id=f"{first.request_id}.{index}",
            further_choice=index > 0,
            sampling=first.sampling._replace(seed=None if seed is None else seed + index),
        )
        for index in range(choices)
    )


def _read_echo(body: Mapping[str, Json], profile: RequestProfile) -> str:
    echo = body.get("echo")
    if echo not in (None, True, False):
        raise BadRequest("'echo' must be true or false.", param="echo")
    if echo and profile.top_logprobs is not None:
        raise BadRequest(
            "This worker gives no log-probabilities of the prompt: 'echo' excludes 'logprobs'.",
            param="echo",
            code="unsupported_parameter",
        )
    return str(body["prompt"]) if echo else ""
