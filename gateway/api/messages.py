"""`POST /v1/messages/count_tokens`: the tokens of a prompt in Anthropic's shape."""

from __future__ import annotations

from typing import Annotated

from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.api.auth import CountedBody, CurrentGateway, CurrentHold, CurrentKey, data_router, part
from gateway.api.openapi import FOR_CLIENTS, MESSAGES_ERROR, WITH_BODY, failures, ref, takes
from gateway.errors import LimitReached, ModelUnknown, Overloaded
from gateway.protocols.messages import MessagesFormat
from gateway.proxy.handler import inspect
from gateway.proxy.token_count import TokenCounter
from gateway.strict_json import encode_body, parse

router = data_router()


CurrentCounter = Annotated[TokenCounter, part("counter")]


class TokenCount(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int


@router.post(
    "/v1/messages/count_tokens",
    responses=failures(
        *FOR_CLIENTS, *WITH_BODY, ModelUnknown, LimitReached, Overloaded, shape=MESSAGES_ERROR
    ),
    openapi_extra=takes(ref("messages")),
)
async def count(
    raw: CountedBody,
    response: Response,
    *,
    gateway: CurrentGateway,
    api_key: CurrentKey,
    hold: CurrentHold,
    counter: CurrentCounter,
) -> TokenCount:
    """Count the tokens of a message's prompt; a header says if the number is an estimate."""
    policy, caller = gateway.policy_store.current, api_key.caller
    messages_format = MessagesFormat(gateway.sealer)
    async with gateway.inspection_thread.turn(hold, raw) as turn:
        body = await turn.run(parse, raw)
        inspected = await inspect(gateway, messages_format, body, policy, turn, caller=caller)
        encoded = await turn.run(encode_body, inspected.body, len(raw))
    api_key.check_model(inspected)
    return {"input_tokens": await counter.count(inspected, encoded, messages_format, response)}
