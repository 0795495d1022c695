"""`GET /admin/v1/errors` and `GET /v1/errors`: the last requests that ended in an error.

An admin sees those of all keys, a client those of its own key.
"""

from __future__ import annotations

from datetime import UTC, datetime

from typing_extensions import TypedDict

from gateway.api.auth import CurrentGateway, CurrentKey, admin_router, data_router
from gateway.api.openapi import FOR_ADMINS, FOR_CLIENTS, failures
from gateway.assembly import Gateway
from gateway.auth.api_keys import ADMIN_KEY_ID

router = admin_router()
own = data_router()


class FailedRequest(TypedDict):
    """Requests that ended in one error, without any of their text."""

    count: int
    """The requests that ended so."""
    time: str
    """Of the last one, in UTC."""
    request_id: str
    """Of the last one."""
    key: str
    """The id of the API key, also if the key has ended; empty without a key."""
    key_name: str
    address: str
    """Of the client; behind a proxy, as the proxy reports it."""
    model: str
    """Empty if the request was rejected before its model was known."""
    worker: str
    """The worker that had the request last; empty if none had it."""
    status: int
    code: str
    """As in `errors` of `/v1/status`."""
    reason: str
    """The error in a sentence."""


class LastErrors(TypedDict):
    """The last errors of all gateways, the newest first; at most 100 different ones."""

    errors: list[FailedRequest]
    all_keys: bool
    """Whether they are those of all keys."""


@router.get("/admin/v1/errors", responses=failures(*FOR_ADMINS))
async def show_all(gateway: CurrentGateway) -> LastErrors:
    """Show the last errors of all requests."""
    return _last_errors(gateway, None)


@own.get("/v1/errors", responses=failures(*FOR_CLIENTS))
async def show_own(gateway: CurrentGateway, api_key: CurrentKey) -> LastErrors:
    """Show the last errors of requests with the same API key; without keys all."""
    key, required = api_key.caller.key, gateway.api_keys.required
    return _last_errors(gateway, key if required and key != ADMIN_KEY_ID else None)


def time_of(unix_s: float) -> str:
    """Return a time in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


def _last_errors(gateway: Gateway, key: str | None) -> LastErrors:
    names = {name: record.name for name, record in gateway.api_keys.records.items()}
    return {
        "all_keys": key is None,
        "errors": [
            {
                "count": one.count,
                "time": time_of(one.unix_s),
                "request_id": one.request_id,
                "key": one.key,
                "key_name": names.get(one.key, ""),
                "address": one.address,
                "model": one.model,
                "worker": one.worker_id,
                "status": one.status,
                "code": one.code,
                "reason": one.reason,
            }
            for one in gateway.recent_errors.newest_first()
            if key in (None, one.key)
        ],
    }
