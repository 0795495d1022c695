"""Budgets of tokens against streams that are left, wherever their usage comes late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from bench.attack.attack import Attack, request
from bench.attack.http_client import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    connection,
    encode,
    prompt_fields,
)
from bench.attack.neighbour import MODEL
from bench.harness.parts import JOIN_TOKEN

_BUDGET: Final = 4000
_OVER_BUDGET: Final = 1.1
"""At most this share of a budget may be used: the last stream is charged when it ends."""
_REFUSED: Final = 3
_REQUESTS: Final = 60
_SETTLED_S: Final = 20.0
_IN_FLIGHT: Final = 100
"""Tokens of the neighbour's requests that the worker has counted and the gateway has not."""
_WORDS: Final = "the of and to a in is it you that he was for on are with as his they".split()
_GRAMMAR: Final = "start: s\ns: s s | A\nA: /[a-z ]/"


def random_text(chance: Random, words: int) -> str:
    return " ".join(chance.choices(_WORDS, k=words))


def _chat(chance: Random, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    text = random_text(chance, chance.choice((5, 50, 300)))
    return {**prompt_fields(path, text, chance.choice((8, 64, 200))), **fields}


def _batch(chance: Random, **fields: Any) -> dict[str, Any]:
    count = chance.choice((2, 8, 32))
    prompts = [random_text(chance, chance.choice((5, 100))) for _ in range(count)]
    return {"prompt": prompts, "max_tokens": chance.choice((1, 8)), **fields}


_WAYS: Final[Mapping[str, tuple[str, Callable[[Random], dict[str, Any]]]]] = {
    "chat": (CHAT, _chat),
    "several answers": (CHAT, lambda chance: _chat(chance, n=4)),
    "log probabilities": (CHAT, lambda chance: _chat(chance, logprobs=True, top_logprobs=20)),
    "costly grammars": (CHAT, lambda chance: _chat(chance, guided_grammar=_GRAMMAR)),
    "batches": (COMPLETIONS, _batch),
    "echoes": (COMPLETIONS, lambda chance: _batch(chance, echo=True, logprobs=20)),
    "messages": (MESSAGES, lambda chance: _chat(chance, MESSAGES)),
    "responses": (RESPONSES, lambda chance: _chat(chance, RESPONSES)),
}
"""Each with its path."""


class Budgets(Attack):
    """Streams that are left after some events, and others, by keys with a budget of tokens."""

    name = "budgets"
    promise = "the worker uses no more than is charged, and no budget is passed by 10%"
    share = 0.06

    async def prepare(self) -> None:
        """Ask once in each way, for what a worker loads for the first one: it stays."""
        for path, make in _WAYS.values() if not self.tally.inputs else ():
            await self.ask({"model": MODEL, **make(self.rng)}, path)

    async def run(self) -> None:
        await self.prepare()
        ways = list(_WAYS)
        self.rng.shuffle(ways)
        for way in ways:
            await self._spend(way, Random(self.rng.getrandbits(64)))
            if time.monotonic() > self.deadline_s:
                break

    async def _spend(self, way: str, chance: Random) -> None:
        """Send requests until no more are admitted; compare what was charged with what was used."""
        path, make = _WAYS[way]
        key = await self.target.create_key("limited", tokens_a_day=_BUDGET)
        charged = -sum((await self._charged()).values())
        used = -await self._worker_tokens()
        refused = 0
        for _ in range(_REQUESTS):
            body = {"model": MODEL, **make(chance), "stream": chance.random() < 0.8}
            raw = json.dumps(body).encode()
            request_id = self.target.request_id(self.name)
            sent = encode(raw, path=path, key=key["secret"], request_id=request_id)
            self.tally.begin(f"{way}: {raw[:80]!r}")
            async with connection(self.target.gateway_port) as opened:
                await opened.send(sent)
                answer = await opened.read_answer(events=chance.choice((1, 2, 10, 30)))
            self.target.sent.add(request_id)
            self.tally.answer(answer, (path, raw))
            refused += answer.status == 429
            if refused == _REFUSED:
                break
        await self._settle()
        used += await self._worker_tokens()
        by_key = await self._charged()
        charged += sum(by_key.values())
        given = by_key[key["id"]]
        self.tally.notes.append(f"{way}: a budget of {_BUDGET:,} gave {given:,} tokens")
        if used > charged + _IN_FLIGHT:
            self.tally.fail(f"{used} tokens used, {charged} charged", way)
        if given > _BUDGET * _OVER_BUDGET:
            self.tally.fail(f"{given} tokens with a budget of {_BUDGET}", way)

    async def _charged(self) -> dict[str, int]:
        usage = await self.target.admin("usage")
        names = ("prompt_tokens", "completion_tokens", "guessed_tokens")
        return {
            key: sum(used.get(name, 0) for name in names)
            for key, used in usage.json()["keys"].items()
            if key != self.target.prepared_key
        }

    async def _lanes(self) -> list[dict[str, Any]]:
        status = await request(self.target.worker_port, "/v1/status", key=JOIN_TOKEN)
        return list(status.json()["report"]["lanes"])

    async def _worker_tokens(self) -> int:
        names = ("prompt_tokens", "completion_tokens")
        return sum(lane[name] for lane in await self._lanes() for name in names)

    async def _settle(self) -> None:
        """Wait until no request runs, also none of the neighbour; on a busy machine for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLED_S):
                while True:
                    busy = any(lane["running"] or lane["waiting"] for lane in await self._lanes())
                    gateway = await self.target.request("/v1/status", key=self.target.key)
                    if not busy and not gateway.json()["gateway"]["requests_in_flight"]:
                        return
