"""Formats that become a chat: where the fields of the chat stand in the request of the client."""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gateway import errors
from gateway.protocols.base import renamed
from gateway.protocols.openai import InspectionContext, WireFormat
from gateway.protocols.sealing import Sealer
from gateway.types import Inspected, Json
from paceline.request.fields import FieldError
from paceline.request.keys import check_keys
from paceline.request.profile import Endpoint
from paceline.request.wires import CHAT_FIELDS

_IN_LIST = re.compile(
    r"(messages|tools)\[(?P<index>\d+)\](\.content\[(?P<part>\d+)\]|\.function)?(?P<rest>.*)"
)


@dataclass(slots=True)
class Chat:
    """A request for `/v1/chat/completions`."""

    body: Json
    names: Mapping[str, str]
    """The client's field, or its place, behind each field of the chat with another name."""
    places: Sequence[Sequence[str]] = ()
    """Of each message, the place in the client's request, then those of its parts."""
    tool_places: Sequence[str] = ()
    """The place of each tool."""
    left_out: Sequence[str] = ()
    """The place and the type of each tool that only the makers of the format run."""
    replaced: Sequence[str] = ()
    """The place and the type of each part that words replace."""
    same: Set[str] = frozenset()
    """Fields that the client gives under the name that they have in a chat."""
    ignored: Sequence[str] = ()
    """Fields of the client's request, and names inside of them, that change no answer."""

    def param(self, name: str) -> str:
        """Return the field of the client's request behind a field of the chat."""
        if name.partition(".")[0] in self.same:
            return name
        found = _IN_LIST.fullmatch(name)
        in_messages = name.startswith("messages")
        places = self.places if in_messages else [[place] for place in self.tool_places]
        if found is None or int(found["index"]) >= len(places):
            return own_name(name, self.names)
        place, *parts = places[int(found["index"])]
        part = int(found["part"]) if found["part"] else len(parts)
        place = parts[part] if part < len(parts) else place
        return self.inside(place, found["rest"], in_messages=in_messages)

    def inside(self, place: str, rest: str, *, in_messages: bool) -> str:
        """Return the client's name of a part of a message or a tool; `rest` is the chat's."""
        return place + rest


def own_name(name: str, own_names: Mapping[str, str]) -> str:
    """Return the client's name of a field, by those of whole fields, longer ones first."""
    for chat_name, own in own_names.items():
        if name == chat_name or name.startswith(f"{chat_name}."):
            return own + name[len(chat_name) :]
    return name


def same_fields(body: Mapping[str, Any]) -> Json:
    """Return the fields of a body that a chat has too."""
    return {
        name: value for name, value in body.items() if name in CHAT_FIELDS and value is not None
    }


def with_own(chat: Json, own: Mapping[str, Any], own_names: Mapping[str, str]) -> None:
    """Add values from a wire's own fields; raise `FieldError` if the chat's differ."""
    for name, value in own.items():
        if chat.setdefault(name, value) != value:
            problem = f"'{name}' and '{own_name(name, own_names)}' contradict each other."
            raise FieldError(name, problem)


def form_of(form: Any, place: str, **defaults: Any) -> Json:
    """Return the `response_format` of a chat for a form that has its schema beside its type."""
    check_keys(place, form)
    if not isinstance(form, Mapping):
        return {} if form is None else {"response_format": form}
    given = {name: value for name, value in form.items() if value is not None}
    kind = given.pop("type", None)
    if kind == "json_schema":
        return {"response_format": {"type": kind, "json_schema": defaults | given}}
    plain = {"type": kind} | {name: given[name] for name in given if name == "schema"}
    return {} if plain == {"type": "text"} else {"response_format": plain}


class TranslatingFormat(WireFormat):
    """One request in a format that becomes a chat, which any worker serves that serves chats."""

    def __init__(self, sealer: Sealer) -> None:
        super().__init__(Endpoint.CHAT)
        self._sealer = sealer
        self._scope = ""
        """The isolation scope of the request, which binds its reasoning."""
        self._param: Callable[[str], str] = str

    def _inspect_chat(self, chat: Chat, context: InspectionContext) -> Inspected:
        """Inspect a translated body, and name fields as the client does."""
        if chat.left_out and context.policy.tools.hosted == "refuse":
            at, _, kind = chat.left_out[0].partition(":")
            raise errors.ToolUnserved(kind, param=f"{at}.type")
        try:
            inspected = self._inspect_openai(chat.body, context)
        except FieldError as chat_error:
            error = chat_error.spelled({name: chat.param(name) for name in chat.names})
            invalid = errors.FieldInvalid(error.message, param=error.param)
            raise renamed(invalid, chat.param) from None
        self._param = chat.param
        profile = inspected.profile
        in_chat = (place.rpartition(":") for place in profile.replaced)
        replaced = [f"{chat.param(place)}:{kind}" for place, _, kind in in_chat]
        return inspected._replace(
            profile=profile._replace(
                ignored=(*chat.ignored, *chat.left_out),
                replaced=(*chat.replaced, *replaced),
                call_fields=tuple(map(chat.param, profile.call_fields)),
            )
        )

    def named(self, error: errors.GatewayError) -> errors.GatewayError:
        """Return an error after the inspection that names fields as the client knows them."""
        return renamed(error, self._param)

    def error_body(self, error: errors.GatewayError) -> bytes:
        """Return the body of an error response."""
        return errors.to_body(self.named(error))
