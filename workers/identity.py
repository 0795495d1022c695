"""The identity of a paired worker: its file, its certificates, and the TLS that they allow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.certificates import Identity
from paceline.http import paired_tls
from paceline.private_files import check_private, make_private, replace_file
from paceline.protocol import WorkerReport

log = logging.getLogger(__name__)


class WorkerIdentity:
    """The identity in a file, which a pairing has written; a new one without a file.

    Raise `OSError`, or `ValueError` for a damaged file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        make_private(file.parent)
        if file.exists():
            check_private(file)
            self._identity = Identity.model_validate_json(file.read_bytes())
        else:
            self._identity = Identity.new()
            replace_file(file, self._identity.model_dump_json())
        self.public_key = self._identity.public_key
        self.server, self.client = paired_tls(server=True), paired_tls()
        self.certified = asyncio.Event()
        self._ended: frozenset[str] = frozenset()
        if self._identity.certificate:
            self._load()
        self.speaks_tls = self.certified.is_set()
        """The port speaks TLS, or will when it opens; a first certificate may come later."""

    def named(self, report: WorkerReport) -> WorkerReport:
        """Return a report of the plain port with the key, and with the URL of the port as it is."""
        certified = {"public_key": self.public_key, "certificate_until_s": self._identity.until_s}
        return report.model_copy(update={**certified, "url": self.url(report.url)})

    def url(self, address: str) -> str:
        """Return the URL of this worker, given that of a plain port."""
        return address.replace("http://", "https://", 1) if self.speaks_tls else address

    def refuses(self, certificate: Mapping[str, Any] | None) -> bool:
        """Return whether the other side has the certificate of a pairing that has ended."""
        return any(one in self._ended for _, one in (certificate or {}).get("subjectAltName", ()))

    def apply(self, answer: Mapping[str, Any]) -> None:
        """Apply the answer to a heartbeat: ended pairings, and the certificate if it has one."""
        ended = answer.get("ended_pairings")
        self._ended = frozenset(map(str, ended)) if isinstance(ended, list) else frozenset()
        certificate, authority = answer.get("certificate"), answer.get("authority")
        if not (isinstance(certificate, str) and isinstance(authority, str)):
            return
        try:
            self._identity = self._identity.renewed(certificate, authority)
            self._load()
            replace_file(self._file, self._identity.model_dump_json())
        except ValueError as error:  # somebody between worker and gateway may have sent it
            log.warning("certificate.refused reason=%s", error)
        except OSError as error:  # it holds until a restart, and then the gateway sends another one
            log.warning("certificate.unstored file=%s reason=%s", self._file, error.strerror)

    def _load(self) -> None:
        for context in (self.server, self.client):
            self._identity.load(context)
        self.certified.set()
