"""`GET /v1/models`: the models that answer now, and the other names they answer to."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request

from gateway.api.auth import holder_of, with_data_key
from gateway.api.openapi import FOR_CLIENTS, failures
from gateway.assembly import Gateway
from gateway.auth.api_keys import ApiKey
from gateway.errors import ModelUnknown
from policies.evaluate import ANY_MODEL, resolve_model


def models(gateway: Gateway) -> APIRouter:
    """Hold the routes under /v1/models."""
    router = APIRouter(prefix="/v1/models", dependencies=[Depends(with_data_key(gateway))])

    @router.get("", responses=failures(*FOR_CLIENTS))
    async def listing(request: Request) -> dict[str, Any]:
        names = _names(gateway, holder_of(request))
        entries = [_entry(name, root) for name, root in names.items()]
        return {"object": "list", "data": entries}

    @router.get("/{name:path}", responses=failures(*FOR_CLIENTS, ModelUnknown))
    async def one(name: str, request: Request) -> dict[str, Any]:
        root = _names(gateway, holder_of(request)).get(name)
        if root is None:
            raise ModelUnknown(name)
        return _entry(name, root)

    return router


def _names(gateway: Gateway, holder: ApiKey) -> dict[str, str]:
    """Map every name that would be answered now to the model behind it."""
    served = gateway.fleet.view().served_models
    policy = gateway.policy_store.current
    aliases = [alias for model in policy.models.values() for alias in model.aliases]
    asked = [*sorted(served), *aliases, ANY_MODEL]
    resolved = {name: resolve_model(policy, name, served) for name in asked}
    allowed = served if holder.models is None else served & holder.models
    return {name: model for name, model in resolved.items() if model in allowed}


def _entry(name: str, root: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "root": root}
