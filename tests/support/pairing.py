"""The two sides of a pairing, for tests of gateways."""

import httpx

from paceline.pairing import (
    PAIRING_PATH,
    Membership,
    PairingAnswer,
    PairingProof,
    SealedMembership,
    WorkerSide,
)
from tests.support.running_gateway import RunningGateway

EXCHANGES = f"{PAIRING_PATH}/exchanges"


def show_code(gateway: RunningGateway) -> str:
    response = gateway.admin.post(f"{PAIRING_PATH}/code")
    assert response.status_code == 201
    return str(response.json()["code"])


def wrong(code: str) -> str:
    return code[:-1] + ("A" if code[-1] != "A" else "B")


def begin(gateway: RunningGateway, side: WorkerSide) -> httpx.Response:
    return gateway.client.post(EXCHANGES, json=side.request.model_dump())


def finish(gateway: RunningGateway, answer: PairingAnswer, proof: bytes) -> httpx.Response:
    body = PairingProof(proof=proof.hex()).model_dump()
    return gateway.client.put(f"{EXCHANGES}/{answer.exchange}", json=body)


def pair(
    gateway: RunningGateway, code: str, name: str = "fake-a", at: RunningGateway | None = None
) -> Membership:
    """Pair with a gateway, or with two that share one message each."""
    side = WorkerSide(code, name)
    answer = PairingAnswer.model_validate_json(begin(gateway, side).content)
    keys = side.keys(answer)
    sealed = finish(at or gateway, answer, keys.worker_proof)
    return keys.open(SealedMembership.model_validate_json(sealed.content))
