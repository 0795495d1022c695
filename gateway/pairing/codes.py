"""Pairing codes: an admin shows one, and a Mac that knows it gets a token of its own.

A fleet has one code, for two minutes. The first exchange takes it, whatever comes of that, so one
code allows one guess. The address of an exchange that has not succeeded waits a minute. All this
is in Redis where gateways share one, sealed with the join token, so each may answer each message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from pydantic import BaseModel

from gateway.errors import PairingClosed, PairingRefused, PairingTooSoon
from gateway.pairing.paired_workers import PairedWorkers
from gateway.protocols.sealing import Sealer
from gateway.state.redis import RedisClient, Reply
from paceline.pairing import (
    CODE_VALID_S,
    PairingAnswer,
    PairingProof,
    PairingRequest,
    PairingWrong,
    SealedMembership,
    SessionKeys,
    answer_worker,
    check_proof,
    new_code,
)

log = logging.getLogger(__name__)

GUESS_PAUSE_S = 60.0
EXCHANGE_LIMIT_S = 30.0
"""Between the two messages of a worker."""
_CODE = "code"
_TAKE = """
local text = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
return text
"""


class _Exchange(BaseModel):
    name: str
    address: str
    keys: tuple[str, ...]


class _MemorySlots:
    """Texts that expire, of one gateway. There are few, since only an admin starts the first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._texts: dict[str, tuple[str, float]] = {}

    async def put(self, name: str, text: str, valid_s: float) -> None:
        self._texts[name] = text, self._clock() + valid_s

    async def has(self, name: str) -> bool:
        self._texts = {key: one for key, one in self._texts.items() if one[1] > self._clock()}
        return name in self._texts

    async def take(self, name: str) -> str | None:
        return self._texts.pop(name)[0] if await self.has(name) else None


class _RedisSlots:
    """Texts that expire, of all gateways."""

    def __init__(self, redis: RedisClient, sealer: Sealer) -> None:
        self._redis = redis
        self._take = redis.script(_TAKE)
        self._sealer = sealer

    async def put(self, name: str, text: str, valid_s: float) -> None:
        sealed, valid_ms = self._sealer.seal(text.encode(), name.encode()), round(valid_s * 1000)
        await self._call(lambda: self._redis.redis.set(_key(name), sealed, px=valid_ms))

    async def has(self, name: str) -> bool:
        return bool(await self._call(lambda: self._redis.redis.exists(_key(name))))

    async def take(self, name: str) -> str | None:
        sealed = await self._call(lambda: self._take([_key(name)]))
        text = self._sealer.unseal(str(sealed), name.encode()) if sealed else None
        return None if text is None else text.decode()

    async def _call(self, command: Callable[[], Awaitable[Reply]]) -> Reply:
        return await self._redis.call("pairing", command)


class PairingCodes:
    """The code of a fleet, and the exchange that has taken it."""

    def __init__(
        self,
        redis: RedisClient | None,
        sealer: Sealer,
        paired: PairedWorkers,
        clock: Callable[[], float],
    ) -> None:
        self._slots = _MemorySlots(clock) if redis is None else _RedisSlots(redis, sealer)
        self._paired = paired

    async def show(self) -> str:
        """Return a new code, in place of the last one."""
        code = new_code()
        await self._slots.put(_CODE, code, CODE_VALID_S)
        log.info("pairing.code_shown")
        return code

    async def begin(self, request: PairingRequest, address: str) -> PairingAnswer:
        """Answer the first message of a worker, and end the code.

        Raise `PairingTooSoon`, `PairingClosed` or `PairingRefused`.
        """
        waits = _waits(address)
        if await self._slots.has(waits):
            raise PairingTooSoon
        if (code := await self._slots.take(_CODE)) is None:
            raise PairingClosed
        await self._slots.put(waits, "", GUESS_PAUSE_S)
        try:
            # In a thread: the arithmetic takes a tenth of a second.
            answer, keys = await asyncio.to_thread(answer_worker, code, request)
        except PairingWrong:
            raise self._refusal(address) from None
        kept = _Exchange(
            name=request.name, address=address, keys=tuple(key.hex() for key in keys)
        ).model_dump_json()
        await self._slots.put(_exchange(answer.exchange), kept, EXCHANGE_LIMIT_S)
        return answer

    async def finish(self, exchange: str, proof: PairingProof) -> SealedMembership:
        """Pair the worker that has proved the code; raise `PairingClosed`, `PairingRefused`."""
        if (kept := await self._slots.take(_exchange(exchange))) is None:
            raise PairingClosed
        begun = _Exchange.model_validate_json(kept)
        keys = SessionKeys(*map(bytes.fromhex, begun.keys))
        try:
            check_proof(proof.proof, keys.worker_proof)
        except PairingWrong:
            raise self._refusal(begun.address) from None
        membership = await self._paired.add(begun.name, begun.address)
        await self._slots.take(_waits(begun.address))
        return keys.seal(membership)

    def _refusal(self, address: str) -> PairingRefused:
        log.warning("pairing.refused address=%s", address)
        return PairingRefused()


def _exchange(number: str) -> str:
    return f"exchange:{number}"


def _waits(address: str) -> str:
    return f"waits:{blake2b(address.encode(), digest_size=16).hexdigest()}"


def _key(name: str) -> str:
    return f"paceline:{{pairing}}:{name}"
