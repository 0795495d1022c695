"""Responses and conversations that the gateway keeps, and the tokens of a request for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Query
from pydantic import BaseModel, Field
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from gateway import errors
from gateway.api.auth import CountedBody, CurrentGateway, CurrentHold, CurrentKey, data_router, part
from gateway.api.messages import CurrentCounter
from gateway.api.openapi import FOR_CLIENTS, WITH_BODY, failures, ref, takes
from gateway.protocols.responses.items import shown_item
from gateway.protocols.responses.request import Item, check_items, check_metadata, read_items
from gateway.proxy.handler import inspect
from gateway.responses.exchange import FOLLOWER_BYTES, ResponsesService
from gateway.responses.kept_items import KeptItems, named_items
from gateway.strict_json import encode_body, parse
from gateway.types import Json
from paceline.request.fields import FieldError
from policies.evaluate import ANY_MODEL

_KEPT = (
    *(*FOR_CLIENTS, errors.ResponseUnknown, errors.FieldInvalid, errors.RecordsUnwritable),
    errors.Overloaded,
)
_CHANGED = (*_KEPT, *WITH_BODY, errors.LimitReached)
_READS: Any = {"responses": failures(*_KEPT)}
_SHOWS: Any = {**_READS, "response_model": dict[str, Any]}
_ADDS: Any = {"responses": failures(*_CHANGED), "openapi_extra": takes({"type": "object"})}
_ENCRYPTED = "reasoning.encrypted_content"
Result = TypeVar("Result")
_NEW_ITEMS_LIMIT = 20
"""As at OpenAI."""

router = data_router("/v1/responses")
conversations = data_router("/v1/conversations")

CurrentService = Annotated[ResponsesService, part("responses")]


async def _kept(service: CurrentService, hold: CurrentHold) -> KeptItems:
    return service.kept(hold)


CurrentKept = Annotated[KeptItems, Depends(_kept)]


async def _owner(api_key: CurrentKey) -> str:
    return api_key.caller.key


Owner = Annotated[str, Depends(_owner)]


async def _conversation(conversation_id: str, owner: Owner, kept: CurrentKept) -> Json:
    return await kept.get("Conversation", owner, conversation_id)


KeptConversation = Annotated[Json, Depends(_conversation)]


async def _encrypted(include: Annotated[list[str], Query(max_length=16)] = []) -> bool:  # noqa: B006
    return _ENCRYPTED in include


Encrypted = Annotated[bool, Depends(_encrypted)]
"""Whether the client asks for encrypted reasoning."""


async def _fields(
    raw: CountedBody, kept: CurrentKept, gateway: CurrentGateway, hold: CurrentHold
) -> Json:
    async with gateway.inspection_thread.turn(hold, raw) as turn:
        kept.size_bytes = turn.size_bytes
        return await turn.run(parse, raw or b"{}")


Fields = Annotated[dict[str, Any], Depends(_fields)]


class PageRequest(BaseModel):
    """Which part of a list a client asks for."""

    limit: int = Field(20, ge=0, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str = ""
    """The id of the item before the page."""
    include: list[str] = Field(default_factory=list, max_length=16)


Page = Annotated[PageRequest, Query()]


class Deleted(TypedDict):
    """The deleted item."""

    id: str
    object: str
    deleted: bool


class InputTokens(TypedDict):
    """The tokens of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


@router.post("/compact", responses=failures(*FOR_CLIENTS, errors.EndpointUnserved))
async def compact() -> None:
    """Refuse to compact a conversation: only OpenAI's models read the result."""
    raise errors.EndpointUnserved(
        "This gateway does not serve /v1/responses/compact. Ask the model for a summary, or "
        "set 'truncation' to 'auto'."
    )


@router.post(
    "/input_tokens",
    responses=failures(*_CHANGED, errors.ModelUnknown),
    openapi_extra=takes(ref("responses")),
)
async def count_tokens(
    raw: CountedBody,
    response: Response,
    *,
    gateway: CurrentGateway,
    api_key: CurrentKey,
    counter: CurrentCounter,
    service: CurrentService,
    hold: CurrentHold,
) -> InputTokens:
    """Count the tokens of a request's prompt; a header says if the number is an estimate."""
    exchange = service.exchange()
    policy, caller = gateway.policy_store.current, api_key.caller
    async with gateway.inspection_thread.turn(hold, raw) as turn:
        body = {"model": ANY_MODEL, "input": []} | await turn.run(parse, raw)
        body.pop("personality", None)
        whole = turn.grown(await exchange.open(body, caller.key, hold, len(raw)))
        inspected = await inspect(gateway, exchange, body, policy, whole, caller=caller)
        encoded = await whole.run(encode_body, inspected.body, len(raw))
    api_key.check_model(inspected)
    tokens = await counter.count(inspected, encoded, exchange, response)
    return {"object": "response.input_tokens", "input_tokens": tokens}


@router.get("/{response_id}", **_SHOWS)
async def show(
    response_id: str,
    owner: Owner,
    *,
    service: CurrentService,
    kept: CurrentKept,
    hold: CurrentHold,
    encrypted: Encrypted,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Json | Response:
    """Show a kept response, or stream the events of one in the background again."""
    running = service.background(owner, response_id)
    if stream:
        if running is None or running.log is None:
            await kept.get("Response", owner, response_id)
            raise errors.FieldInvalid(
                "Only a background response of this gateway can be streamed again.",
                param="stream",
            )
        hold.add(FOLLOWER_BYTES)
        events = running.log.follow(starting_after)
        return StreamingResponse(events, media_type="text/event-stream")
    if running is not None and running.log is not None and not running.log.closed:
        return running.builder.response
    return _shown_response(await kept.get("Response", owner, response_id), encrypted=encrypted)


@router.delete("/{response_id}", **_READS)
async def delete(
    response_id: str, owner: Owner, service: CurrentService, kept: CurrentKept
) -> Deleted:
    """Delete a kept response; cancel it if it still runs in the background."""
    if (running := service.background(owner, response_id)) is not None:
        await running.cancel()
        service.forget(running)
    await kept.delete("Response", owner, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel", **_SHOWS)
async def cancel(
    response_id: str, owner: Owner, service: CurrentService, kept: CurrentKept
) -> Json:
    """Cancel a response in the background."""
    if (running := service.background(owner, response_id)) is not None:
        await running.cancel()
    record = await kept.get("Response", owner, response_id)
    if not record["response"]["background"]:
        raise errors.FieldInvalid(
            "Only a background response can be cancelled.", param="response_id"
        )
    if running is None and record["response"]["status"] in ("queued", "in_progress"):
        raise errors.FieldInvalid(
            "The response runs at another gateway, and only that gateway can cancel it.",
            param="response_id",
        )
    return _shown_response(record)


@router.get("/{response_id}/input_items", **_READS)
async def input_items(response_id: str, owner: Owner, kept: CurrentKept, page: Page) -> ItemList:
    """List the items of a response's input."""
    record = await kept.get("Response", owner, response_id)
    return _page(record["input"], page)


@conversations.post("", **_ADDS, response_model=dict[str, Any])
async def create_conversation(owner: Owner, kept: CurrentKept, fields: Fields) -> Json:
    """Create a conversation, with items or without."""
    _check_names(fields, "items", "metadata")
    items = await kept.run(_new_items, fields.get("items") or [])
    metadata = _checked(check_metadata, fields.get("metadata"))
    return _shown(await kept.create_conversation(owner, items, metadata))


@conversations.get("/{conversation_id}", **_SHOWS)
async def show_conversation(conversation: KeptConversation) -> Json:
    """Show a conversation."""
    return _shown(conversation)


@conversations.post("/{conversation_id}", **_ADDS, response_model=dict[str, Any])
async def update_conversation(
    conversation_id: str, owner: Owner, kept: CurrentKept, fields: Fields
) -> Json:
    """Replace the metadata of a conversation."""
    _check_names(fields, "metadata")
    metadata = _checked(check_metadata, fields.get("metadata"))

    def replace(conversation: Json) -> None:
        conversation["metadata"] = metadata

    return _shown(await kept.change(owner, conversation_id, replace))


@conversations.delete("/{conversation_id}", **_READS)
async def delete_conversation(conversation_id: str, owner: Owner, kept: CurrentKept) -> Deleted:
    """Delete a conversation; the responses in it stay."""
    await kept.delete("Conversation", owner, conversation_id)
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


@conversations.get("/{conversation_id}/items", **_READS)
async def list_items(conversation: KeptConversation, page: Page) -> ItemList:
    """List the items of a conversation."""
    return _page(conversation["items"], page)


@conversations.post("/{conversation_id}/items", **_ADDS)
async def add_items(
    conversation_id: str, owner: Owner, kept: CurrentKept, fields: Fields, encrypted: Encrypted
) -> ItemList:
    """Add items to a conversation."""
    _check_names(fields, "items")
    items = named_items(conversation_id, await kept.run(_new_items, fields.get("items")))
    await kept.add_items(owner, conversation_id, items)
    include = [_ENCRYPTED] if encrypted else []
    return _page(items, PageRequest(limit=100, order="asc", include=include))


@conversations.get("/{conversation_id}/items/{item_id}", **_SHOWS)
async def show_item(item_id: str, conversation: KeptConversation, encrypted: Encrypted) -> Json:
    """Show an item of a conversation."""
    items = conversation["items"]
    return shown_item(items[_place(items, item_id)], encrypted=encrypted)


@conversations.delete("/{conversation_id}/items/{item_id}", **_SHOWS)
async def delete_item(conversation_id: str, item_id: str, owner: Owner, kept: CurrentKept) -> Json:
    """Delete an item of a conversation."""

    def drop(conversation: Json) -> None:
        del conversation["items"][_place(conversation["items"], item_id)]

    return _shown(await kept.change(owner, conversation_id, drop))


def _shown_response(record: Json, *, encrypted: bool = False) -> Json:
    encrypted = record["encrypted"] or encrypted
    output = [shown_item(item, encrypted=encrypted) for item in record["output"]]
    return {**record["response"], "output": output}


def _shown(conversation: Json) -> Json:
    fields = {name: conversation[name] for name in ("id", "created_at", "metadata")}
    return {"object": "conversation", **fields}


def _page(items: Sequence[Item], asked: PageRequest) -> ItemList:
    ordered = list(items) if asked.order == "asc" else list(reversed(items))
    if asked.after:
        ordered = ordered[_place(ordered, asked.after) + 1 :]
    encrypted = _ENCRYPTED in asked.include
    page = [shown_item(item, encrypted=encrypted) for item in ordered[: asked.limit]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > asked.limit,
    }


def _place(items: Sequence[Item], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise errors.ResponseUnknown("Item", item_id)


def _new_items(given: Any) -> list[Item]:
    """Read the items of a body, which a request could have as its input too."""
    if not isinstance(given, list) or len(given) > _NEW_ITEMS_LIMIT:
        raise errors.FieldInvalid(
            f"'items' must be a list of at most {_NEW_ITEMS_LIMIT}.", param="items"
        )
    items = _checked(lambda: list(read_items(given, "items")))
    _checked(check_items, items, "items")
    return items


def _checked(read: Callable[..., Result], *given: Any) -> Result:
    """Return a function's result; raise `FieldInvalid` where it raises `FieldError`."""
    try:
        return read(*given)
    except FieldError as error:
        raise errors.FieldInvalid(error.message, param=error.param) from None


def _check_names(fields: Json, *known: str) -> None:
    for name, value in fields.items():
        if name not in known and value is not None:
            raise errors.FieldInvalid(f"Unknown parameter: '{name[:100]}'.", param=name[:100])
