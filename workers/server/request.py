"""From a request body to generations: what is asked, in which lane, and what is refused."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect, Request

from policies.request.parser import STRUCTURED_FIELDS, read_profile
from policies.request.profile import Bypass, Endpoint, RequestProfile, bypass_reasons
from workers.engine.spec_prefill import Wish
from workers.engine.types import Generation, LaneName, ModelCard, Prompt
from workers.protocol import PREFIX_NAME_CHARS
from workers.server.bodies import read_json
from workers.server.errors import BadRequest, ClientLeft, UnknownModel
from workers.server.messages import read_messages
from workers.server.pictures import decode_pictures
from workers.server.ports import Json, Prompts, ServingEngine
from workers.server.tool_calls import ToolFormat

LANE_HEADER = "x-paceline-lane"
PREFIX_HEADER = "x-paceline-prefix-key"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


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
        reads_calls=tool_format is not None,
        top_logprobs=profile.top_logprobs,
        draft_tokens=profile.draft_tokens,
        spec_prefill=Wish(sparse=profile.spec_prefill, keep_share=profile.spec_prefill_keep),
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
    if given is not None and not 1 <= len(given) <= PREFIX_NAME_CHARS:
        raise BadRequest(
            f"The header '{PREFIX_HEADER}' must have 1 to {PREFIX_NAME_CHARS} characters.",
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
