"""A worker whose answers, heartbeats and reports are lies."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from random import Random
from typing import Any, Final

from bench.attack.attack import WORKER_CODES, Attack
from bench.attack.http_client import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Answer,
    chat_body,
    connection,
    encode,
    prompt_fields,
)
from bench.attack.liar import LATE, MODEL, report, send_heartbeat
from bench.attack.lies import CANARY, LIES, VALUES_AND_TYPES, damaged
from bench.attack.mutations import mutate
from bench.harness.parts import JOIN_TOKEN

_PATHS: Final = (CHAT, MESSAGES, RESPONSES)
"""The worker is asked for a chat whatever the client sends."""
_CHECK_EVERY: Final = 250
_BUSY: Final = ("503 until the year 9999", "429 for ever")
"""A gateway sends such a worker nothing for a while, so random lies leave them out."""
_NAMES: Final = tuple(name for name in LIES if name not in _BUSY)
_RELAYED: Final = frozenset((400, 413, 422))
_LEFT: Final = "left behind an early head"
_BIG: Final = (10**400, 10**4000, 2**53 + 1, [0] * 20_000, {"x" * 100: 1}, "\x1b[2J", 1e400)
_SANE: Final = (0, 1, 7, 1000, 2**53, "a", "b-c", True, 0.5)


class Checked(Attack):
    """An attack after whose inputs the pages that read every report must still work."""

    async def check_pages(self) -> None:
        if self.tally.inputs % _CHECK_EVERY:
            return
        status = await self.target.request("/v1/status", key=self.target.key)
        metrics = await self.target.request("/metrics")
        if (status.status, metrics.status) != (200, 200):
            problem = f"status {status.status}, metrics {metrics.status}"
            self.tally.fail(problem, status.body[:200])
        elif any(value < 0 for value in status.json()["outcomes"].values()):
            self.tally.fail("a negative count", status.json()["outcomes"])


class LyingAnswers(Checked):
    """Answers that are no answers, whole and streamed, and random damage to them."""

    name = "lying-workers"
    promise = "a valid answer or an error, never [DONE] behind a truncated stream"
    share = 0.12
    concurrency = 16
    _restarting = False

    async def prepare(self) -> None:
        for name, lie in LIES.items() if not self.tally.inputs else ():  # once, in the first turn
            every = (
                self.ask_liar(f"{name}, stream {stream}, {number}", lie(stream), stream)
                for stream, number in product((False, True), range(len(_PATHS)))
            )
            await asyncio.gather(*every)

    async def one(self, chance: Random) -> None:
        name, stream = chance.choice(_NAMES), chance.random() < 0.6
        pieces = LIES[name](stream)
        if chance.random() < 0.9:
            pieces = damaged(pieces, chance)
        await self.ask_liar(f"{name} {chance.getrandbits(48):x}", pieces, stream)

    async def ask_liar(self, text: str, pieces: list[bytes], stream: bool) -> None:
        lies = self.target.liar.lies
        lies[text] = pieces
        path = _PATHS[self.tally.inputs % len(_PATHS)]
        body = {"model": MODEL, "stream": stream, **prompt_fields(path, text, 50)}
        shown = (path, text, stream, b"".join(pieces)[:300])
        answer = await self.ask(body, path, given=shown, allowed=WORKER_CODES)
        lies.pop(text, None)
        if answer.status == 503 and not self._restarting:
            self._restarting = True
            await self.target.liar.join(self.target.gateway_port, restarted=True)
            self._restarting = False
        if problem := _problem(answer, stream, path):
            self.tally.fail(problem, (*shown, answer.body[-200:]))
        await self.check_pages()


def _problem(answer: Answer, stream: bool, path: str) -> str:
    """Return what is wrong with a relayed answer, or an empty string."""
    if answer.status != 200:
        leaked = CANARY.encode() in answer.body and answer.status not in _RELAYED
        return "words of the worker in an error" if leaked else ""
    if not stream:
        if not answer.is_json():
            return "a whole answer that is no JSON"
        return "" if answer.complete else "a whole answer that is cut"
    if answer.stream_error:
        leaked = CANARY.encode() in answer.body.rpartition(b"data: ")[2]
        return "words of the worker in an error" if leaked else ""
    if answer.done and path == CHAT:
        return "" if b'"finish_reason"' in answer.body else "[DONE] without a finish"
    return "" if answer.ends_as(path) else "a stream without an end"


class EarlyHeads(LyingAnswers):
    """The same answers to streams whose heads have gone out before, and clients that leave."""

    name = "early-heads"
    promise = "a stream whose head went out before its worker began ends as any other"
    share = 0.06
    concurrency = 32

    async def prepare(self) -> None:
        """Play random lies alone."""

    async def one(self, chance: Random) -> None:
        name = chance.choice(_NAMES)
        pieces = LIES[name](True)
        if chance.random() < 0.7:
            pieces = damaged(pieces, chance)
        text = f"{LATE} {name} {chance.getrandbits(48):x}"
        if chance.random() < 0.2:
            await self._leave(text, pieces)
        else:
            await self.ask_liar(text, pieces, True)

    async def finish(self) -> None:
        if not self.tally.answers[_LEFT]:
            self.tally.fail("no head went out early", self.tally.answers)

    async def _leave(self, text: str, pieces: list[bytes]) -> None:
        self.target.liar.lies[text] = pieces
        request_id = self.target.request_id(self.name)
        body = json.dumps(chat_body(MODEL, text, stream=True)).encode()
        self.tally.begin(text)
        async with connection(self.target.gateway_port) as opened:
            await opened.send(encode(body, key=self.target.key, request_id=request_id))
            answer = await opened.read_answer(until=b": keepalive")
        self.target.sent.add(request_id)
        if answer.body.startswith(b": keepalive"):
            self.tally.answers[_LEFT] += 1
        else:
            self.tally.answer(answer, text, allowed=WORKER_CODES)


class LyingReports(Checked):
    """Heartbeats and reports with wrong numbers, lists, names and types."""

    name = "lying-reports"
    promise = "400 or a sane sum; status and metrics keep working"
    share = 0.12
    concurrency = 4

    async def prepare(self) -> None:
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for port in self.target.liar.reports:
            self._free.put_nowait(port)

    async def one(self, chance: Random) -> None:
        port = await self._free.get()
        try:
            await self._send(port, chance)
        finally:
            self._free.put_nowait(port)

    async def finish(self) -> None:
        for port in self.target.liar.reports:
            path = f"/admin/v1/workers/odd-{port}"
            await self.target.request(path, method="DELETE", key=JOIN_TOKEN)

    async def _send(self, port: int, chance: Random) -> None:
        worker_id = f"odd-{port}"
        sent: Any = report(worker_id, port, model="odd", boot=str(chance.randrange(3)))
        confirmed = json.dumps({"report": sent}).encode()
        values = chance.choice((_BIG, _SANE, VALUES_AND_TYPES))
        mutate(sent, chance, values, changes=(1, 2, 3))
        told = confirmed if chance.random() < 0.7 else json.dumps({"report": sent}).encode()
        if chance.random() < 0.05:
            told = b"".join(damaged([confirmed], chance))
        self.target.liar.reports[port] = told
        self.tally.begin(sent)
        answer = await send_heartbeat(self.target.gateway_port, sent, worker_id)
        self.tally.answer(answer, sent)
        await self.check_pages()
