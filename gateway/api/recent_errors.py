"""`GET /admin/v1/errors` and `GET /v1/errors`: the last requests that ended in an error.

An admin sees those of all keys, a client those of its own key.
"""

from __future__ import annotations

from datetime import UTC, datetime

from typing_extensions import TypedDict

from gateway.api.auth import CurrentGateway, CurrentKey, admin_router, data_router
from gateway.api.openapi import FOR_ADMINS, FOR_CLIENTS, failures
from gateway.assembly import Gateway

router = admin_router()
own = data_router()


class FailedRequest(TypedDict):
    """One request that ended in an error, without any of its text."""

    time: str
    """In UTC."""
    request_id: str
    key: str
    """The id of the API key; empty without one."""
    key_name: str
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
    """The last errors of all gateways, the newest first; at most 100."""

    errors: list[FailedRequest]


@router.get("/admin/v1/errors", responses=failures(*FOR_ADMINS))
async def show_all(gateway: CurrentGateway) -> LastErrors:
    """Show the last errors of all requests."""
    return _last_errors(gateway, None)


@own.get("/v1/errors", responses=failures(*FOR_CLIENTS))
async def show_own(gateway: CurrentGateway, api_key: CurrentKey) -> LastErrors:
    """Show the last errors of requests with the same API key, or of all those without one."""
    return _last_errors(gateway, api_key.caller.key)


def _last_errors(gateway: Gateway, key: str | None) -> LastErrors:
    names = {name: record.name for name, record in gateway.api_keys.records.items()}
    return {
        "errors": [
            {
                "time": datetime.fromtimestamp(one.unix_s, UTC).isoformat(timespec="milliseconds"),
                "request_id": one.request_id,
                "key": one.key,
                "key_name": names.get(one.key, ""),
                "model": one.model,
                "worker": one.worker_id,
                "status": one.status,
                "code": one.code,
                "reason": one.reason,
            }
            for one in gateway.recent_errors.newest_first()
            if key in (None, one.key)
        ]
    }
