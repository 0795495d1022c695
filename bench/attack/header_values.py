"""Control characters and other scripts in each text that reaches a header, a comment or a log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any, Final
from urllib.parse import quote

from bench.attack.attack import WORKER_CODES, Answer, Tally, Target, play
from bench.attack.formats import MESSAGES, RESPONSES
from bench.attack.http_client import CHAT, connection, encode
from bench.attack.liar import LATE
from bench.attack.liar import MODEL as LIAR
from bench.attack.lies import LIES
from bench.attack.stack import ACCESS_LOG

_PLANTED: Final = b"x-planted"
_PIECES: Final = (
    *("\r\nx-planted: 1\r\n", "\nx-planted: 1\n", "\rx-planted: 1", "\r\n\r\nHTTP/1.1 200\r\n\r\n"),
    *("\n\ndata: x-planted\n\n", "\0", "\x7f", "\x1b[2Jx-planted", "\x85", "\u2028x-planted", "é"),
    *("日本語", "\U0001f40e", "\ufffd", "\t", " ", "%0d%0ax-planted: 1", "a" * 3000, "\\r\\n"),
)  # fmt: skip
_LINE: Final = re.compile(rb"[!-9;-~]+: [^\x00-\x1f\x7f]*")
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_NAMES: Final = (
    *("x-request-id", "x-paceline-priority", "x-client-request-id", "traceparent", "tracestate"),
    *("user-agent", "anthropic-version", "anthropic-beta", "idempotency-key", "x-forwarded-for"),
    *("origin", "openai-organization", "x-paceline-note", "x-paceline-author", "accept"),
)  # fmt: skip


def _text(chance: Random) -> str:
    return "".join(chance.choices(("a", "b", *_PIECES), k=chance.randint(1, 4)))


def _chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "user": text}


_FIELDS: Final[tuple[tuple[str, Callable[[str], dict[str, Any]]], ...]] = (
    (CHAT, lambda text: {**_chat(text), "model": text}),
    (CHAT, lambda text: {**_chat("x"), text: 1}),
    (CHAT, lambda text: {**_chat("x"), "service_tier": text, "metadata": {text: text}}),
    (CHAT, lambda text: {**_chat("x"), "tools": [{"type": text, "function": {"name": text}}]}),
    (CHAT, lambda text: {**_chat("x"), "modalities": [text], "cache_salt": text}),
    (MESSAGES, lambda text: {**_chat("x"), "tools": [{"type": text, "name": text}]}),
    (MESSAGES, lambda text: {**_chat("x"), "metadata": {"user_id": text}, text: {}}),
    (MESSAGES, lambda text: {**_chat("x"), "context_management": {"edits": [{"type": text}]}}),
    (RESPONSES, lambda text: {"input": "Hi", "tools": [{"type": text}], "include": [text]}),
    (RESPONSES, lambda text: {"input": "Hi", "previous_response_id": text, "truncation": text}),
    (RESPONSES, lambda text: {"input": [{"type": text, "id": text}], "prompt_cache_key": text}),
)


class HeaderValues:
    """Texts in fields and in headers, also of streams whose heads have gone out before."""

    name = "header values"
    promise = "one head for each answer, a line for each header, no text in place of an event"
    share = 0.04

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        async def one(chance: Random) -> None:
            path, make = chance.choice(_FIELDS)
            body: dict[str, Any] = {"model": "demo", **make(_text(chance))}
            if chance.random() < 0.3:
                body |= {"model": LIAR, "stream": True}
                self._answer_late(target, body, chance)
            headers = tuple(
                f"{name}: {chance.choice((str, quote))(_text(chance))}"
                for name in chance.choices(_NAMES, k=chance.choice((0, 0, 1, 2)))
            )
            query = f"?x={quote(_text(chance))}" if chance.random() < 0.2 else ""
            raw = json.dumps(body).encode()
            raw = encode(raw, path=path + query, key=target.key, headers=headers)
            async with connection(target.gateway_port) as opened:
                await opened.send(raw)
                received = b""
                while piece := await opened.read_some():
                    received += piece
            tally.inputs += 1
            if problem := _problem(received, tally, raw):
                tally.fail(problem, (raw, received[:300]))

        await play(one, rng, deadline_s, concurrency=12)
        for name in (ACCESS_LOG, "gateway.log"):
            log = await asyncio.to_thread((target.home / name).read_bytes)
            if found := _CONTROL.search(log):
                tally.fail(f"a control character in {name}", log[found.start() - 99 :][:200])
            if b"\n" + _PLANTED in log:
                tally.fail(f"a line of a client in {name}", "")

    def _answer_late(self, target: Target, body: dict[str, Any], chance: Random) -> None:
        """Let the worker answer once the head of the stream has gone out."""
        text = f"{LATE} {chance.getrandbits(48):x}"
        target.liar.lies[text] = LIES["honest"](True)
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["input"] = text


def _problem(received: bytes, tally: Tally, raw: bytes) -> str:
    """Return what is wrong with an answer, or an empty string."""
    if not received:
        tally.answers["none"] += 1
        return ""
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    if not status.startswith(b"HTTP/1.1 "):
        return "an answer without a status line"
    code = int(status.split()[1])
    tally.answer(Answer(code, body), raw, allowed=WORKER_CODES) if code >= 500 else (
        tally.answers.update({f"{code // 100}xx": 1})
    )
    if wrong := [line for line in lines if not _LINE.fullmatch(line)]:
        return f"a line of the head: {wrong[0]!r}"
    if any(line.lower().startswith(_PLANTED) for line in lines):
        return "a header of the client"
    if any(
        line.startswith((_PLANTED, b"data: " + _PLANTED)) for line in re.split(rb"[\r\n]+", body)
    ):
        return "a line of the client in a stream"
    return ""
