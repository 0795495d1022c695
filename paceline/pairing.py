"""Pairing of a worker with a gateway by a short code: the exchange and its result.

Both sides run SPAKE2 over Ed25519 with the code as password. So a listener learns nothing, and
whoever does not know the code can check one guess an exchange, which costs the code. Each side then
proves its key, and only after that the gateway sends what the worker keeps, sealed with a third
key. Keys are of one exchange and of the name that the worker sent.

The library takes a time that depends on the numbers, which are new in each exchange.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from paceline.private_files import check_private

PAIRING_PATH = "/admin/v1/pairing"
ALPHABET = "ABCDEFGHJKMNPQRSTVWXYZ"
"""Letters of codes, without similar ones."""
CODE_CHARS = 8
CODE_VALID_S = 120.0
CERTIFICATE_LIFE_S = 90 * 86_400.0
CERTIFICATE_BACKDATED_S = 2 * 86_400.0
"""A certificate is valid so long before it is made, for machines whose clock is late."""
TOKEN_PREFIX = "paired-"  # noqa: S105  # of all tokens of paired workers
_INFO = b"paceline pairing 1 "
_NONCE = bytes(12)
"""Of the one message that its key seals."""

Message = Annotated[str, Field(pattern="^[0-9a-f]{66}$")]
"""A message of SPAKE2."""
Key = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PublicKey = Key
"""Of a certificate."""
WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class PairingRequest(BaseModel):
    """The first message of a worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: WorkerId
    """The id that it would like."""
    message: Message


class PairingAnswer(BaseModel):
    """The answer of a gateway."""

    message: Message
    proof: Key
    """The gateway knows the code."""


class Pairing(BaseModel):
    """The record of a paired worker; gateway and worker call each other with its token."""

    gateway_url: str = ""
    worker_id: WorkerId
    token: str = Field(pattern=r"^[!-~]{1,200}$")
    nodes_key: Key
    """The key for the exchange of prefix-cache nodes between workers of one fleet."""
    certificate: str = ""
    authority: str = ""
    """The certificate of the worker and that of the fleet, in PEM; gateways of older versions send
    none."""


class PairingWrong(Exception):
    """The other side does not know the code, or sent an invalid message."""


class SessionKeys(NamedTuple):
    """The keys of one exchange, in hexadecimal digits."""

    gateway_proof: str
    worker_proof: str
    sealing: str
    """Of the gateway's message."""
    worker_sealing: str = ""
    """Of the worker's message."""


class PairingSide:
    """One side of one exchange."""

    def __init__(self, code: str, *, of_gateway: bool = False) -> None:
        from spake2 import SPAKE2_A, SPAKE2_B  # noqa: PLC0415  # delays each start of a process

        kind = SPAKE2_B if of_gateway else SPAKE2_A
        self._side: Any = kind(code.encode(), idA=b"paceline worker", idB=b"paceline gateway")
        self.message: str = self._side.start().hex()

    def keys(self, message: str, name: str) -> SessionKeys:
        """Return the keys, given the other side's message; raise `PairingWrong`."""
        from spake2 import SPAKEError  # noqa: PLC0415  # as above
        from spake2.ed25519_basic import NotOnCurve  # noqa: PLC0415  # as above

        try:
            shared = self._side.finish(bytes.fromhex(message))
        except (SPAKEError, NotOnCurve, ValueError):  # no point of the group
            raise PairingWrong from None
        keys = HKDF(SHA256(), 128, salt=None, info=_INFO + name.encode()).derive(shared).hex()
        return SessionKeys(*(keys[begin : begin + 64] for begin in range(0, len(keys), 64)))


def is_due(until_s: float, now_s: float) -> bool:
    """Return whether a certificate with this end is in its last third, or begins in the future."""
    left_s = until_s - now_s
    return not CERTIFICATE_LIFE_S / 3 <= left_s <= CERTIFICATE_LIFE_S + CERTIFICATE_BACKDATED_S


def seal(text: str, key: str) -> str:
    """Encrypt the only message of a key."""
    return AESGCM(bytes.fromhex(key)).encrypt(_NONCE, text.encode(), None).hex()


def unseal(sealed: str, key: str) -> str:
    """Decrypt a message; raise `PairingWrong`."""
    try:
        return AESGCM(bytes.fromhex(key)).decrypt(_NONCE, bytes.fromhex(sealed), None).decode()
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


PAIRINGS = TypeAdapter(tuple[Pairing, ...])
"""The pairings of a Mac, in one file: one for each of its workers and their gateway."""


def pairings_file(state_dir: Path) -> Path:
    """Return the file of all pairings of this machine."""
    return state_dir.expanduser() / "pairings.json"


def stored_pairings(state_dir: Path) -> tuple[Pairing, ...]:
    """Return all pairings of this machine; raise `OSError` or `ValueError` for a wrong file."""
    path = pairings_file(state_dir)
    if not path.exists():
        return ()
    check_private(path)
    return PAIRINGS.validate_json(path.read_bytes())
