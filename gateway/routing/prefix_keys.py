"""Keys of prompts: digests at the end of the system prompt and of the messages after it.

A conversation repeats its beginning in every request, so two prompts with the same key begin alike
up to there. The digests roll on from message to message: one pass over the text computes them all.
They are keyed by a secret of the fleet and reveal nothing of the text to others.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from pydantic_core import to_json

from gateway.strict_json import Pieces, encode_body
from gateway.types import Caller, Inspected
from paceline.protocol import salted_scope
from paceline.request.content import MEDIA_KINDS, MESSAGE_TEXTS
from paceline.request.json_pieces import json_bytes
from paceline.request.profile import RequestProfile
from policies.sections import PrefixPolicy

KEY_BYTES = 8
"""A collision costs time and no answer, because workers compare tokens."""
MAX_PROMPT_ENDS = 65
"""Ends that a request is looked up by: those of its last messages, and of its system prompt."""
CLAIMED_ENDS = 4
"""Ends of messages that workers and the index get: later turns begin with one of them."""
# The prefill of a shorter prompt takes hardly longer than a cache lookup.
_MIN_PREFIX_BYTES = 256
# With the JSON around it, a text of fewer characters stays below this, unless few are ASCII.
_MIN_TEXT_CHARS = 96
_SALT_BYTES = 16
_TEXT_BLOCK_CHARS = 4096
"""The distance of keys in a text to complete, which lacks messages."""
_MEDIA_BYTES = 1200
"""Of a picture of 300 tokens."""
_SHARED_FIELDS = ("tools", "chat_template_kwargs", "reasoning_effort")


class PrefixEnd(NamedTuple):
    """One place at which another prompt may stop to be the same."""

    key: bytes
    size_bytes: int
    """Size of the prompt up to here, in bytes of JSON; a picture counts as its tokens do."""
    messages: int
    """Number of messages up to here."""


class PrefixKeys(NamedTuple):
    """The keys of one prompt."""

    ends: tuple[PrefixEnd, ...] = ()
    """Longest first; that of the system prompt is last."""
    has_system: bool = False
    """Whether the last end is that of a system prompt."""
    unscoped: bytes = b""
    """Digest of the system prompt without the isolation scope; empty without one."""

    @property
    def claimed(self) -> tuple[PrefixEnd, ...]:
        """Return the last ends of messages and that of the system prompt, longest first."""
        if len(self.ends) <= CLAIMED_ENDS:
            return self.ends
        system = self.ends[-1:] if self.has_system else ()
        turns = self.ends[: len(self.ends) - len(system)]
        return (*turns[:CLAIMED_ENDS], *system)

    def is_system(self, end: PrefixEnd) -> bool:
        """Return whether an end of this prompt is that of its system prompt."""
        return self.has_system and end is self.ends[-1]


NO_KEYS = PrefixKeys()
"""Of a prompt that is too short to be worth a lookup."""


class PrefixHasher:
    """Derives the keys of prompts. All gateways of a fleet have the same secret."""

    def __init__(self, secret: bytes) -> None:
        key = blake2b(secret, person=b"paceline-prefix").digest()
        self._digest = blake2b(key=key, digest_size=KEY_BYTES)
        self._salt = blake2b(key=key, digest_size=_SALT_BYTES)

    def prefix_keys(self, inspected: Inspected, caller: Caller, rules: PrefixPolicy) -> PrefixKeys:
        """Return the keys of the beginnings that a request may share with others."""
        profile, body = inspected.profile, inspected.body
        if profile.exact:  # its worker reads all of it
            return NO_KEYS
        if profile.text_chars < _MIN_TEXT_CHARS and not profile.media:
            return NO_KEYS
        scope = rules.scope(caller.key, caller.team, inspected.cache_salt)
        messages = body.get("messages")
        if messages:
            return self._chat_keys(scope, profile, body, messages)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return self._text_keys(scope, profile.model, prompt)
        return NO_KEYS

    def cache_salt(self, caller: Caller, rules: PrefixPolicy, salt: str = "") -> str:
        """Return the name of a client's isolation scope; empty if all clients share prompts.

        `salt` is the field of the request, which names a part of that scope.
        """
        name = self._scope_digest(rules.scope(caller.key, caller.team))
        if not salt:
            return name
        return salted_scope(name, self._scope_digest(rules.scope(caller.key, caller.team, salt)))

    def _scope_digest(self, scope: str) -> str:
        if not scope:
            return ""
        digest = self._salt.copy()
        digest.update(f"cache_salt {scope}".encode())
        return digest.hexdigest()

    def _chat_keys(
        self,
        scope: str,
        profile: RequestProfile,
        body: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
    ) -> PrefixKeys:
        system = messages[0].get("content") if messages[0]["role"] == "system" else None
        shared = [body.get(field) for field in _SHARED_FIELDS]
        has_system = system is not None or shared[0] is not None
        uncounted = shared[1] or isinstance(system, list)  # parts may have fields of any size
        size_bytes = sys.maxsize if uncounted else profile.text_chars
        digest = self._digest.copy()
        size_bytes = _update(digest, encode_body([profile.model, *shared, system], size_bytes))
        unscoped = digest.digest()
        digest = self._digest.copy()
        digest.update(to_json([scope, unscoped.hex()]))
        begin = int(system is not None)
        found: list[PrefixEnd] = []
        if has_system and size_bytes >= _MIN_PREFIX_BYTES:
            found.append(PrefixEnd(digest.digest(), size_bytes, begin))
        else:
            has_system = False
        last = len(messages) - 1
        for index in range(begin, last + 1):
            message = messages[index]
            size_bytes += _update(digest, _canonical(message, profile)) - _media_bytes(message)
            # The results of several tools come together, so nothing ends between them.
            ends = index == last or "assistant" in (message["role"], messages[index + 1]["role"])
            if ends and size_bytes >= _MIN_PREFIX_BYTES:
                found.append(PrefixEnd(digest.digest(), size_bytes, index + 1))
        return _keys(found, unscoped if has_system else b"")

    def _text_keys(self, scope: str, model: str, prompt: str) -> PrefixKeys:
        digest = self._digest.copy()
        digest.update(to_json([scope, model]))
        size_bytes, found = 0, []
        for begin in range(0, len(prompt), _TEXT_BLOCK_CHARS):
            text = prompt[begin : begin + _TEXT_BLOCK_CHARS].encode()
            digest.update(text)
            size_bytes += len(text)
            if size_bytes >= _MIN_PREFIX_BYTES:
                found.append(PrefixEnd(digest.digest(), size_bytes, 0))
        return _keys(found, b"")


def _keys(found: list[PrefixEnd], unscoped: bytes) -> PrefixKeys:
    """Return the keys of these ends, the shortest first."""
    if not found:
        return NO_KEYS
    system = found[:1] if unscoped else []
    turns = found[len(system) :][-(MAX_PROMPT_ENDS - 1) :]
    return PrefixKeys((*reversed(turns), *system), bool(unscoped), unscoped)


def _update(digest: blake2b, pieces: Pieces) -> int:
    """Add pieces to a digest; return their size in bytes."""
    size_bytes = 0
    for piece in pieces:
        digest.update(piece)
        size_bytes += len(piece)
    return size_bytes


def _canonical(message: Mapping[str, Any], profile: RequestProfile) -> Pieces:
    """Return the parts of a message that a worker renders."""
    role, content = message["role"], message.get("content")
    if len(message) == 2 and isinstance(content, str):
        return encode_body((role, content), len(content))
    texts = [message.get(name) or None for name in MESSAGE_TEXTS]
    size_bytes = sys.maxsize if isinstance(content, list) else profile.text_chars
    return encode_body([role, content, *texts, message.get("tool_calls")], size_bytes)


def _media_bytes(message: Mapping[str, Any]) -> int:
    """Return by how much the media of a message, which count as sent, are larger than tokens."""
    content = message.get("content")
    if not isinstance(content, list):
        return 0
    media = [part for part in content if part.get("type") in MEDIA_KINDS]
    return json_bytes(media) - len(media) * _MEDIA_BYTES if media else 0
