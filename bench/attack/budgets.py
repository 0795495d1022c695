"""Budgets of tokens against streams that are left, wherever their usage comes late."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from bench.attack.attack import Tally, Target
from bench.attack.formats import COMPLETIONS, MESSAGES, RESPONSES
from bench.attack.http_client import CHAT, chat_body, connection, encode, request
from bench.attack.key_abuse import create_key, random_text
from bench.attack.neighbour import MODEL

_BUDGET: Final = 4000
_OVER_BUDGET: Final = 1.1
"""At most this share of a budget may be used: the last stream is charged when it ends."""
_REFUSED: Final = 3
_REQUESTS: Final = 60
_SETTLED_S: Final = 20.0
_IN_FLIGHT: Final = 100
"""Tokens of the neighbour's requests that the worker has counted and the gateway has not."""
_GRAMMAR: Final = "start: s\ns: s s | A\nA: /[a-z ]/"

Way = Callable[[Random], dict[str, Any]]


def _chat(chance: Random, **fields: Any) -> dict[str, Any]:
    text = random_text(chance, chance.choice((5, 50, 300)))
    return chat_body(MODEL, text, max_tokens=chance.choice((8, 64, 200)), **fields)


def _batch(chance: Random, **fields: Any) -> dict[str, Any]:
    count = chance.choice((2, 8, 32))
    prompts = [random_text(chance, chance.choice((5, 100))) for _ in range(count)]
    return {"model": MODEL, "prompt": prompts, "max_tokens": chance.choice((1, 8)), **fields}


def _responses(chance: Random) -> dict[str, Any]:
    text = random_text(chance, chance.choice((5, 300)))
    return {"model": MODEL, "input": text, "max_output_tokens": 200, "store": False}


_WAYS: Final[Mapping[str, tuple[str, Way]]] = {
    "chat": (CHAT, _chat),
    "several answers": (CHAT, lambda chance: _chat(chance, n=4)),
    "log probabilities": (CHAT, lambda chance: _chat(chance, logprobs=True, top_logprobs=20)),
    "costly grammars": (CHAT, lambda chance: _chat(chance, guided_grammar=_GRAMMAR)),
    "batches": (COMPLETIONS, _batch),
    "echoes": (COMPLETIONS, lambda chance: _batch(chance, echo=True, logprobs=20)),
    "messages": (MESSAGES, _chat),
    "responses": (RESPONSES, _responses),
}
"""Each with its path."""


class Budgets:
    """Streams that are left after some events, and others, by keys with a budget of tokens."""

    name = "budgets"
    promise = "the worker uses no more than is charged, and no budget is passed by 10%"
    share = 0.06

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        ways = list(_WAYS)
        rng.shuffle(ways)
        for way in ways:
            await self._spend(target, way, Random(rng.getrandbits(64)), tally)
            if time.monotonic() > deadline_s:
                break

    async def _spend(self, target: Target, way: str, chance: Random, tally: Tally) -> None:
        """Send requests until no more are admitted; compare what was charged with what was used."""
        path, make = _WAYS[way]
        key = await create_key(target, "limited", tokens_a_day=_BUDGET)
        charged = -sum((await _charged(target)).values())
        used = -await _worker_tokens(target)
        refused = 0
        for _ in range(_REQUESTS):
            raw = json.dumps(make(chance) | {"stream": chance.random() < 0.8}).encode()
            request_id = target.request_id("budget")
            sent = encode(raw, path=path, key=key["secret"], request_id=request_id)
            tally.begin(f"{way}: {raw[:80]!r}")
            async with connection(target.gateway_port) as opened:
                await opened.send(sent)
                answer = await opened.read_answer(events=chance.choice((1, 2, 10, 30)))
            target.sent.add(request_id)
            tally.answer(answer, (path, raw))
            refused += answer.status == 429
            if refused == _REFUSED:
                break
        await _settled(target)
        used += await _worker_tokens(target)
        by_key = await _charged(target)
        charged += sum(by_key.values())
        tally.notes.append(f"{way}: a budget of {_BUDGET:,} gave {by_key[key['id']]:,} tokens")
        if used > charged + _IN_FLIGHT:
            tally.fail(f"{used} tokens used, {charged} charged", way)
        if by_key[key["id"]] > _BUDGET * _OVER_BUDGET:
            tally.fail(f"{by_key[key['id']]} tokens with a budget of {_BUDGET}", way)


async def _charged(target: Target) -> dict[str, int]:
    """Return the tokens that were charged to each key."""
    usage = await request(target.gateway_port, "/admin/v1/usage", key=target.admin_key)
    return {
        key: sum(used.get(name, 0) for name in ("prompt_tokens", "completion_tokens"))
        for key, used in usage.json()["keys"].items()
    }


async def _worker_tokens(target: Target) -> int:
    """Return all tokens that the worker has read and written."""
    status = await request(target.worker_port, "/v1/status", key=target.join_token)
    lanes = status.json()["report"]["lanes"]
    return sum(lane["prompt_tokens"] + lane["completion_tokens"] for lane in lanes)


async def _settled(target: Target) -> None:
    """Wait until no request runs, also none of the neighbour; on a busy machine for a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SETTLED_S):
            while True:
                worker = await request(target.worker_port, "/v1/status", key=target.join_token)
                gateway = await request(target.gateway_port, "/v1/status", key=target.key)
                lanes = worker.json()["report"]["lanes"]
                busy = any(lane["running"] or lane["waiting"] for lane in lanes)
                if not busy and not gateway.json()["gateway"]["requests_in_flight"]:
                    return
