"""A worker whose answers, heartbeats and reports are lies."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from random import Random
from typing import Any, Final

from bench.attack.attack import WORKER_CODES, Answer, Tally, Target, play
from bench.attack.formats import MESSAGES, RESPONSES
from bench.attack.http_client import CHAT, chat, chat_body, connection, encode, request, send
from bench.attack.liar import LATE, MODEL, report
from bench.attack.lies import CANARY, LIES, damaged
from paceline.protocol import WorkerReport
from tests.support.hostile_checkpoints import VALUES

_PATHS: Final = (CHAT, MESSAGES, RESPONSES)
"""The worker is asked for a chat whatever the client sends."""
_CHECK_EVERY: Final = 250
_BUSY: Final = ("503 until the year 9999", "429 for ever")
"""A gateway sends such a worker nothing for a while, so random lies leave them out."""
_NAMES: Final = tuple(name for name in LIES if name not in _BUSY)
_RELAYED: Final = frozenset((400, 413, 422))


async def join(target: Target, sent: WorkerReport | dict[str, Any], worker_id: str) -> Answer:
    """Send one heartbeat."""
    body = sent.model_dump(mode="json") if isinstance(sent, WorkerReport) else sent
    raw = json.dumps(body).encode()
    path = f"/admin/v1/workers/{worker_id}"
    encoded = encode(raw, path=path, method="PUT", key=target.join_token)
    return await send(target.gateway_port, encoded)


async def check_pages(target: Target, tally: Tally) -> None:
    """Require that the pages which read every report still work."""
    status = await request(target.gateway_port, "/v1/status", key=target.key)
    metrics = await request(target.gateway_port, "/metrics")
    if (status.status, metrics.status) != (200, 200):
        tally.fail(f"status {status.status}, metrics {metrics.status}", status.body[:200])
    elif any(value < 0 for value in status.json()["outcomes"].values()):
        tally.fail("a negative count", status.json()["outcomes"])


class LyingAnswers:
    """Answers that are no answers, whole and streamed, and random damage to them."""

    name = "lying-workers"
    promise = "a valid answer or an error, never [DONE] behind a truncated stream"
    share = 0.12

    def __init__(self) -> None:
        self._restarting = False

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        for name, lie in LIES.items() if not tally.inputs else ():  # once, in the first turn
            for stream in (False, True):
                for number, _ in enumerate(_PATHS):
                    text = f"{name}, stream {stream}, {number}"
                    await self._ask(target, text, lie(stream), stream, tally)

        async def one(chance: Random) -> None:
            name, stream = chance.choice(_NAMES), chance.random() < 0.6
            pieces = LIES[name](stream)
            if chance.random() < 0.9:
                pieces = damaged(pieces, chance)
            await self._ask(target, f"{name} {chance.getrandbits(48):x}", pieces, stream, tally)

        await play(one, rng, deadline_s, concurrency=16)

    async def _ask(
        self, target: Target, text: str, pieces: list[bytes], stream: bool, tally: Tally
    ) -> None:
        lies = target.liar.lies
        lies[text] = pieces
        path = _PATHS[tally.inputs % len(_PATHS)]
        fields = {"input": text, "store": False} if path == RESPONSES else {}
        body = json.dumps(chat_body(MODEL, text, stream=stream, max_tokens=50))
        if fields:
            body = json.dumps({"model": MODEL, "stream": stream, **fields})
        answer = await chat(target, "lie", body.encode(), path=path)
        lies.pop(text, None)
        shown = (path, text, stream, b"".join(pieces)[:300], answer.body[-200:])
        tally.inputs += 1
        tally.answer(answer, shown, allowed=WORKER_CODES)
        if answer.status == 503:
            await self._restart(target)
        if problem := _problem(answer, stream, path):
            tally.fail(problem, shown)
        if tally.inputs % _CHECK_EVERY == 0:
            await check_pages(target, tally)

    async def _restart(self, target: Target) -> None:
        """Join as another boot, which the gateway trusts again."""
        if self._restarting:
            return
        self._restarting = True
        target.liar.restart()
        await join(target, target.liar.report(), MODEL)
        self._restarting = False


def _problem(answer: Answer, stream: bool, path: str) -> str:
    """Return what is wrong with a relayed answer, or an empty string."""
    if answer.status != 200:
        leaked = CANARY.encode() in answer.body and answer.status not in _RELAYED
        return "words of the worker in an error" if leaked else ""
    if not stream:
        try:
            answer.json()
        except ValueError:
            return "a whole answer that is no JSON"
        return "" if answer.complete else "a whole answer that is cut"
    if answer.stream_error:
        leaked = CANARY.encode() in answer.body.rpartition(b"data: ")[2]
        return "words of the worker in an error" if leaked else ""
    if answer.done and path == CHAT:
        finished = b'"finish_reason"' in answer.body
        return "" if finished else "[DONE] without a finish"
    return "" if answer.ends_as(path) else "a stream without an end"


class EarlyHeads(LyingAnswers):
    """The same answers to streams whose heads have gone out before, and clients that leave."""

    name = "early-heads"
    promise = "a stream whose head went out before its worker began ends as any other"
    share = 0.06

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        async def one(chance: Random) -> None:
            name = chance.choice(_NAMES)
            pieces = LIES[name](True)
            if chance.random() < 0.7:
                pieces = damaged(pieces, chance)
            text = f"{LATE} {name} {chance.getrandbits(48):x}"
            if chance.random() < 0.2:
                await self._leave(target, text, pieces, tally)
            else:
                await self._ask(target, text, pieces, True, tally)

        await play(one, rng, deadline_s, concurrency=32)
        if not tally.answers["left behind an early head"]:
            tally.fail("no head went out early", tally.answers)

    async def _leave(self, target: Target, text: str, pieces: list[bytes], tally: Tally) -> None:
        """Leave once the head has come."""
        target.liar.lies[text] = pieces
        request_id = target.request_id("early")
        body = json.dumps(chat_body(MODEL, text, stream=True)).encode()
        async with connection(target.gateway_port) as opened:
            await opened.send(encode(body, key=target.key, request_id=request_id))
            answer = await opened.read_answer(until=b": keepalive")
        target.sent.add(request_id)
        tally.inputs += 1
        if answer.body.startswith(b": keepalive"):
            tally.answers["left behind an early head"] += 1
        else:
            tally.answer(answer, text, allowed=WORKER_CODES)


class LyingReports:
    """Heartbeats and reports with wrong numbers, lists, names and types."""

    name = "lying-reports"
    promise = "400 or a sane sum; status and metrics keep working"
    share = 0.12

    async def run(self, target: Target, rng: Random, deadline_s: float, tally: Tally) -> None:
        ports = list(target.liar.reports)
        free: asyncio.Queue[int] = asyncio.Queue()
        for port in ports:
            free.put_nowait(port)

        async def one(chance: Random) -> None:
            port = await free.get()
            try:
                await self._send(target, port, chance, tally)
            finally:
                free.put_nowait(port)

        await play(one, rng, deadline_s, concurrency=len(ports))
        for port in ports:
            path = f"/admin/v1/workers/odd-{port}"
            await request(target.gateway_port, path, method="DELETE", key=target.join_token)

    async def _send(self, target: Target, port: int, chance: Random, tally: Tally) -> None:
        worker_id = f"odd-{port}"
        boot = str(chance.randrange(3))
        sent = report(worker_id, port, model="odd", boot=boot).model_dump(mode="json")
        confirmed = json.dumps({"report": sent})
        lie(sent, chance)
        target.liar.reports[port] = (
            confirmed.encode() if chance.random() < 0.7 else json.dumps({"report": sent}).encode()
        )
        if chance.random() < 0.05:
            target.liar.reports[port] = b"".join(damaged([confirmed.encode()], chance))
        answer = await join(target, sent, worker_id)
        tally.inputs += 1
        tally.answer(answer, sent)
        if tally.inputs % _CHECK_EVERY == 0:
            await check_pages(target, tally)


_BIG: Final = (10**400, 10**4000, 2**53 + 1, [0] * 20_000, {"x" * 100: 1}, "\x1b[2J", 1e400)


def lie(document: Any, chance: Random) -> None:
    """Change one to three values of a report in place."""
    for _ in range(chance.randint(1, 3)):
        parent = document
        while True:
            key = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            child = parent[key]
            if not isinstance(child, dict | list) or not child or chance.random() < 0.25:
                break
            parent = child
        match chance.randrange(10):
            case 0 if isinstance(parent, dict):
                parent[chance.choice(("x", "", "\0", "url", "boot_id"))] = deepcopy(
                    chance.choice(VALUES)
                )
            case 1 | 2 | 3:
                parent[key] = deepcopy(chance.choice(_BIG))
            case 4 | 5:
                parent[key] = chance.choice((0, 1, 7, 1000, 2**53, "a", "b-c", True, 0.5))
            case _:
                parent[key] = deepcopy(chance.choice(VALUES))
        if not document:
            return
