"""Who may use a route: dependencies that raise before the route runs."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from gateway.access import bears, comes_from_this_machine
from gateway.client import header
from gateway.line import Line
from gateway.refusals import KeyRefused, NotAllowedHere

Guard = Callable[[Request], None]


def with_data_key(line: Line) -> Guard:
    """Demand the data-plane key, or the admin key, once there is one."""
    settings = line.settings

    def guard(request: Request) -> None:
        offered = header(request.scope, b"authorization")
        if settings.api_key and not bears(offered, settings.api_key, settings.admin_key):
            raise KeyRefused

    return guard


def with_join_token(line: Line) -> Guard:
    """Demand the secret that workers share with this gateway; without one nobody joins."""

    def guard(request: Request) -> None:
        if not bears(header(request.scope, b"authorization"), line.settings.join_token):
            raise KeyRefused

    return guard


def with_admin_key(line: Line) -> Guard:
    """Demand the admin key or the join token; without an admin key this machine is trusted."""
    by_admins = by_admins_alone(line)

    def guard(request: Request) -> None:
        if not bears(header(request.scope, b"authorization"), line.settings.join_token):
            by_admins(request)

    return guard


def by_admins_alone(line: Line) -> Guard:
    """Demand the admin key and take no other; without one this machine is trusted.

    The join token lies on every worker, and who has a worker is not to change where requests go.
    """
    settings = line.settings

    def guard(request: Request) -> None:
        if settings.admin_key is not None:
            if not bears(header(request.scope, b"authorization"), settings.admin_key):
                raise KeyRefused
            return
        peer = request.client.host if request.client else None
        if not comes_from_this_machine(peer, request.scope["headers"]):
            raise NotAllowedHere

    return guard
