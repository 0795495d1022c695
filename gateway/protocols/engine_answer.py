"""One well-formed form of engines' answers, before any wire format reads them.

Engines cut, number and name the calls of tools in many ways, spell reasoning in two, and end an
answer with reasons of their own. Here an answer becomes one that OpenAI could have sent: calls
come one after another, each with an index, an id and a name of its own and with arguments as text;
calls that the request does not admit are left out, as if the engine had not made them;
reasoning has both of its names; and the reason of the end is one that clients know.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from gateway.protocols.base import CUT, AnswerMalformed, call_of, object_in, objects_in, text_in
from gateway.types import Json
from paceline.request.call_rules import CallRules

_CALL = "function_call"
CALLS = "tool_calls"
FORMS = (CALLS, _CALL, "reasoning", "reasoning_content")
"""Fields of a chunk, beside those of all streams, that may have another form."""
_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("stop", "eos", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_length"), "length"),
    **dict.fromkeys((CALLS, "tool_use", _CALL), CALLS),
    "content_filter": "content_filter",
}
"""By how engines spell them; an answer with any other reason has not ended well."""
_ID_LIMIT = 256
_MAX_CALLS = 1024
_HELD_CHARS = 16 * 1024 * 1024
_MAX_CHOICES = 1024


class FieldUnheld(AnswerMalformed):
    """The answer does not hold to a field of the request, which the message names."""


class EngineAnswer:
    """The state of one answer of an engine so far.

    `stem` is unique among answers; made ids begin with it. `model` is the client's name of the
    model. With `ends` an answer must say why it ended.
    """

    def __init__(self, stem: str, model: str, rules: CallRules, *, ends: bool = True) -> None:
        self._rules = rules
        self._ends = ends
        self._stem = stem
        self._model = model
        self.renames = False
        """The engine gives the model another name, so each chunk must be read."""
        self._calls: dict[int, _Calls] = {}

    def read(self, frame: Json, part: str) -> bool:
        """Give an answer its form, by its `message`, or a chunk by its `delta`.

        Return whether that has changed it. Raise `AnswerMalformed`.
        """
        changed: bool = frame.get("model", self._model) != self._model
        if changed:
            frame["model"] = self._model
            self.renames = True
        for place, choice in enumerate(objects_in(frame, "choices")):
            said, calls = object_in(choice, part), self._calls_of(choice, place)
            changed |= _spell_reasoning(said) or _CALL in said
            given, whole = _take_calls(said), part == "message"
            ended = (whole and self._ends) or choice.get("finish_reason")
            reason = _reason_of(choice) if ended else ""
            calls.add(given, whole=whole)
            if formed := [*calls.release(reason)]:
                choice[part] = {**said, CALLS: formed}
            elif given and whole:
                said["content"] = said.get("content") or ""
            for one in formed if whole else ():
                del one["index"]
            changed |= formed != given
            changed |= self._end(choice, calls, reason)
        return changed

    @property
    def left_out(self) -> int:
        """Return how many calls were left out."""
        return sum(len(calls.calls) - calls.kept for calls in self._calls.values())

    def _calls_of(self, choice: Mapping[str, Any], place: int) -> "_Calls":
        index = choice.get("index")
        number = index if type(index) is int else place
        if number not in self._calls:
            if len(self._calls) == _MAX_CHOICES:
                raise AnswerMalformed("choices")
            self._calls[number] = _Calls(f"call_{self._stem}{number:x}", self._rules)
        return self._calls[number]

    def _end(self, choice: Json, calls: "_Calls", reason: str) -> bool:
        """Set the reason of the end by the answer's content; return whether it changed."""
        if reason in ("stop", CALLS):
            reason = CALLS if calls.kept else "stop"
            if self._rules.forced and not calls.kept:
                raise FieldUnheld("tool_choice")
        given, choice["finish_reason"] = choice.get("finish_reason"), reason or None
        return bool(choice["finish_reason"] != given)


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
    place: int | None = None
    """The number that the client knows; -1: the call is left out; None: not decided yet."""

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
    """The calls of one choice, in the order of their beginnings.

    One is passed on at a time; pieces of later ones wait until it is complete.
    """

    stem: str
    rules: CallRules
    calls: list[_Call] = field(default_factory=list)
    open: int = 0
    """The number of the call that is passed on."""
    kept: int = 0
    """Calls that are passed on, and not left out."""

    def add(self, pieces: Any, *, whole: bool) -> None:
        """Add the pieces of one chunk, or `whole` calls; raise `AnswerMalformed`."""
        touched: list[_Call] = []
        for piece in pieces:
            function = object_in(piece, "function")
            name, arguments = text_in(function, "name"), _arguments_of(function)
            call = None if whole else self._find(piece, name, arguments, touched)
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

    def release(self, reason: str) -> Iterator[Json]:
        """Yield the pieces that may be passed on now; after the end, which has a reason, all.

        Raise `AnswerMalformed`.
        """
        while self.open < len(self.calls):
            call = self.calls[self.open]
            last = self.open + 1 == len(self.calls)
            cut = last and reason in CUT
            if reason and not (call.name or cut):
                raise AnswerMalformed(CALLS)
            if reason and not cut and not "".join(call.pieces).strip():
                call.add("{}")
            if call.name:
                yield from self._pass_on(call)
            if last or not (reason or call.whole):
                break
            self.open += 1

    def _pass_on(self, call: _Call) -> Iterator[Json]:
        """Yield the part of a call that the client lacks; the call has a name."""
        piece, call.sent = "".join(call.pieces[call.sent :]), len(call.pieces)
        if call.place is None and not self.rules.admits(call.name, self.kept):
            call.place = -1
        elif call.place is None:
            call.place, self.kept = self.kept, self.kept + 1
            yield {"index": call.place, **call_of(call.id, call.name, piece)}
        elif piece and call.place >= 0:
            yield {"index": call.place, "function": {"arguments": piece}}

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


def _take_calls(message: Json) -> list[Json]:
    """Remove the calls of a message or a delta, also one in the form of 2023; return them."""
    call, calls = object_in(message, _CALL), objects_in(message, CALLS)
    message.pop(_CALL, None)
    message.pop(CALLS, None)
    return calls or ([{"index": 0, "function": call}] if call else [])


def _reason_of(choice: Mapping[str, Any]) -> str:
    """Return the reason of an end as clients know it; raise `AnswerMalformed`."""
    given = choice.get("finish_reason")
    reason = _REASONS.get(given) if isinstance(given, str) else None
    if reason is None:
        # What it sent as the answer may be the text of an exception.
        raise AnswerMalformed("finish_reason")
    return reason


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
