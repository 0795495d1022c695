"""`/admin/v1/pairing`: a Mac that knows the code of an admin gets a token, until that ends."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Request
from typing_extensions import TypedDict

from gateway.api.auth import Author, CurrentGateway, admin_router, open_router
from gateway.api.openapi import FOR_ADMINS, STORED, WITH_BODY, failures
from gateway.errors import (
    PageRefused,
    PairingRefused,
    RecordsUnwritable,
    TooManyWorkers,
    WorkerUnknown,
)
from gateway.proxy.client import peer_address
from paceline.pairing import CODE_VALID_S, PAIRING_PATH, Key, PairingAnswer, PairingRequest

exchanges = open_router(PAIRING_PATH)
router = admin_router(PAIRING_PATH)
SealedKey = Annotated[str, Body(embed=True, description="The public key of the worker, sealed.")]
_EXCHANGE = failures(PageRefused, PairingRefused, TooManyWorkers, *WITH_BODY, *STORED)


class PairingCode(TypedDict):
    """A pairing code, for people."""

    code: str
    valid_s: float


class SealedPairing(TypedDict):
    """The record of a paired worker, for the worker only."""

    sealed: str


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


@exchanges.post("/exchange", responses=_EXCHANGE)
async def begin(begun: PairingRequest, request: Request, gateway: CurrentGateway) -> PairingAnswer:
    """Answer the first message of a worker that pairs; the code ends."""
    return await gateway.pairing_codes.begin(begun, peer_address(request.scope))


@exchanges.put("/exchange/{proof}", responses=_EXCHANGE)
async def finish(proof: Key, gateway: CurrentGateway, sealed: SealedKey = "") -> SealedPairing:
    """Give a worker that has proved the code its token and its certificate, sealed."""
    try:
        return {"sealed": await gateway.pairing_codes.finish(proof, sealed)}
    except RecordsUnwritable as error:
        raise type(error) from error  # its text has a path, which is for admins only
