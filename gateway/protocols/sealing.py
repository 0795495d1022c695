"""Seal reasoning that clients store and only this gateway may read again."""

import base64
import binascii
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

_PERSON = b"paceline-sealing"
_MARK = b"paceline-1"


class Sealer:
    """Encrypts texts with a key that is derived from a secret, by AES-SIV (RFC 5297).

    One text has one sealed form: no number must be unique, and prompts stay the same.
    """

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESSIV(blake2b(secret, digest_size=64, person=_PERSON).digest())

    def seal(self, text: bytes, purpose: bytes, scope: str = "") -> str:
        """Return the text in base64, sealed for a purpose and an isolation scope."""
        bound = _bound_to(purpose, scope)
        return base64.urlsafe_b64encode(self._cipher.encrypt(text, bound)).decode()

    def unseal(self, sealed: str, purpose: bytes, scope: str = "") -> bytes | None:
        """Return the text; None if it was not sealed for this purpose and scope with this key."""
        try:
            return self._cipher.decrypt(base64.urlsafe_b64decode(sealed), _bound_to(purpose, scope))
        except (InvalidTag, binascii.Error, ValueError):
            return None


def _bound_to(purpose: bytes, scope: str) -> list[bytes]:
    return [_MARK, purpose, *filter(None, (scope.encode(),))]
