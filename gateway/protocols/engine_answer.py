"""One well-formed form of what engines answer, before any wire format reads it.

Engines cut, number and name the calls of tools in many ways, spell reasoning in two, and end an
answer with reasons of their own. Here an answer becomes one that OpenAI could have sent: calls
come one after another, each with an index, an id and a name of its own and with arguments as text;
reasoning has both of its names; and the reason of the end is one that clients know.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from pydantic_core import from_json, to_json

from gateway.protocols.base import AnswerMalformed, call_of, object_in, objects_in, text_in
from gateway.types import Json

CALLS = "tool_calls"
FORMS = (CALLS, "reasoning", "reasoning_content")
"""Fields of a chunk, beside those of all streams, that may have another form."""
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("stop", "eos", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_length"), "length"),
    **dict.fromkeys((CALLS, "tool_use", "function_call"), CALLS),
    "content_filter": "content_filter",
}
"""By how engines spell them; an answer with any other reason has not ended well."""
_ID_LIMIT = 256
_MAX_CALLS = 1024
_HELD_CHARS = 16 * 1024 * 1024
_MAX_CHOICES = 1024


class FieldUnheld(AnswerMalformed):
    """The answer does not hold to a field of the request, which the message names."""


class CallRules(NamedTuple):
    """The calls that a request prescribes, which many engines take and ignore."""

    one_of: frozenset[str] = frozenset()
    """The answer must call one of these tools; empty: or none."""
    single: bool = False
    """The answer may have one call at most."""

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the rules of a checked body."""
        one_of: tuple[str, ...] = ()
        match body.get("tool_choice"):
            case {"function": {"name": str() as name}}:
                one_of = (name,)
            case "required":
                one_of = tuple(tool["function"]["name"] for tool in body.get("tools") or ())
        return cls(frozenset(one_of), body.get("parallel_tool_calls") is False)

    def check(self, names: Collection[str]) -> None:
        """Raise `FieldUnheld` if an answer that has ended may not have these calls."""
        if self.one_of and not (names and self.one_of.issuperset(names)):
            raise FieldUnheld("tool_choice")
        if self.single and len(names) > 1:
            raise FieldUnheld("parallel_tool_calls")


class EngineAnswer:
    """What an engine has told of one answer so far.

    `stem` is unique among answers; made ids begin with it. `model` is the name by which the client
    knows the model.
    """

    def __init__(self, stem: str, model: str, rules: CallRules = CallRules()) -> None:  # noqa: B008
        self._rules = rules
        self._stem = stem
        self._model = model
        self.renames = False
        """The engine gives the model another name, so each chunk must be read."""
        self._calls: dict[int, _Calls] = {}

    def read_whole(self, answer: Json) -> None:
        """Give a whole answer its form; raise `AnswerMalformed`."""
        for place, choice in enumerate(objects_in(answer, "choices")):
            message, calls = object_in(choice, "message"), self._calls_of(choice, place)
            _spell_reasoning(message)
            if given := objects_in(message, CALLS):
                for one in given:
                    calls.begin(one)
                formed = [*calls.release(ended=True)]
                for one in formed:
                    del one["index"]
                choice["message"] = {**message, CALLS: formed}
            self._end(choice, calls, ended=True)

    def read_chunk(self, frame: Json) -> bool:
        """Give a chunk its form; return whether that has changed it. Raise `AnswerMalformed`."""
        changed: bool = frame.get("model", self._model) != self._model
        if changed:
            frame["model"] = self._model
            self.renames = True
        for place, choice in enumerate(objects_in(frame, "choices")):
            delta, calls = object_in(choice, "delta"), self._calls_of(choice, place)
            changed |= _spell_reasoning(delta)
            given = objects_in(delta, CALLS)
            calls.add(given)
            ended = bool(choice.get("finish_reason"))
            formed = [*calls.release(ended=ended)]
            if formed != [*given]:
                changed = True
                choice["delta"] = delta = {**delta, CALLS: formed}
                if not formed:
                    del delta[CALLS]
            changed |= self._end(choice, calls, ended=ended)
        return changed

    def _calls_of(self, choice: Mapping[str, Any], place: int) -> _Calls:
        index = choice.get("index")
        number = index if type(index) is int else place
        if number not in self._calls:
            if len(self._calls) == _MAX_CHOICES:
                raise AnswerMalformed("choices")
            self._calls[number] = _Calls(f"call_{self._stem}{number:x}")
        return self._calls[number]

    def _end(self, choice: Json, calls: _Calls, *, ended: bool) -> bool:
        """Name the reason of the end by what the answer has; return whether it changed."""
        given = choice.get("finish_reason")
        reason = _REASONS.get(given) if ended and isinstance(given, str) else None
        if ended and reason is None:
            # What it sent as the answer may be the text of an exception.
            raise AnswerMalformed("finish_reason")
        if reason in ("stop", CALLS):
            reason = CALLS if calls.calls else "stop"
            self._rules.check([one.name for one in calls.calls])
        choice["finish_reason"] = reason
        return bool(reason != given)


@dataclass(slots=True, eq=False)
class _Call:
    id: str
    given_id: str
    index: int | None
    name: str
    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    sent: int = 0
    """Pieces that have been passed on."""
    begun: bool = False
    """It has been passed on."""

    @property
    def whole(self) -> bool:
        """Return whether its arguments are complete."""
        try:
            ends = "".join(self.pieces[-2:]).rstrip().endswith("}")
            return ends and from_json("".join(self.pieces)) is not None
        except ValueError:
            return False

    def add(self, piece: str) -> None:
        """Add a piece of the arguments."""
        if piece:
            self.pieces.append(piece)
            self.chars += len(piece)

    def repeats(self, piece: str) -> bool:
        """Return whether a piece is the arguments once more, which are whole."""
        return len(piece) == self.chars and "".join(self.pieces) == piece and self.whole


@dataclass(slots=True)
class _Calls:
    """The calls of one choice, in the order in which they began.

    One is passed on at a time; what comes of later ones meanwhile waits until it is whole.
    """

    stem: str
    calls: list[_Call] = field(default_factory=list)
    open: int = 0
    """The number of the call that is passed on."""

    def add(self, pieces: Any) -> None:
        """Add the pieces of one chunk; raise `AnswerMalformed`."""
        touched: list[_Call] = []
        for piece in pieces:
            function = object_in(piece, "function")
            name, arguments = text_in(function, "name"), _arguments_of(function)
            call = self._find(piece, name, arguments, touched)
            if call is None:
                call = self.begin(piece)
            elif not call.repeats(arguments):
                call.name = call.name or name
                call.add(arguments)
                if arguments.strip() and self.calls.index(call) < self.open:
                    raise AnswerMalformed(CALLS)
            touched.append(call)
        if sum(call.chars for call in self.calls) > _HELD_CHARS:
            raise AnswerMalformed(CALLS)

    def begin(self, piece: Mapping[str, Any]) -> _Call:
        """Begin a call; raise `AnswerMalformed`."""
        function, index = object_in(piece, "function"), piece.get("index")
        given = piece.get("id")
        given_id = given if isinstance(given, str) else ""
        usable = 0 < len(given_id) <= _ID_LIMIT and all(one.id != given_id for one in self.calls)
        call = _Call(
            id=given_id if usable else f"{self.stem}{len(self.calls):x}",
            given_id=given_id,
            index=index if type(index) is int else None,
            name=text_in(function, "name"),
        )
        call.add(_arguments_of(function))
        self.calls.append(call)
        if len(self.calls) > _MAX_CALLS:
            raise AnswerMalformed(CALLS)
        return call

    def release(self, *, ended: bool) -> Iterator[Json]:
        """Yield what may be passed on now; after the end, all. Raise `AnswerMalformed`."""
        while self.open < len(self.calls):
            call = self.calls[self.open]
            if ended and not call.name:
                raise AnswerMalformed(CALLS)
            if ended and not "".join(call.pieces).strip():
                call.add("{}")
            if call.name:
                piece, call.sent = "".join(call.pieces[call.sent :]), len(call.pieces)
                if not call.begun:
                    call.begun = True
                    yield {"index": self.open, **call_of(call.id, call.name, piece)}
                elif piece:
                    yield {"index": self.open, "function": {"arguments": piece}}
            last = self.open + 1 == len(self.calls)
            if last or not (ended or call.whole):
                break
            self.open += 1

    def _find(
        self, piece: Mapping[str, Any], name: str, arguments: str, touched: list[_Call]
    ) -> _Call | None:
        """Return the call that a piece continues; None if it begins one."""
        given_id, index = piece.get("id"), piece.get("index")
        index = index if type(index) is int else None
        of_index = [one for one in self.calls if index is None or one.index == index]
        if given_id:
            known = [one for one in of_index if one.given_id == given_id]
            if not known and of_index and not of_index[-1].given_id and not of_index[-1].whole:
                known = of_index[-1:]  # its id comes late
            of_index = known
        call = of_index[-1] if of_index else None
        if call is None or not name or not call.name:
            return call
        # Some servers repeat the name with each piece, or the whole call at its end.
        if name != call.name or (not given_id and any(one is call for one in touched)):
            return None
        return None if call.whole and not call.repeats(arguments) else call


def _arguments_of(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return to_json(arguments, inf_nan_mode="null").decode()
    return text_in(function, "arguments")


def _spell_reasoning(message: Any) -> bool:
    """Spell reasoning in both ways that clients know; return whether that changed anything."""
    changed = False
    for name, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
        text = message.get(name)
        if isinstance(text, str) and text and not message.get(other):
            message[other] = text
            changed = True
    return changed
