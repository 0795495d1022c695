"""Anthropic's `context_management`: clear old tool results and old reasoning of a conversation.

https://docs.anthropic.com/en/docs/build-with-claude/context-editing. Tokens are estimated from the
text, since the edits come before a worker reads the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from paceline.request.fields import FieldError

Json = dict[str, Any]
Message = Mapping[str, Any]
FIELD = "context_management"
CLEARED = "[The result of this tool call was cleared to save context.]"
"""Takes the place of a cleared result, so that the model knows of it."""

_CHARS_A_TOKEN = 4
_MAX_EDITS = 8
_MAX_NAMES = 256
_Count = Annotated[int, Field(ge=0, le=2**31)]
_Names = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=_MAX_NAMES)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Tokens(_Strict):
    type: Literal["input_tokens"] = "input_tokens"
    value: _Count


class _ToolUses(_Strict):
    type: Literal["tool_uses"] = "tool_uses"
    value: _Count


class _ThinkingTurns(_Strict):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1, le=2**31)]


class _AllTurns(_Strict):
    type: Literal["all"]


class ClearToolUses(_Strict):
    """Clears the results of all tool uses but the last ones."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: Annotated[_Tokens | _ToolUses, Field(discriminator="type")] = _Tokens(value=100_000)
    keep: _ToolUses = _ToolUses(value=3)
    clear_at_least: _Tokens | None = None
    exclude_tools: _Names | None = None
    clear_tool_inputs: bool | _Names | None = None


class ClearThinking(_Strict):
    """Clears the reasoning of all turns of the assistant but the last ones."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | _AllTurns | _ThinkingTurns = _ThinkingTurns(
        type="thinking_turns", value=1
    )


class Compact(_Strict):
    """Summarizes a long conversation, which this gateway leaves to the client."""

    type: Literal["compact_20260112"]
    instructions: str | None = None
    pause_after_compaction: bool = False
    trigger: _Tokens | None = None


_Edit = Annotated[ClearToolUses | ClearThinking | Compact, Field(discriminator="type")]


class _ContextManagement(_Strict):
    edits: Annotated[tuple[_Edit, ...], Field(max_length=_MAX_EDITS)] = ()


_ADAPTER = TypeAdapter(_ContextManagement)
_COMPACT_AT_TOKENS = 150_000


class EditedMessages(NamedTuple):
    """Messages after the edits, and the edits as a response lists them."""

    messages: Sequence[Message]
    applied: Sequence[Json]


def edit_messages(given: object, messages: Sequence[Message]) -> EditedMessages:
    """Apply the field `context_management` to messages; raise `FieldError`."""
    try:
        edits = _ADAPTER.validate_json(to_json(given)).edits
    except ValidationError as invalid:
        problem = invalid.errors()[0]
        where = ".".join([FIELD, *map(str, problem["loc"])])
        raise FieldError(where, f"{where}: {problem['msg']}.") from None
    applied: list[Json] = []
    for edit in edits:
        match edit:
            case ClearToolUses():
                messages, cleared = _clear_tool_uses(edit, messages)
            case ClearThinking():
                messages, cleared = _clear_thinking(edit, messages)
            case Compact():
                _check_compaction(edit, messages)
                continue
        if any(cleared.values()):
            applied.append({"type": edit.type, **cleared})
    return EditedMessages(messages, applied)


def _check_compaction(edit: Compact, messages: Sequence[Message]) -> None:
    limit = edit.trigger.value if edit.trigger else _COMPACT_AT_TOKENS
    if _tokens_of(messages) > limit:
        raise FieldError(
            FIELD, f"{FIELD}: This gateway does not compact conversations; shorten this one."
        )


def _clear_tool_uses(
    edit: ClearToolUses, messages: Sequence[Message]
) -> tuple[Sequence[Message], Json]:
    uses = [block for block in _blocks(messages) if block.get("type") == "tool_use"]
    measure = _tokens_of(messages) if edit.trigger.type == "input_tokens" else len(uses)
    none = {"cleared_tool_uses": 0, "cleared_input_tokens": 0}
    if measure <= edit.trigger.value:
        return messages, none
    excluded = edit.exclude_tools or ()
    old = uses[: max(len(uses) - edit.keep.value, 0)]
    old_ids = {str(use.get("id")) for use in old if use.get("name") not in excluded}
    cleared: set[str] = set()

    def clear(block: Json) -> Json:
        kind, inputs = block.get("type"), edit.clear_tool_inputs or ()
        if kind == "tool_result" and (tool_use_id := str(block.get("tool_use_id"))) in old_ids:
            if block.get("content") != CLEARED:
                cleared.add(tool_use_id)
            return {**block, "content": CLEARED}
        if kind == "tool_use" and str(block.get("id")) in old_ids:
            empty = inputs is True or block.get("name") in inputs
            return {**block, "input": {}} if empty else block
        return block

    edited = [_with_blocks(message, clear) for message in messages]
    tokens = max(_tokens_of(messages) - _tokens_of(edited), 0)
    if edit.clear_at_least is not None and tokens < edit.clear_at_least.value:
        return messages, none
    return edited, {"cleared_tool_uses": len(cleared), "cleared_input_tokens": tokens}


def _clear_thinking(
    edit: ClearThinking, messages: Sequence[Message]
) -> tuple[Sequence[Message], Json]:
    none = {"cleared_thinking_turns": 0, "cleared_input_tokens": 0}
    if not isinstance(edit.keep, _ThinkingTurns):
        return messages, none
    turns = [index for index, message in enumerate(messages) if _thinks(message)]
    old = frozenset(turns[: max(len(turns) - edit.keep.value, 0)])
    edited = [
        _without_thinking(message) if index in old else message
        for index, message in enumerate(messages)
    ]
    tokens = max(_tokens_of(messages) - _tokens_of(edited), 0)
    return edited, {"cleared_thinking_turns": len(old), "cleared_input_tokens": tokens}


def _blocks(messages: Sequence[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield from (block for block in content if isinstance(block, Mapping))


def _with_blocks(message: Message, edit: Any) -> Message:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [edit(one) if isinstance(one, dict) else one for one in content]}


def _thinks(message: Message) -> bool:
    return any(block.get("type") == "thinking" for block in _blocks([message]))


def _without_thinking(message: Message) -> Message:
    kept = [
        one
        for one in message["content"]
        if not isinstance(one, Mapping) or one.get("type") not in ("thinking", "redacted_thinking")
    ]
    return {**message, "content": kept}


def _tokens_of(messages: Sequence[Message]) -> int:
    return sum(len(to_json(message)) for message in messages) // _CHARS_A_TOKEN
