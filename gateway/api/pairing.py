"""`/admin/v1/pairing`: a Mac that knows the code of an admin gets a token, until that ends."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request
from typing_extensions import TypedDict

from gateway.api.auth import Author, CurrentGateway, admin_router, open_router
from gateway.api.openapi import FOR_ADMINS, STORED, WITH_BODY, failures
from gateway.errors import (
    PageRefused,
    PairingClosed,
    PairingRefused,
    PairingTooSoon,
    TooManyWorkers,
    WorkerUnknown,
)
from gateway.proxy.client import peer_address
from paceline.pairing import (
    CODE_VALID_S,
    PAIRING_PATH,
    PairingAnswer,
    PairingProof,
    PairingRequest,
    SealedMembership,
)

exchanges = open_router(PAIRING_PATH)
router = admin_router(PAIRING_PATH)
_EXCHANGE = (PageRefused, PairingClosed, PairingRefused, *WITH_BODY, *STORED)


class PairingCode(TypedDict):
    """A pairing code, for people."""

    code: str
    valid_s: float


@router.post("/code", status_code=201, responses=failures(*FOR_ADMINS, *STORED))
async def show_code(gateway: CurrentGateway) -> PairingCode:
    """Show a new pairing code for one Mac; the last code ends."""
    return {"code": await gateway.pairing_codes.show(), "valid_s": CODE_VALID_S}


@router.delete(
    "/workers/{worker_id}",
    status_code=204,
    responses=failures(*FOR_ADMINS, *STORED, WorkerUnknown),
)
async def unpair(worker_id: str, author: Author, gateway: CurrentGateway) -> None:
    """End the pairing of a worker: its token opens nothing, and it leaves the fleet."""
    await gateway.paired_workers.remove(worker_id, author)


@exchanges.post("/exchanges", responses=failures(*_EXCHANGE, PairingTooSoon))
async def begin(begun: PairingRequest, request: Request, gateway: CurrentGateway) -> PairingAnswer:
    """Answer the first message of a worker that pairs; the code ends."""
    return await gateway.pairing_codes.begin(begun, peer_address(request.scope))


@exchanges.put("/exchanges/{exchange}", responses=failures(*_EXCHANGE, TooManyWorkers))
async def finish(
    exchange: Annotated[str, Path(pattern="^[0-9a-f]{32}$")],
    proof: PairingProof,
    gateway: CurrentGateway,
) -> SealedMembership:
    """Give a worker that has proved the code its token, sealed."""
    return await gateway.pairing_codes.finish(exchange, proof)
