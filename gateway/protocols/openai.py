"""Bring chat messages into the one form that every worker gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# Between the texts of merged messages, so that none runs into the next.
_BETWEEN_MESSAGES = "\n\n"
_MERGING_ROLES = frozenset(("user", "assistant"))
_SYSTEM_ROLES = frozenset(("system", "developer"))


def normalise(messages: Sequence[Message]) -> list[Message]:
    """Hoist and merge the system messages, then merge plain neighbours of one role.

    Many chat templates refuse a system message that is not the first, or two of one role in a row;
    and the same words must give the same prompt, or no cache of system prompts can help.
    Doing it twice changes nothing.
    """
    system = [message for message in messages if message["role"] in _SYSTEM_ROLES]
    others = [message for message in messages if message["role"] not in _SYSTEM_ROLES]
    head = [{"role": "system", "content": _system_content(system)}] if system else []
    return head + _merge_neighbours(others)


def _system_content(messages: Sequence[Message]) -> str | list[Any]:
    contents = [message.get("content") or "" for message in messages]
    if all(isinstance(content, str) for content in contents):
        return _BETWEEN_MESSAGES.join(contents)
    parts: list[Any] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last["role"] == message["role"]
            and _plain(last)
            and _plain(message)
        ):
            content = last["content"] + _BETWEEN_MESSAGES + message["content"]
            merged[-1] = {"role": message["role"], "content": content}
        else:
            merged.append(message)
    return merged


def _plain(message: Message) -> bool:
    """Say whether a message is nothing but text: no parts, tool calls, names or other fields."""
    return (
        message["role"] in _MERGING_ROLES
        and isinstance(message.get("content"), str)
        and not any(
            value is not None for name, value in message.items() if name not in ("role", "content")
        )
    )


# These are not OpenAI's, and strict servers refuse fields that they do not know. At these values
# they change nothing, so they can be left out.
_NEUTRAL = {"top_k": 0, "min_p": 0.0}


def for_openai(body: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a server that knows nothing of us need not know."""
    return {
        name: value
        for name, value in body.items()
        if name not in _NEUTRAL or value != _NEUTRAL[name]
    }
