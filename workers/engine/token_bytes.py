"""The bytes that a token stands for: many characters take several tokens, and no token is one."""

from __future__ import annotations

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token; where its spelling tells none, those of its text.

    How a vocabulary is spelled is tried, since no tokenizer says it: letter for byte (BPE on
    bytes), or with a mark for a space and `<0xE2>` for a byte (SentencePiece).
    """
    text = str(tokenizer.decode([token]))
    spelled = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(spelled, str) or spelled == text:
        return text.encode()
    if all(letter in _BYTES for letter in spelled):
        raw = bytes(_BYTES[letter] for letter in spelled)
        if _alike(raw.decode(errors="replace"), text):
            return raw
    if fallback := _FALLBACK.fullmatch(spelled):
        return bytes.fromhex(fallback[1])
    spaced = spelled.replace(_SPACE, " ")
    return (spaced if _alike(spaced, text) else text).encode()


def _alike(spelled: str, text: str) -> bool:
    """Compare but for the spaces that many a tokenizer leaves out where a text begins."""
    return spelled.lstrip(" ") == text.lstrip(" ")
