"""Small requests that go on from large kept responses, and followers that read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from random import Random
from typing import Any, Final

from bench.attack.attack import INPUT_TOKENS, WORKER_CODES, Attack
from bench.attack.http_client import RESPONSES, Answer, connection, encode, send
from bench.attack.liar import MODEL
from bench.attack.lies import LIES, head, in_chunks
from tests.support.scripted_worker import DONE, chunk

_CONVERSATIONS: Final = "/v1/conversations"
_PAGES: Final = ("", "/items?limit=100", "/items?limit=100&order=asc", "/input_items?limit=100")
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


class Kept(Attack):
    """An attack with a key of its own, on what is kept for it."""

    async def prepare(self) -> None:
        self.key = (await self.target.create_key(self.name))["secret"]

    async def call(
        self, path: str, body: Any = None, method: str = "", given: Any = None
    ) -> Answer:
        """Send a request to a route that keeps what it gets, and count its answer."""
        self.tally.begin(given or f"{method} {path}")
        answer = await self.target.request(path, body, method=method, key=self.key)
        self.tally.answer(answer, given or path)
        return answer


class Unfolding(Kept):
    """Reads of what is kept, and requests that go on from it, of a hundred bytes each."""

    name = "unfolding"
    promise = "what a request goes on from is bounded and counted as its body"
    share = 0.06
    concurrency = 6

    async def prepare(self) -> None:
        await super().prepare()
        self._kept: list[str] = []
        """Paths of responses and conversations."""
        for number in range(4):
            self._kept += [await self._converse(), await self._respond(number)]

    async def one(self, chance: Random) -> None:
        path = chance.choice(self._kept)
        if chance.random() < 0.4:
            await self.call(path + chance.choice(_PAGES))
            return
        name = path.rpartition("/")[2]
        after: dict[str, Any] = {"input": "And?", "conversation": name}
        if path.startswith(RESPONSES):
            after = {"input": "And?", "previous_response_id": name}
            if chance.random() < 0.3:
                ids = [f"msg_{name[5:]}{n:04x}i" for n in range(chance.choice((1, 17, 900)))]
                after = {"input": [{"type": "item_reference", "id": one} for one in ids]}
        body = {"model": chance.choice((MODEL, "demo")), **after}
        if chance.random() < 0.2:
            await self.call(INPUT_TOKENS, body, given=f"input_tokens of {after!r:.80}")
            return
        body |= {"max_output_tokens": 1, "store": False}
        await self.ask(body, RESPONSES, key=self.key, allowed=WORKER_CODES)

    async def finish(self) -> None:
        for path in self._kept:
            await self.target.request(path, method="DELETE", key=self.key)

    async def _converse(self) -> str:
        items = {"items": _items(self.rng)[:20]}
        created = await self.call(_CONVERSATIONS, items, given="a conversation")
        path = f"{_CONVERSATIONS}/{created.json().get('id', created.code)}"
        for _ in range(4):
            await self.call(f"{path}/items", items, given="items of a conversation")
        return path

    async def _respond(self, number: int) -> str:
        """Keep a response with a large input, which a worker answers that reads none."""
        text = f"unfold {number} {self.rng.getrandbits(48):x}"
        self.target.liar.lies[text] = LIES["honest"](False)
        items = [*_items(self.rng), {"type": "message", "role": "user", "content": text}]
        body = {"model": MODEL, "input": items}
        given = "a large response"
        answer = await self.ask(body, RESPONSES, key=self.key, given=given, allowed=WORKER_CODES)
        self.target.liar.lies.pop(text, None)
        name = answer.json()["id"] if answer.status == 200 else "resp_" + "0" * 48
        return f"{RESPONSES}/{name}"


class Followers(Kept):
    """Many clients that follow a long response in the background, and read nothing."""

    name = "followers"
    promise = "each is cut in time; the events are held once"
    share = 0.04
    concurrency = 1

    async def one(self, chance: Random) -> None:
        port = self.target.gateway_port
        text = f"follow {chance.getrandbits(48):x}"
        events = [chunk({"content": "x" * _PIECE_CHARS})] * _LOG_PIECES
        answer = in_chunks(*events, chunk({}, "stop"), DONE)
        self.target.liar.lies[text] = [head(stream=True), *answer]
        body = {"model": MODEL, "input": text, "background": True, "stream": True}
        size = f"{_LOG_PIECES * _PIECE_CHARS / 1e6:.0f} MB"
        self.tally.begin(f"{_FOLLOWERS} followers of {size}")
        async with connection(port) as opened:
            await opened.send(encode(json.dumps(body).encode(), path=RESPONSES, key=self.key))
            begun = await opened.read_answer(until=b"response.created")
        self.tally.answer(Answer(begun.status), body)
        if b'"id":"resp_' not in begun.body:
            self.tally.fail("no response in the background", begun)
            return
        name = begun.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
        path = f"{RESPONSES}/{name}"
        follow = encode(None, path=f"{path}?stream=true", method="GET", key=self.key)
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(_FOLLOWERS):
                follower = await stack.enter_async_context(connection(port, limit=1))
                await follower.send(follow)
            await asyncio.sleep(_UNREAD_S)
        delete = encode(None, path=path, method="DELETE", key=self.key)
        self.tally.answer(await send(port, delete), path)
