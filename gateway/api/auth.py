"""Who may use a route: dependencies that raise before the route runs.

Keys of the data plane, the admin key and the join token are three kinds; none opens what is
another's, also where nothing is demanded.

Guards are coroutines though they wait for nothing: plain functions FastAPI runs in a thread.

What admins say of themselves and their edits, in headers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated
from urllib.parse import unquote_to_bytes

from fastapi import Security
from fastapi.security import HTTPBearer
from starlette.requests import Request

from gateway.api.openapi import DATA_KEY, parameter
from gateway.assembly import Gateway
from gateway.auth.api_keys import ANONYMOUS, ApiKey, matches_any_secret
from gateway.auth.origins import comes_from_foreign_page, comes_from_this_machine
from gateway.errors import FieldInvalid, KeyRefused, NotAllowedHere, PageRefused
from gateway.http.downstream import header

Guard = Callable[..., Awaitable[None]]


def _named(name: str, meaning: str) -> HTTPBearer:
    return HTTPBearer(scheme_name=name, description=meaning, auto_error=False)


# Only for the published OpenAPI: a guard judges the header itself.
_DataKey = Annotated[object, Security(_named(DATA_KEY, "A key of the data plane."))]
_AdminKey = Annotated[object, Security(_named("adminKey", "`PACELINE_ADMIN_KEY`."))]
_JoinToken = Annotated[object, Security(_named("joinToken", "What workers join with."))]


def with_data_key(gateway: Gateway) -> Guard:
    """Demand a key of the data plane, once there is one; `holder_of` tells whose it was.

    Until then nothing is taken from a page of another site.
    """

    async def guard(request: Request, _told: _DataKey = None) -> None:
        holder = ANONYMOUS
        if gateway.api_keys.required:
            holder = gateway.api_keys.authenticate(header(request.scope, b"authorization"))
        elif comes_from_foreign_page(request.scope["headers"]):
            raise PageRefused
        request.state.holder = holder

    return guard


def holder_of(request: Request) -> ApiKey:
    """Tell who asks on a route that is guarded by `with_data_key`."""
    holder: ApiKey = request.state.holder
    return holder


def with_join_token(gateway: Gateway) -> Guard:
    """Demand the secret that workers share with this gateway; without one nobody joins."""

    async def guard(request: Request, _told: _JoinToken = None) -> None:
        if not matches_any_secret(
            header(request.scope, b"authorization"), gateway.settings.join_token
        ):
            raise KeyRefused

    return guard


def with_admin_key(gateway: Gateway) -> Guard:
    """Demand the admin key; without one this machine is trusted, unless it shows another kind."""
    settings = gateway.settings

    async def guard(request: Request, _told: _AdminKey = None) -> None:
        offered = header(request.scope, b"authorization")
        if matches_any_secret(offered, settings.admin_key):
            request.state.way_in = "admin"
            return
        if settings.admin_key is not None:
            raise KeyRefused
        peer = request.client.host if request.client else None
        if not comes_from_this_machine(peer, request.scope["headers"]):
            raise NotAllowedHere
        if matches_any_secret(offered, settings.join_token) or gateway.api_keys.accepts(offered):
            raise KeyRefused
        request.state.way_in = "loopback"

    return guard


def way_in(request: Request) -> str:
    """Tell how an admin came in: with the `admin` key, or without one from here, by `loopback`."""
    told: str = request.state.way_in
    return told


AUTHOR_HEADER = "x-paceline-author"
NOTE_HEADER = "x-paceline-note"
AUTHOR = parameter(AUTHOR_HEADER, "header", "Who edits; percent-encoded.")
_AUTHOR_CHARS = 100
_NOTE_CHARS = 500


def read_author(request: Request) -> str:
    """Read who edits, as they say themselves; else how they came in."""
    return _said(request, AUTHOR_HEADER, _AUTHOR_CHARS) or way_in(request)


def read_note(request: Request) -> str:
    """Read what an edit is for; empty where nothing is said."""
    return _said(request, NOTE_HEADER, _NOTE_CHARS)


def _said(request: Request, name: str, limit_chars: int) -> str:
    """Read text that a person wrote: UTF-8, and what is not ASCII percent-encoded or not."""
    try:
        said = unquote_to_bytes(header(request.scope, name.encode()) or b"").decode().strip()
    except UnicodeDecodeError:
        said = "\0"
    # It is shown on terminals, where other characters move the cursor.
    if not said.isprintable() or len(said) > limit_chars:
        raise FieldInvalid(
            f"'{name}' must be one line of at most {limit_chars} characters in UTF-8, those that "
            "are not ASCII percent-encoded.",
            param=name,
        )
    return said
