"""Small requests that go on from large kept responses, and followers that read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from random import Random
from typing import Any, Final

from bench.attack.attack import WORKER_CODES, Answer, Tally, Target, play
from bench.attack.formats import RESPONSES
from bench.attack.http_client import chat, connection, encode, send
from bench.attack.key_abuse import create_key
from bench.attack.liar import MODEL
from bench.attack.lies import LIES, head, in_chunks
from tests.support.scripted_worker import DONE, chunk

CONVERSATIONS: Final = "/v1/conversations"
_PAGES: Final = ("", "/items?limit=100", "/items?limit=100&order=asc", "/input_items?limit=100")
_MODELS: Final = (MODEL, "demo")
_FOLLOWERS: Final = 60
_LOG_PIECES: Final = 2_000
_PIECE_CHARS: Final = 4_000
_UNREAD_S: Final = 5.0
"""Longer than the gateway waits for a client that reads nothing."""


def _items(chance: Random) -> list[dict[str, Any]]:
    """Return items of a few megabytes: many small ones, many parts, or long texts."""
    count, parts, chars = chance.choice(((9_000, 1, 20), (18, 1_000, 5), (18, 5, 30_000)))
    kind = chance.choice(("[],", "word ", '\\"', "€"))
    content = [{"type": "input_text", "text": (kind * chars)[:chars]}] * parts
    return [{"type": "message", "role": "user", "content": content}] * count


class Unfolding:
    """Reads of what is kept, and requests that go on from it, of a hundred bytes each."""

    name = "unfolding"
    promise = "what a request goes on from is bounded and counted as its body"
    share = 0.06

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        key = (await create_key(target, "unfolding"))["secret"]
        kept: list[str] = []
        """Paths of responses and conversations."""
        for number in range(4):
            kept += [await self._converse(target, key, rng, tally)]
            kept += [await self._respond(target, key, number, rng, tally)]

        async def one(chance: Random) -> None:
            path = chance.choice(kept)
            if chance.random() < 0.4:
                path += chance.choice(_PAGES)
                tally.begin(f"GET {path}")
                raw = encode(None, path=path, method="GET", key=key)
                tally.answer(await send(target.gateway_port, raw), path)
                return
            name = path.rpartition("/")[2]
            after: dict[str, Any] = {"input": "And?", "conversation": name}
            if path.startswith(RESPONSES):
                after = {"input": "And?", "previous_response_id": name}
                if chance.random() < 0.3:
                    ids = [f"msg_{name[5:]}{n:04x}i" for n in range(chance.choice((1, 17, 900)))]
                    after = {"input": [{"type": "item_reference", "id": one} for one in ids]}
            body = {
                "model": chance.choice(_MODELS),
                "max_output_tokens": 1,
                "store": False,
                **after,
            }
            raw = json.dumps(body).encode()
            if chance.random() < 0.2:
                raw = json.dumps({"model": body["model"], **after}).encode()
                counted = encode(raw, path=f"{RESPONSES}/input_tokens", key=key)
                tally.begin(f"input_tokens of {after!r:.80}")
                tally.answer(await send(target.gateway_port, counted), raw)
                return
            tally.begin(f"{after!r:.80}")
            answer = await chat(target, "unfold", raw, path=RESPONSES, key=key)
            tally.answer(answer, raw, allowed=WORKER_CODES)

        await play(one, rng, deadline_s, concurrency=6)
        for path in kept:
            await send(target.gateway_port, encode(None, path=path, method="DELETE", key=key))

    async def _converse(self, target: Target, key: str, rng: Random, tally: Tally) -> str:
        """Fill a conversation; return its path."""
        items = _items(rng)[:20]
        body = json.dumps({"items": items}).encode()
        created = await send(target.gateway_port, encode(body, path=CONVERSATIONS, key=key))
        tally.answer(created, f"a conversation of {len(body)} bytes")
        path = f"{CONVERSATIONS}/{created.json().get('id', created.code)}"
        for _ in range(4):
            tally.begin(f"{len(body) / 1e6:.1f} MB more in a conversation")
            answer = await send(target.gateway_port, encode(body, path=f"{path}/items", key=key))
            tally.answer(answer, "items of a conversation")
        return path

    async def _respond(
        self, target: Target, key: str, number: int, rng: Random, tally: Tally
    ) -> str:
        """Keep a response with a large input, which a worker answers that reads none."""
        text = f"unfold {number} {rng.getrandbits(48):x}"
        target.liar.lies[text] = LIES["honest"](False)
        items = [*_items(rng), {"type": "message", "role": "user", "content": text}]
        raw = json.dumps({"model": MODEL, "input": items}).encode()
        tally.begin(f"a response to {len(raw) / 1e6:.1f} MB")
        answer = await chat(target, "unfold", raw, path=RESPONSES, key=key)
        target.liar.lies.pop(text, None)
        tally.answer(answer, f"a response to {len(raw)} bytes", allowed=WORKER_CODES)
        name = answer.json()["id"] if answer.status == 200 else "resp_" + "0" * 48
        return f"{RESPONSES}/{name}"


class Followers:
    """Many clients that follow a long response in the background, and read nothing."""

    name = "followers"
    promise = "each is cut in time; the events are held once"
    share = 0.04

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        key = (await create_key(target, "followers"))["secret"]

        async def one(chance: Random) -> None:
            text = f"follow {chance.getrandbits(48):x}"
            piece = chunk({"content": "x" * _PIECE_CHARS})
            events = (piece for _ in range(_LOG_PIECES))
            ends = (chunk({}, "stop"), DONE)
            target.liar.lies[text] = [head(stream=True), *in_chunks(*events, *ends)]
            body = {"model": MODEL, "input": text, "background": True, "stream": True}
            raw = json.dumps(body).encode()
            tally.begin(f"{_FOLLOWERS} followers of {_LOG_PIECES * _PIECE_CHARS / 1e6:.0f} MB")
            path = ""
            async with connection(target.gateway_port) as opened:
                await opened.send(encode(raw, path=RESPONSES, key=key))
                begun = await opened.read_answer(until=b"response.created")
            tally.answer(Answer(begun.status), raw)
            if b'"id":"resp_' not in begun.body:
                tally.fail("no response in the background", begun)
                return
            name = begun.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
            path = f"{RESPONSES}/{name}"
            follow = encode(None, path=f"{path}?stream=true", method="GET", key=key)
            async with contextlib.AsyncExitStack() as stack:
                for _ in range(_FOLLOWERS):
                    follower = await stack.enter_async_context(
                        connection(target.gateway_port, limit=1)
                    )
                    await follower.send(follow)
                await asyncio.sleep(_UNREAD_S)
            delete = encode(None, path=path, method="DELETE", key=key)
            tally.answer(await send(target.gateway_port, delete), path)

        await play(one, rng, deadline_s, concurrency=1)
