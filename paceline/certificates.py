"""Certificates within a fleet: TLS 1.3 between gateways and paired workers, where both have one.

Each machine makes its own key (Ed25519). The authority of the fleet signs the public key under a
name that stands for one pairing, or for a gateway. `cryptography` is imported at the first use,
because it delays each start of a process.
"""

from __future__ import annotations

import hashlib
import ssl
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509 import Certificate

LIFE_S = 90 * 86_400.0
RENEWED_S = LIFE_S / 3
"""A certificate is renewed when it is valid for no longer than this."""
_BACKDATED_S = 2 * 86_400.0
"""For machines whose clock is late."""
_AUTHORITY_NAME = "Paceline fleet"
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
        from cryptography.hazmat.primitives import serialization as to  # noqa: PLC0415  # see above
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

        key = ed25519.Ed25519PrivateKey.generate()
        form = to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption()
        return cls(key=key.private_bytes(*form).decode())

    @property
    def public_key(self) -> str:
        """The public key in hexadecimal digits; raise `ValueError` if the key is none."""
        return _key(self.key).public_key().public_bytes_raw().hex()

    @property
    def until_s(self) -> int:
        """When the certificate expires, in seconds since 1970; 0 without one."""
        return (
            int(_read(self.certificate).not_valid_after_utc.timestamp()) if self.certificate else 0
        )

    def renewed(self, certificate: str, authority: str) -> Identity:
        """Return the identity with a new certificate; raise `ValueError` unless it is for this key.

        It must be of the authority that this identity has; one that has none yet takes this one.
        """
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  # see above

        trusted = self.authority or authority
        try:
            _read(certificate).verify_directly_issued_by(_read(trusted))
        except (InvalidSignature, TypeError) as error:
            raise ValueError("the certificate is of another authority") from error
        if _read(certificate).public_key() != _key(self.key).public_key():
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


def tls_context(*, server: bool = False) -> ssl.SSLContext:
    """Return a context for TLS 1.3 with certificates on both sides; an `Identity` loads its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # a resumed session would not present its certificate again
    return context


def peer_name(certificate: Mapping[str, Any] | None) -> str:
    """Return the name in the certificate of the other side; '' without one."""
    names = (certificate or {}).get("subjectAltName", ())
    return str(names[0][1]) if names else ""


class Authority:
    """The authority of a fleet, whose key is derived from 32 secret bytes."""

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415  # see above

        self._key = ed25519.Ed25519PrivateKey.from_private_bytes(secret)
        public_key = self._key.public_key().public_bytes_raw().hex()
        self.certificate = self._sign(public_key, "", *_ALWAYS)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 digest of its certificate."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate)).hexdigest()

    def issue(self, public_key: str, name: str, now_s: float) -> str:
        """Return a certificate for a public key, given the seconds since 1970."""
        now = datetime.fromtimestamp(int(now_s), UTC)
        life = timedelta(seconds=LIFE_S)
        return self._sign(public_key, name, now - timedelta(seconds=_BACKDATED_S), now + life)

    def _sign(self, public_key: str, name: str, begin: datetime, end: datetime) -> str:
        """Return a certificate for a name; the own one of the authority without a name."""
        from cryptography import x509  # noqa: PLC0415  # see above
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
        from cryptography.hazmat.primitives.serialization import Encoding  # noqa: PLC0415

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

        subject = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        digest = hashlib.sha256(f"{public_key} {begin} {end}".encode()).digest()
        builder = (
            x509.CertificateBuilder(named(_AUTHORITY_NAME), named(name or _AUTHORITY_NAME), subject)
            .serial_number(int.from_bytes(digest[:16], "big") >> 1)
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=not name, path_length=None), critical=True)
        )
        if name:
            names = x509.SubjectAlternativeName([x509.DNSName(name)])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, None).public_bytes(Encoding.PEM).decode()


def _read(certificate: str) -> Certificate:
    from cryptography.x509 import load_pem_x509_certificate  # noqa: PLC0415  # see above

    return load_pem_x509_certificate(certificate.encode())


def _key(text: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  # see above
    from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

    key = serialization.load_pem_private_key(text.encode(), None)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError("not a key of Ed25519")
    return key
