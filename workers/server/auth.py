"""The join token, demanded on every route but /livez."""

from __future__ import annotations

import hashlib
import hmac

from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.server.errors import NotAuthorised, render

OPEN_PATHS = frozenset({"/livez"})


class TokenGuard:
    """Let a request through when it carries the token, or when the worker has none."""

    def __init__(self, app: ASGIApp, token: SecretStr | None) -> None:
        self._app = app
        self._expected = _digest(f"Bearer {token.get_secret_value()}".encode()) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with 401, or pass on unchanged."""
        if scope["type"] != "http" or self._expected is None or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        # Digests have one length, and bytes may hold anything: no timing, no TypeError on "é".
        if hmac.compare_digest(_digest(given), self._expected):
            await self._app(scope, receive, send)
            return
        refusal = await render(Request(scope), NotAuthorised())
        await refusal(scope, receive, send)


def _digest(credentials: bytes) -> bytes:
    return hashlib.sha256(credentials).digest()
