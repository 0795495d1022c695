"""Pairing of a worker with a gateway by a short code: the exchange and its result.

Both sides run SPAKE2 over Ed25519 with the code as password. So a listener learns nothing, and
whoever does not know the code can check one guess an exchange, which costs the code. Each side then
proves its key, and only after that the gateway sends what the worker keeps, sealed with a third
key. Keys are of one exchange and of the name that the worker sent.

The library takes a time that depends on the numbers, which are new in each exchange.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from paceline.addresses import BaseUrl
from paceline.private_files import check_private, make_private

PAIRING_PATH = "/admin/v1/pairing"
ALPHABET = "ABCDEFGHJKMNPQRSTVWXYZ"
"""Letters of codes, without similar ones."""
CODE_CHARS = 8
CODE_VALID_S = 120.0
TOKEN_PREFIX = "paired-"  # noqa: S105  # of all tokens of paired workers
_INFO = b"paceline pairing 1 "
_NONCE = bytes(12)
"""Of the one message that its key seals."""
_SIDES = {"idA": b"paceline worker", "idB": b"paceline gateway"}

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=66)]
WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PairingRequest(_Message):
    """The first message of a worker."""

    name: WorkerId
    """The id that it would like."""
    message: Hex = Field(min_length=66)
    """Of SPAKE2."""


class PairingAnswer(_Message):
    """The answer of a gateway."""

    exchange: Hex = Field(min_length=32, max_length=32)
    message: Hex = Field(min_length=66)
    """Of SPAKE2."""
    proof: Hex = Field(min_length=64, max_length=64)
    """The gateway knows the code."""


class PairingProof(_Message):
    """The second message of a worker."""

    proof: Hex = Field(min_length=64, max_length=64)
    """The worker knows the code."""


class SealedMembership(_Message):
    """The sealed message of the gateway to the worker."""

    sealed: str = Field(pattern=r"^[0-9a-f]*$", max_length=4096)


class Membership(_Message):
    """The record of a paired worker: its id, and the token of calls in both directions."""

    worker_id: WorkerId
    token: str = Field(pattern=r"^[!-~]{1,200}$")
    nodes_key: Hex = Field(min_length=64, max_length=64)
    """The key that workers of one fleet use to exchange nodes of the prefix cache."""


class PairingWrong(Exception):
    """The other side does not know the code, or sent an invalid message."""


class SessionKeys(NamedTuple):
    """The keys of one exchange."""

    gateway_proof: bytes
    worker_proof: bytes
    sealing: bytes

    def seal(self, membership: Membership) -> SealedMembership:
        """Encrypt the worker's record."""
        text = membership.model_dump_json().encode()
        return SealedMembership(sealed=AESGCM(self.sealing).encrypt(_NONCE, text, None).hex())

    def open(self, answer: SealedMembership) -> Membership:
        """Decrypt the gateway's message; raise `PairingWrong`."""
        try:
            text = AESGCM(self.sealing).decrypt(_NONCE, bytes.fromhex(answer.sealed), None)
            return Membership.model_validate_json(text)
        except (InvalidTag, ValueError):
            raise PairingWrong from None


def new_code() -> str:
    """Return a new code."""
    return "".join(secrets.choice(ALPHABET) for _ in range(CODE_CHARS))


def read_code(text: str) -> str:
    """Return a code as a person wrote it; raise `ValueError` if it cannot be one."""
    code = "".join(text.upper().replace("-", " ").split())
    if len(code) != CODE_CHARS or not set(code) <= set(ALPHABET):
        raise ValueError("not a code")
    return code


def answer_worker(code: str, request: PairingRequest) -> tuple[PairingAnswer, SessionKeys]:
    """Return the answer of a gateway and the keys; raise `PairingWrong` for a wrong message."""
    from spake2 import SPAKE2_B  # noqa: PLC0415  # its numbers delay each start of a process

    side = SPAKE2_B(code.encode(), **_SIDES)
    message = side.start().hex()
    keys = _session_keys(side, request.message, request.name)
    exchange, proof = secrets.token_hex(16), keys.gateway_proof.hex()
    return PairingAnswer(exchange=exchange, message=message, proof=proof), keys


class WorkerSide:
    """The side of a worker in one exchange."""

    def __init__(self, code: str, name: str) -> None:
        from spake2 import SPAKE2_A  # noqa: PLC0415  # as above

        self._side = SPAKE2_A(code.encode(), **_SIDES)
        self.request = PairingRequest(name=name, message=self._side.start().hex())

    def keys(self, answer: PairingAnswer) -> SessionKeys:
        """Return the keys; raise `PairingWrong` unless the gateway knows the code."""
        keys = _session_keys(self._side, answer.message, self.request.name)
        check_proof(answer.proof, keys.gateway_proof)
        return keys


def check_proof(proof: str, expected: bytes) -> None:
    """Raise `PairingWrong` unless the other side has proved its key."""
    if not hmac.compare_digest(proof, expected.hex()):
        raise PairingWrong


def _session_keys(side: Any, message: str, name: str) -> SessionKeys:
    from spake2 import SPAKEError  # noqa: PLC0415  # as above
    from spake2.ed25519_basic import NotOnCurve  # noqa: PLC0415  # as above

    try:
        shared = side.finish(bytes.fromhex(message))
    except (SPAKEError, NotOnCurve, ValueError):  # no point of the group
        raise PairingWrong from None
    keys = HKDF(SHA256(), 96, salt=None, info=_INFO + name.encode()).derive(shared)
    return SessionKeys(keys[:32], keys[32:64], keys[64:])


# --- what a worker keeps --------------------------------------------------------------------------


class Pairing(Membership):
    """The membership of a worker, and the gateway that gave it."""

    gateway_url: BaseUrl


_PAIRINGS = TypeAdapter(tuple[Pairing, ...])


def stored_pairing(state_dir: Path, gateway_url: str, worker_id: str) -> Pairing | None:
    """Return a worker's record of a gateway; without an id, that of its first worker here.

    Raise `OSError` or `ValueError` if the file cannot be used.
    """
    kept = (one for one in _read(state_dir) if one.gateway_url == gateway_url)
    return next((one for one in kept if worker_id in ("", one.worker_id)), None)


def store_pairing(state_dir: Path, pairing: Pairing) -> None:
    """Keep a pairing, in place of the one of its gateway and id; raise `OSError`, `ValueError`."""
    place = pairing.gateway_url, pairing.worker_id
    others = [one for one in _read(state_dir) if (one.gateway_url, one.worker_id) != place]
    _write(state_dir, [*others, pairing])


def _read(state_dir: Path) -> Sequence[Pairing]:
    path = _file(state_dir)
    if not path.exists():
        return ()
    check_private(path)
    return _PAIRINGS.validate_json(path.read_bytes())


def _write(state_dir: Path, pairings: Sequence[Pairing]) -> None:
    path = _file(state_dir)
    make_private(path.parent)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    draft.write_text(json.dumps([one.model_dump() for one in pairings], indent=1))
    draft.replace(path)


def _file(state_dir: Path) -> Path:
    return state_dir.expanduser() / "pairings.json"
