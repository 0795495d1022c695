"""Responses and conversations that are kept for their clients, and the items in them.

A kept response has its input, its output and the ids of those before it, so that a long
conversation is read in two steps. Each belongs to the API key that made it.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway import errors
from gateway.inspection_thread import InspectionThread, P, T
from gateway.memory_budget import MemoryHold
from gateway.protocols.responses.items import kept_item
from gateway.protocols.responses.request import Item, ResponsesRequest
from gateway.state.expiring import ExpiringRecords
from gateway.strict_json import ITEMS_LIMIT, encode_body, footprint_bytes, parse_answer
from gateway.types import Json

_IDS = {
    "Response": re.compile(r"resp_[0-9a-f]{48}"),
    "Conversation": re.compile(r"conv_[0-9a-f]{48}"),
}
# An item names the response that it belongs to, its place there, and whether it was input; or it
# names the conversation to which a client added it.
_ITEM_ID = re.compile(r"[a-z]{2,4}_([0-9a-f]{48})(?:[0-9a-f]{4}i?|([0-9a-f]{10}c))")
_ENDED = ("completed", "incomplete")
_ANCESTORS_LIMIT = 1000
_HISTORY_LIMIT_BYTES = 32 * 1024 * 1024
"""Of all records that one request goes on from."""
_WRITES = 5
"""Attempts to add to a conversation that others change at the same time."""


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"


@dataclass(slots=True)
class KeptItems:
    """The kept responses and conversations, for one request.

    `now_s` returns seconds since 1970. `hold` gets the bytes that the request reads beside its
    body, and that it stores.
    """

    _records: ExpiringRecords
    _now_s: Callable[[], float]
    _thread: InspectionThread
    _hold: MemoryHold
    size_bytes: int = 0
    """Of the body, and of all that was read for it."""

    async def open(self, owner: str, request: ResponsesRequest) -> tuple[Sequence[Item], Json]:
        """Return the items before those of a request, and the record that it continues.

        Raise a `RequestRefused` if it does not exist.
        """
        if name := request.conversation_id:
            conversation = await self._record("Conversation", owner, name)
            if conversation is None:
                raise errors.PreviousUnknown("Conversation", name, param="conversation")
            return conversation["items"], conversation
        if name := request.previous_id:
            previous = await self._record("Response", owner, name)
            chain = [*await self._read(owner, previous["ancestors"] if previous else []), previous]
            if previous is None or None in chain or previous["response"]["status"] not in _ENDED:
                raise errors.PreviousUnknown(
                    "Previous response", name, param="previous_response_id"
                )
            items = [item for one in chain if one for item in (*one["input"], *one["output"])]
            return items, previous
        return (), {}

    async def resolve(
        self, owner: str, items: Sequence[Item], history: Sequence[Item]
    ) -> tuple[Item, ...]:
        """Return items with each reference replaced by its item, in the history or stored.

        Raise a `RequestRefused` for a second reference to an item: few bytes could stand for many.
        """
        wanted: set[str] = set()
        for index, item in enumerate(items):
            if (name := _referred(item)) in wanted:
                problem = "An earlier reference names the same item."
                raise errors.FieldInvalid(problem, param=f"input[{index}].id")
            if name:
                wanted.add(name)
        known = {item["id"]: item for item in history if item.get("id") in wanted}
        matches = filter(None, map(_ITEM_ID.fullmatch, wanted - known.keys()))
        names = {f"{'conv' if match[2] else 'resp'}_{match[1]}" for match in matches}
        for record in filter(None, await self._read(owner, sorted(names))):
            kept = record["items"] if "items" in record else [*record["input"], *record["output"]]
            known |= {item["id"]: item for item in kept if item["id"] in wanted}
        return tuple(known.get(_referred(item), item) for item in items)

    async def keep_response(
        self,
        owner: str,
        response: Json,
        request: ResponsesRequest,
        output: Sequence[Item],
        after: Json,
    ) -> bool:
        """Keep a response; return whether it is kept.

        `output` has the reasoning in its sealed form; `after` is the record that it goes on from.
        """
        ancestors: list[str] = []
        if response["previous_response_id"]:
            ancestors = [*after["ancestors"], response["previous_response_id"]]
            if len(ancestors) > _ANCESTORS_LIMIT:
                return False
        stem = response["id"].removeprefix("resp_")
        named = [kept_item(item, f"{stem}{index:04x}i") for index, item in enumerate(request.items)]
        record = {
            "response": {**response, "output": []},
            "input": named,
            "output": output,
            "ancestors": ancestors,
            "encrypted": request.encrypted,
        }
        data = await self._encoded(record)
        kept = bool(data) and await self._put(owner, response["id"], data)
        if kept and response["conversation"] and response["status"] in _ENDED:
            try:
                await self.add_items(owner, response["conversation"]["id"], [*named, *output])
            except (errors.FieldInvalid, errors.ResponseUnknown):
                return False
        return kept

    async def get(self, kind: str, owner: str, name: str) -> Json:
        """Return the record of a response or a conversation; raise `ResponseUnknown`."""
        record = await self._record(kind, owner, name)
        if record is None:
            raise errors.ResponseUnknown(kind, name)
        return record

    async def delete(self, kind: str, owner: str, name: str) -> None:
        """Delete a response or a conversation; raise `ResponseUnknown`."""
        if not (_IDS[kind].fullmatch(name) and await self._records.delete(owner, name)):
            raise errors.ResponseUnknown(kind, name)

    async def create_conversation(
        self, owner: str, items: Sequence[Item], metadata: Mapping[str, str]
    ) -> Json:
        """Create a conversation with these items."""
        name = new_id("conv")
        conversation: Json = {
            "id": name,
            "created_at": int(self._now_s()),
            "metadata": metadata,
            "items": named_items(name, items),
        }
        data = await self._encoded(conversation)
        if not data or not await self._put(owner, conversation["id"], data):
            raise errors.FieldInvalid("The conversation is too large.", param="items")
        return conversation

    async def change(self, owner: str, name: str, change: Callable[[Json], Any]) -> Json:
        """Change a conversation; raise `ResponseUnknown`, or any error of `change`."""
        for _ in range(_WRITES):
            with self._hold.another() as hold:
                before = (await self._records.get(owner, [name], hold.add))[0]
                if before is None or not _IDS["Conversation"].fullmatch(name):
                    raise errors.ResponseUnknown("Conversation", name)
                hold.add(await self._thread.run(len(before), footprint_bytes, before))
                self.size_bytes += len(before)
                conversation: Json = await self._thread.run(len(before), parse_answer, before)
                change(conversation)
                data = await self._encoded(conversation)
                if data and await self._put(owner, name, data, replaces=before):
                    return conversation
        raise errors.FieldInvalid(
            "The conversation is too large, or other requests are changing it at the same time.",
            param="conversation",
        )

    async def add_items(self, owner: str, name: str, items: Sequence[Item]) -> None:
        """Add items to a conversation; raise `ResponseUnknown`, or `FieldInvalid` for too many."""
        await self.change(owner, name, lambda one: _extend(one["items"], items))

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function whose time grows with what the request has read; return its result."""
        return await self._thread.run(self.size_bytes, work, *args, **kwargs)

    async def _put(
        self, owner: str, name: str, data: bytes, *, replaces: bytes | None = None
    ) -> bool:
        # Redis gets it compressed and sealed, with what it replaces.
        with self._hold.another() as hold:
            hold.add(2 * (len(data) + len(replaces or b"")))
            return await self._records.put(owner, name, data, replaces=replaces)

    async def _encoded(self, record: Json) -> bytes:
        """Return a record to store; nothing if it has too many values to be read again."""
        return await self.run(_encode, record, self.size_bytes)

    async def _record(self, kind: str, owner: str, name: str) -> Json | None:
        return (await self._read(owner, [name]))[0] if _IDS[kind].fullmatch(name) else None

    async def _read(self, owner: str, names: Sequence[str]) -> list[Json | None]:
        if not names:
            return []
        found = await self._records.get(owner, names, self._hold.add)
        size_bytes = sum(len(data) for data in found if data)
        if size_bytes > _HISTORY_LIMIT_BYTES:
            raise errors.FieldInvalid(
                f"A conversation may have at most {_HISTORY_LIMIT_BYTES} bytes."
            )
        self.size_bytes += size_bytes
        self._hold.add(await self._thread.run(size_bytes, _footprint_bytes, found))
        parsed = await self._thread.run(size_bytes, _parsed, found)
        self._hold.add(-size_bytes)  # what was read leaves with this call
        return parsed


def named_items(conversation_id: str, items: Sequence[Item]) -> list[Item]:
    """Return items with ids of their own, which name their conversation."""
    stem = conversation_id.removeprefix("conv_")
    return [kept_item(item, f"{stem}{secrets.token_hex(5)}c") for item in items]


def _footprint_bytes(found: Sequence[bytes | None]) -> int:
    return sum(footprint_bytes(data) for data in found if data)


def _encode(record: Json, size_bytes: int) -> bytes:
    data = b"".join(encode_body(record, size_bytes))
    try:
        footprint_bytes(data, bounded=True)
    except errors.BodyNotJson:
        return b""
    return data


def _parsed(found: Sequence[bytes | None]) -> list[Json | None]:
    return [None if data is None else parse_answer(data) for data in found]


def _extend(kept: list[Item], items: Sequence[Item]) -> None:
    if len(kept) + len(items) > ITEMS_LIMIT:
        raise errors.FieldInvalid(
            f"A conversation may have at most {ITEMS_LIMIT} items.", param="items"
        )
    kept += items


def _referred(item: Item) -> str:
    """Return the id that a reference names; empty for another item."""
    name = item.get("id") if item["type"] == "item_reference" else ""
    return name if isinstance(name, str) else ""
