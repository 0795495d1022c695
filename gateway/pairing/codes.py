"""Pairing codes: an admin shows one, and a Mac that knows it gets a token of its own.

A fleet has one code, for two minutes. The first exchange takes it, whatever comes of that, so one
code allows one guess. The address of an exchange that has not succeeded waits a minute. Gateways
with one Redis share all this, sealed with the join token, so each may answer each message.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from gateway.errors import PairingRefused
from gateway.pairing.paired_workers import PairedWorkers
from gateway.state.expiring import ExpiringRecords
from paceline.pairing import (
    CODE_VALID_S,
    PairingAnswer,
    PairingRequest,
    PairingSide,
    PairingWrong,
    PublicKey,
    SessionKeys,
    new_code,
    seal,
    unseal,
)

log = logging.getLogger(__name__)

GUESS_PAUSE_S = 60.0
EXCHANGE_LIMIT_S = 30.0
"""Between the two messages of a worker."""
_PUBLIC_KEY = TypeAdapter(PublicKey)
_OWNER = "/pairing"
_CODE, _EXCHANGE = "code", "exchange"
_NO_CODE = "No pairing code is valid now. Let an admin of the gateway show a new one."
_WRONG = "The pairing code is wrong, and has ended. Let an admin show a new one."
_TOO_SOON = "The last pairing from this address failed. Try again in a minute, with a new code."


class PairingCodes:
    """The code of a fleet, and the exchange that has taken it; `clock` is that of the records."""

    def __init__(
        self, records: ExpiringRecords, paired: PairedWorkers, clock: Callable[[], float]
    ) -> None:
        self._records = records
        self._paired = paired
        self._clock = clock

    async def show(self) -> str:
        """Return a new code, in place of the last one."""
        code = new_code()
        await self._put(_CODE, code, CODE_VALID_S)
        log.info("pairing.code_shown")
        return code

    async def begin(self, request: PairingRequest, address: str) -> PairingAnswer:
        """Answer the first message of a worker, and end the code; raise `PairingRefused`."""
        if await self._get(address) is not None:
            raise PairingRefused(_TOO_SOON)
        code = await self._take(_CODE)
        await self._put(address, "waits", GUESS_PAUSE_S)
        try:
            # In a thread: the arithmetic takes a tenth of a second.
            side, keys = await asyncio.to_thread(_answer, code, request)
        except PairingWrong:
            raise self._refusal(address) from None
        await self._put(_EXCHANGE, [request.name, address, *keys], EXCHANGE_LIMIT_S)
        return PairingAnswer(message=side.message, proof=keys.gateway_proof)

    async def finish(self, proof: str, sealed_key: str) -> str:
        """Pair the worker that has proved the code, and return its sealed record.

        Workers of older versions send no key. Raise `PairingRefused`.
        """
        name, address, *found = await self._take(_EXCHANGE)
        keys = SessionKeys(*found)
        if not hmac.compare_digest(proof, keys.worker_proof):
            raise self._refusal(address)
        try:
            sent = unseal(sealed_key, keys.worker_sealing) if sealed_key else ""
            public_key = _PUBLIC_KEY.validate_python(sent) if sent else ""
        except (PairingWrong, ValidationError):
            raise self._refusal(address) from None
        pairing = await self._paired.add(name, address, public_key)
        await self._records.delete(_OWNER, address)
        return seal(pairing.model_dump_json(), keys.sealing)

    def _refusal(self, address: str) -> PairingRefused:
        log.warning("pairing.refused address=%s", address)
        return PairingRefused(_WRONG)

    async def _put(self, name: str, value: object, valid_s: float) -> None:
        await self._records.put(_OWNER, name, to_json([self._clock() + valid_s, value]))

    async def _get(self, name: str) -> Any:
        """Return a value; None once it has expired."""
        (record,) = await self._records.get(_OWNER, [name])
        expires_s, value = from_json(record) if record else (0.0, None)
        return value if expires_s > self._clock() else None

    async def _take(self, name: str) -> Any:
        """Return a value that nobody else takes; raise `PairingRefused` without one."""
        value = await self._get(name)
        if not await self._records.delete(_OWNER, name) or value is None:
            raise PairingRefused(_NO_CODE)
        return value


def _answer(code: str, request: PairingRequest) -> tuple[PairingSide, SessionKeys]:
    side = PairingSide(code, of_gateway=True)
    return side, side.keys(request.message, request.name)
