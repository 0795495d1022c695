"""The side of a worker in a pairing, for tests of gateways."""

import hmac
from pathlib import Path
from typing import NamedTuple

import httpx

from paceline.certificates import Identity, identity_file
from paceline.pairing import (
    PAIRING_PATH,
    PAIRINGS,
    Pairing,
    PairingAnswer,
    PairingSide,
    PairingWrong,
    SessionKeys,
    pairings_file,
    seal,
    unseal,
)
from tests.support.running_gateway import RunningGateway

EXCHANGE = f"{PAIRING_PATH}/exchange"


class Exchange(NamedTuple):
    """An exchange whose first message a gateway has answered."""

    side: PairingSide
    answer: PairingAnswer
    keys: SessionKeys


def show_code(gateway: RunningGateway) -> str:
    response = gateway.admin.post(f"{PAIRING_PATH}/code")
    assert response.status_code == 201
    return str(response.json()["code"])


def wrong(code: str) -> str:
    return code[:-1] + ("A" if code[-1] != "A" else "B")


def begin(gateway: RunningGateway, message: str, name: str = "fake-a") -> httpx.Response:
    return gateway.client.post(EXCHANGE, json={"name": name, "message": message})


def begun(gateway: RunningGateway, code: str, name: str = "fake-a") -> Exchange:
    side = PairingSide(code)
    answer = PairingAnswer.model_validate_json(begin(gateway, side.message, name).content)
    return Exchange(side, answer, side.keys(answer.message, name))


def finish(gateway: RunningGateway, proof: str, sealed_key: str = "") -> httpx.Response:
    """Send the last message: without a key, as a worker of an older version."""
    body = {"sealed": sealed_key} if sealed_key else None
    return gateway.client.put(f"{EXCHANGE}/{proof}", json=body)


def pair(
    gateway: RunningGateway,
    code: str,
    name: str = "fake-a",
    at: RunningGateway | None = None,
    public_key: str = "",
) -> Pairing:
    """Pair with a gateway, or with two that get one message each."""
    exchange = begun(gateway, code, name)
    if not hmac.compare_digest(exchange.answer.proof, exchange.keys.gateway_proof):
        raise PairingWrong
    key = seal(public_key, exchange.keys.worker_sealing) if public_key else ""
    sealed = finish(at or gateway, exchange.keys.worker_proof, key).json()["sealed"]
    return Pairing.model_validate_json(unseal(sealed, exchange.keys.sealing))


class Paired(NamedTuple):
    """A pairing, and the file with the identity of its worker."""

    pairing: Pairing
    file: Path

    @property
    def identity(self) -> Identity:
        return Identity.model_validate_json(self.file.read_bytes())


def paired(gateway: RunningGateway, folder: Path, name: str, *, with_key: bool = True) -> Paired:
    """Pair as `paceline join` does with a new state folder; without a key, as an older version."""
    identity = Identity.new()
    key = identity.public_key if with_key else ""
    pairing = pair(gateway, show_code(gateway), name, public_key=key)
    file = identity_file(folder, gateway.url, name)
    if with_key:
        identity = identity.renewed(pairing.certificate, pairing.authority)
        file.write_text(identity.model_dump_json())
    pairing = pairing.model_copy(update={"gateway_url": gateway.url})
    pairings_file(folder).write_bytes(PAIRINGS.dump_json((pairing,)))
    return Paired(pairing, file)
