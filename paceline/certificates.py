"""Certificates within a fleet: one for each gateway and each paired worker, and their authority.

Each machine makes its own key (Ed25519). The authority of the fleet signs the public key under a
name that stands for one pairing, or for a gateway. The library takes a tenth of a second to import,
so only a process that needs it imports this module.
"""

from __future__ import annotations

import hashlib
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict

from paceline.pairing import CERTIFICATE_BACKDATED_S, CERTIFICATE_LIFE_S

_AUTHORITY = "fleet.paceline"
# The authority of a fleet has the same certificate at each gateway, whenever that makes it.
_ALWAYS = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


class Identity(BaseModel):
    """A key, its certificate and the authority of the fleet, in PEM; the last two may be ''."""

    model_config = ConfigDict(frozen=True)

    key: str
    certificate: str = ""
    authority: str = ""

    @classmethod
    def new(cls) -> Identity:
        """Return a new key, which has no certificate yet."""
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        none = serialization.NoEncryption()
        return cls(key=Ed25519PrivateKey.generate().private_bytes(encoding, form, none).decode())

    @property
    def public_key(self) -> str:
        """The public key in hexadecimal digits; raise `ValueError` if the key is damaged."""
        key = serialization.load_pem_private_key(self.key.encode(), None)
        return _public_key(key.public_key())

    @property
    def until_s(self) -> int:
        """When the certificate expires, in seconds since 1970; 0 without one."""
        end = _read(self.certificate).not_valid_after_utc if self.certificate else None
        return int(end.timestamp()) if end else 0

    def renewed(self, certificate: str, authority: str) -> Identity:
        """Return the identity with a new certificate; raise `ValueError` unless it is for this key.

        It must be of the authority that this identity has. One without an authority takes this one.
        """
        trusted = self.authority or authority
        try:
            _read(certificate).verify_directly_issued_by(_read(trusted))
        except (InvalidSignature, TypeError) as error:
            raise ValueError("the certificate is of another authority") from error
        if _public_key(_read(certificate).public_key()) != self.public_key:
            raise ValueError("the certificate is for another key")
        return Identity(key=self.key, certificate=certificate, authority=trusted)

    def load(self, context: ssl.SSLContext) -> None:
        """Let a context present the certificate from now on, and trust only the authority."""
        context.load_verify_locations(cadata=self.authority)
        with tempfile.NamedTemporaryFile("w") as file:  # of this user only; OpenSSL wants a file
            file.write(self.key + self.certificate)
            file.flush()
            context.load_cert_chain(file.name)


def identity_file(state_dir: Path, gateway_url: str, worker_id: str) -> Path:
    """Return the file with the identity of a paired worker."""
    place = hashlib.sha256(f"{gateway_url} {worker_id}".encode()).hexdigest()[:16]
    return state_dir.expanduser() / f"identity-{place}.json"


class Authority:
    """The authority of a fleet, whose key is derived from 32 secret bytes."""

    def __init__(self, secret: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        own = _public_key(self._key.public_key())
        self.certificate = self._sign(own, _AUTHORITY, *_ALWAYS, authority=True)
        der = ssl.PEM_cert_to_DER_cert(self.certificate)
        self.fingerprint = hashlib.sha256(der).hexdigest()

    def issue(self, public_key: str, name: str, now_s: float) -> str:
        """Return a certificate for a public key, given the seconds since 1970."""
        now = datetime.fromtimestamp(int(now_s), UTC)
        begin = now - timedelta(seconds=CERTIFICATE_BACKDATED_S)
        return self._sign(public_key, name, begin, now + timedelta(seconds=CERTIFICATE_LIFE_S))

    def new_identity(self, name: str, now_s: float) -> Identity:
        """Return a new key with a certificate."""
        new = Identity.new()
        return new.renewed(self.issue(new.public_key, name, now_s), self.certificate)

    def _sign(
        self, public_key: str, name: str, begin: datetime, end: datetime, *, authority: bool = False
    ) -> str:
        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

        subject = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        digest = hashlib.sha256(f"{public_key} {begin} {end}".encode()).digest()
        builder = (
            x509.CertificateBuilder(named(_AUTHORITY), named(name), subject)
            .serial_number(int.from_bytes(digest[:16], "big") >> 1)
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        )
        return builder.sign(self._key, None).public_bytes(serialization.Encoding.PEM).decode()


def _public_key(key: object) -> str:
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("not a key of Ed25519")
    return key.public_bytes_raw().hex()


def _read(certificate: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate.encode())
