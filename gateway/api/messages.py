"""`POST /v1/messages/count_tokens`: the tokens of a prompt in Anthropic's shape."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.api.auth import CurrentGateway, CurrentKey, data_router
from gateway.api.openapi import FOR_CLIENTS, WITH_BODY, failures, ref, takes
from gateway.errors import LimitReached, ModelUnknown, Overloaded
from gateway.http.downstream import read_small_body
from gateway.protocols.messages import MessagesFormat
from gateway.proxy.billing import count_request
from gateway.proxy.load_shedding import Load
from gateway.proxy.token_count import TokenCounter

ESTIMATE_HEADER = "x-paceline-estimate"


class TokenCount(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int


def token_counts(load: Load, counter: TokenCounter) -> APIRouter:
    """Return the route, which is bounded as the requests of the data plane."""
    router = data_router()

    @router.post(
        "/v1/messages/count_tokens",
        responses=failures(*FOR_CLIENTS, *WITH_BODY, ModelUnknown, LimitReached, Overloaded),
        openapi_extra=takes(ref("messages")),
    )
    async def count(
        request: Request, response: Response, gateway: CurrentGateway, api_key: CurrentKey
    ) -> TokenCount:
        """Count the tokens of a message's prompt; a header says if the number is an estimate."""
        settings = gateway.settings
        with load.counted() as hold:
            if api_key.rate_limiter is not None:
                count_request(api_key.rate_limiter, gateway.clock, gateway.wall)
            raw = await read_small_body(
                request.scope,
                request.receive,
                limit_bytes=settings.body_limit_bytes,
                timeout_s=settings.body_timeout_s,
                hold=hold,
            )
            policy = gateway.policy_store.current
            messages_format = MessagesFormat(gateway.sealer)
            inspected = messages_format.inspect(raw, policy, gateway.fleet.view())
            api_key.check_model(inspected)
            count = await counter.count(inspected)
            if count.estimated:
                response.headers[ESTIMATE_HEADER] = "true"
            return {"input_tokens": count.tokens}

    return router
