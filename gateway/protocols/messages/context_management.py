"""Anthropic's `context_management`: clear old tool results and old reasoning of a conversation.

https://docs.anthropic.com/en/docs/build-with-claude/context-editing. Tokens are estimated from the
text, since the edits come before a worker reads the prompt.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from gateway.types import Json
from paceline.request.fields import FieldError

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


_COMPACT_AT_TOKENS = 150_000


def edit_messages(
    given: object, messages: Sequence[Message]
) -> tuple[Sequence[Message], Sequence[Json]]:
    """Apply the field `context_management` to messages; raise `FieldError`.

    Return the messages, and the edits as a response lists them.
    """
    try:
        edits = _ContextManagement.model_validate_json(to_json(given)).edits
    except ValidationError as invalid:
        problem = invalid.errors()[0]
        where = ".".join([FIELD, *map(str, problem["loc"])])
        raise FieldError(where, f"{where}: {problem['msg']}.") from None
    applied: list[Json] = []
    for edit in edits:
        least = 0
        match edit:
            case ClearToolUses():
                name, (edited, cleared) = "cleared_tool_uses", _clear_tool_uses(edit, messages)
                least = edit.clear_at_least.value if edit.clear_at_least else 0
            case ClearThinking():
                name, (edited, cleared) = "cleared_thinking_turns", _clear_thinking(edit, messages)
            case Compact():
                limit = edit.trigger.value if edit.trigger else _COMPACT_AT_TOKENS
                if _tokens_of(messages) > limit:
                    why = "This gateway does not compact conversations. Shorten this one."
                    raise FieldError(FIELD, f"{FIELD}: {why}")
                continue
        if edited is messages:
            continue
        tokens = max(_tokens_of(messages) - _tokens_of(edited), 0)
        if tokens >= least and (cleared or tokens):
            messages = edited
            applied.append({"type": edit.type, name: cleared, "cleared_input_tokens": tokens})
    return messages, applied


def _clear_tool_uses(
    edit: ClearToolUses, messages: Sequence[Message]
) -> tuple[Sequence[Message], int]:
    """Return the messages, and the number of results that are cleared now."""
    uses = [block for block in _blocks(messages) if block.get("type") == "tool_use"]
    measure = _tokens_of(messages) if edit.trigger.type == "input_tokens" else len(uses)
    if measure <= edit.trigger.value:
        return messages, 0
    excluded, inputs = edit.exclude_tools or (), edit.clear_tool_inputs or ()
    old = uses[: max(len(uses) - edit.keep.value, 0)]
    old_ids = {str(use.get("id")) for use in old if use.get("name") not in excluded}
    cleared: set[str] = set()

    def clear(block: Json) -> Json:
        match block.get("type"):
            case "tool_result" if (use_id := str(block.get("tool_use_id"))) in old_ids:
                if block.get("content") != CLEARED:
                    cleared.add(use_id)
                return {**block, "content": CLEARED}
            case "tool_use" if str(block.get("id")) in old_ids:
                empty = inputs is True or block.get("name") in inputs
                return {**block, "input": {}} if empty else block
        return block

    return [_with_blocks(message, clear) for message in messages], len(cleared)


def _clear_thinking(
    edit: ClearThinking, messages: Sequence[Message]
) -> tuple[Sequence[Message], int]:
    """Return the messages, and the number of turns without their reasoning."""
    if not isinstance(edit.keep, _ThinkingTurns):
        return messages, 0
    turns = [
        index
        for index, message in enumerate(messages)
        if any(block.get("type") == "thinking" for block in _blocks([message]))
    ]
    old = turns[: max(len(turns) - edit.keep.value, 0)]
    edited = [*messages]
    for index in old:
        content = [one for one in messages[index]["content"] if not _is_thinking(one)]
        edited[index] = {**messages[index], "content": content}
    return edited, len(old)


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


def _is_thinking(block: object) -> bool:
    kinds = ("thinking", "redacted_thinking")
    return isinstance(block, Mapping) and block.get("type") in kinds


def _tokens_of(messages: Sequence[Message]) -> int:
    return sum(len(to_json(message)) for message in messages) // _CHARS_A_TOKEN
