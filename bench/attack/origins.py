"""Pages of other sites: requests and preflights from every spelling of an origin."""

from __future__ import annotations

import itertools
from random import Random
from typing import Final, NamedTuple

from bench.attack.attack import Attack
from bench.attack.http_client import connection

ALLOWED: Final = ("https://app.example", "app://obsidian.md")
"""The origins whose pages may use the data plane of the attacked gateway."""
_QUIET_S: Final = 5.0
_DATA: Final = "/v1/"
_ADMIN: Final = "/admin"
_PATHS: Final = (
    *("/v1/models", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/status"),
    *("/v1/route/explain", "/v1/errors", "/v1/nothing", "/v1/../admin/v1/keys", "//v1/models"),
    *("/admin/v1/keys", "/admin/v1/policy", "/admin/v1/workers", "/admin/v1/workers/demo/drain"),
    *("/admin", "/", "/livez", "/metrics", "/openapi.json"),
)
_METHODS: Final = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "OPTIONS", "HEAD")
_ODD: Final = (
    *("null", "*", "", "https://", "https://evil.example", "file://", "http://localhost"),
    *("chrome-extension://abc", "https://app.example,https://evil.example", "\xff", "a" * 4000),
)
_WANTED: Final = ("authorization", "x-api-key, content-type", "*", "x\tb", "a" * 4000)
_HEADERS: Final = {
    "sec-fetch-site": ("same-origin", "same-site", "cross-site", "none", "x"),
    "sec-fetch-mode": ("cors", "no-cors", "navigate", "websocket"),
    "access-control-request-method": (*_METHODS, "x"),
    "access-control-request-headers": _WANTED,
    "access-control-request-private-network": ("true", "x"),
}


class Page(NamedTuple):
    """A request as a page makes a browser send it, or as no browser would."""

    origins: list[str]
    path: str
    method: str
    headers: str

    def request(self) -> bytes:
        """Return the request; a preflight always says what it asks for."""
        headers = self.headers + "".join(f"origin: {origin}\r\n" for origin in self.origins)
        if self.method == "OPTIONS" and "access-control-request-method" not in headers:
            headers += "access-control-request-method: POST\r\n"
        return (
            f"{self.method} {self.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            f"{headers}content-type: text/plain\r\ncontent-length: 2\r\n\r\n{{}}"
        ).encode("latin-1")

    def problem(self, status: int, lines: list[str]) -> str:
        """Return what is wrong with the head of an answer, or an empty string."""
        pairs = [tuple(line.split(": ", 1)) for line in lines]
        told = [pair[1] for pair in pairs if pair[0] == "access-control-allow-origin"]
        if self.path.startswith(_ADMIN):
            if told:
                return "a page may read an admin route"
            return "an admin route opened" if "/v1/" in self.path and status < 400 else ""
        if any(pair[0] == "access-control-allow-credentials" for pair in pairs):
            return "a page may send cookies"
        if any(origin not in ALLOWED or origin not in self.origins for origin in told):
            return f"a page of {told} may read the answer"
        allowed = len(self.origins) == 1 and self.origins[0] in ALLOWED
        may_read = (told, ("vary", "origin") in pairs) == (self.origins, True)
        if allowed and self.path.startswith(_DATA) and status != 400 and not may_read:
            return "a page of an allowed origin may not read the answer"
        return ""


class Origins(Attack):
    """Requests of pages in browsers, at routes of the data plane and of admins."""

    name = "origins"
    promise = "pages of allowed origins alone read answers, of /v1 alone; none opens an admin route"
    share = 0.06
    concurrency = 16

    async def prepare(self) -> None:
        origins = (*ALLOWED, *_ODD)
        for origin, path, method in itertools.product(origins, _PATHS, ("GET", "OPTIONS")):
            await self._send(Page([origin], path, method, ""))

    async def one(self, chance: Random) -> None:
        origins = [_origin(chance) for _ in range(chance.choice((1, 1, 1, 1, 2)))]
        authorizations = (f"Bearer {self.target.key}", "Bearer x", "Basic eDp4")
        headers = "".join(
            f"{name}: {chance.choice(values)}\r\n"
            for name, values in {"authorization": authorizations, **_HEADERS}.items()
            if chance.random() < 0.4
        )
        await self._send(Page(origins, chance.choice(_PATHS), chance.choice(_METHODS), headers))

    async def _send(self, page: Page) -> None:
        raw = page.request()
        self.tally.begin(raw)
        async with connection(self.target.gateway_port) as opened:
            await opened.send(raw)
            received = await opened.read_all(_QUIET_S)
        head, _, body = received.partition(b"\r\n\r\n")
        status, *lines = head.lower().decode("latin-1").split("\r\n")
        code = int(status.split()[1]) if status else 0
        self.count(code, body, raw)
        if code and (problem := page.problem(code, lines)):
            self.tally.fail(problem, (raw, head))


def _origin(chance: Random) -> str:
    """Return an allowed origin, one that resembles it, or none at all."""
    origin = chance.choice(ALLOWED)
    match chance.randrange(8):
        case 0 | 1 | 2:
            return origin
        case 3:
            return origin + chance.choice((".", "/", ":443", ":0", ".evil.example", "@evil", "#"))
        case 4:
            return chance.choice(("x", "evil.", "https://evil.example/?")) + origin
        case 5:
            return origin.swapcase()
        case 6:
            at = chance.randrange(len(origin))
            return origin[:at] + chance.choice(("%2e", "\xe9", "..", "")) + origin[at + 1 :]
        case _:
            return chance.choice(_ODD)
