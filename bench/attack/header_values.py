"""Control characters and other scripts in each text that reaches a header, a comment or a log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final
from urllib.parse import quote

from bench.attack.attack import WORKER_CODES, Attack
from bench.attack.http_client import CHAT, MESSAGES, RESPONSES, connection, encode
from bench.attack.liar import LATE
from bench.attack.liar import MODEL as LIAR
from bench.attack.lies import LIES
from bench.attack.stack import ACCESS_LOG

_PLANTED: Final = b"x-planted"
_PIECES: Final = (
    *("\r\nx-planted: 1\r\n", "\nx-planted: 1\n", "\rx-planted: 1", "\r\n\r\nHTTP/1.1 200\r\n\r\n"),
    *("\n\ndata: x-planted\n\n", "\0", "\x7f", "\x1b[2Jx-planted", "\x85", "\u2028x-planted", "é"),
    *("日本語", "\U0001f40e", "\ufffd", "\t", " ", "%0d%0ax-planted: 1", "a" * 3000, "\\r\\n"),
)
_LINE: Final = re.compile(rb"[!-9;-~]+: [^\x00-\x1f\x7f]*")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_NAMES: Final = (
    *("x-request-id", "x-paceline-priority", "x-client-request-id", "traceparent", "tracestate"),
    *("user-agent", "anthropic-version", "anthropic-beta", "idempotency-key", "x-forwarded-for"),
    *("origin", "openai-organization", "x-paceline-note", "x-paceline-author", "accept"),
)
_CHAT: Final = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
_FIELDS: Final[tuple[tuple[str, Callable[[str], dict[str, Any]]], ...]] = (
    (CHAT, lambda text: {**_CHAT, "user": text, "model": text}),
    (CHAT, lambda text: {**_CHAT, text: 1}),
    (CHAT, lambda text: {**_CHAT, "service_tier": text, "metadata": {text: text}}),
    (CHAT, lambda text: {**_CHAT, "tools": [{"type": text, "function": {"name": text}}]}),
    (CHAT, lambda text: {**_CHAT, "modalities": [text], "cache_salt": text}),
    (MESSAGES, lambda text: {**_CHAT, "tools": [{"type": text, "name": text}]}),
    (MESSAGES, lambda text: {**_CHAT, "metadata": {"user_id": text}, text: {}}),
    (MESSAGES, lambda text: {**_CHAT, "context_management": {"edits": [{"type": text}]}}),
    (RESPONSES, lambda text: {"input": "Hi", "tools": [{"type": text}], "include": [text]}),
    (RESPONSES, lambda text: {"input": "Hi", "previous_response_id": text, "truncation": text}),
    (RESPONSES, lambda text: {"input": [{"type": text, "id": text}], "prompt_cache_key": text}),
)


def _text(chance: Random) -> str:
    return "".join(chance.choices(("a", "b", *_PIECES), k=chance.randint(1, 4)))


class HeaderValues(Attack):
    """Texts in fields and in headers, also of streams whose heads have gone out before."""

    name = "header values"
    promise = "one head for each answer, a line for each header, no text in place of an event"
    share = 0.04
    concurrency = 12

    async def one(self, chance: Random) -> None:
        path, make = chance.choice(_FIELDS)
        body: dict[str, Any] = {"model": "demo", **make(_text(chance))}
        if chance.random() < 0.3:  # the worker answers once the head of the stream has gone out
            text = f"{LATE} {chance.getrandbits(48):x}"
            self.target.liar.lies[text] = LIES["honest"](True)
            body |= {"model": LIAR, "stream": True}
            late = {"messages": [{"role": "user", "content": text}]}
            body |= {"input": text} if path == RESPONSES else late
        headers = tuple(
            f"{name}: {chance.choice((str, quote))(_text(chance))}"
            for name in chance.choices(_NAMES, k=chance.choice((0, 0, 1, 2)))
        )
        query = f"?x={quote(_text(chance))}" if chance.random() < 0.2 else ""
        encoded = json.dumps(body).encode()
        raw = encode(encoded, path=path + query, key=self.target.key, headers=headers)
        self.tally.begin(raw)
        async with connection(self.target.gateway_port) as opened:
            await opened.send(raw)
            received = b""
            while piece := await opened.read_some():
                received += piece
        if problem := self._problem(received, raw):
            self.tally.fail(problem, (raw, received[:300]))

    async def finish(self) -> None:
        for name in (ACCESS_LOG, "gateway.log"):
            log = await asyncio.to_thread((self.target.home / name).read_bytes)
            if found := _CONTROL.search(log):
                shown = log[max(0, found.start() - 99) :][:200]
                self.tally.fail(f"a control character in {name}", shown)
            if b"\n" + _PLANTED in log:
                self.tally.fail(f"a line of a client in {name}", "")

    def _problem(self, received: bytes, raw: bytes) -> str:
        """Count an answer; return what is wrong with it, or an empty string."""
        head, _, body = received.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        if received and not status.startswith(b"HTTP/1.1 "):
            return "an answer without a status line"
        code = int(status.split()[1]) if received else 0
        self.count(code, body, raw, allowed=WORKER_CODES)
        if wrong := [line for line in lines if not _LINE.fullmatch(line)]:
            return f"a line of the head: {wrong[0]!r}"
        if any(line.lower().startswith(_PLANTED) for line in lines):
            return "a header of the client"
        events = re.split(rb"[\r\n]+", body)
        if any(line.startswith((_PLANTED, b"data: " + _PLANTED)) for line in events):
            return "a line of the client in a stream"
        return ""
