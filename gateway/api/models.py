"""`GET /v1/models`: the models that can be requested now, and their aliases."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from gateway.api.auth import CurrentGateway, CurrentKey, data_router
from gateway.api.openapi import FOR_CLIENTS, failures
from gateway.assembly import Gateway
from gateway.auth.api_keys import ApiKey
from gateway.errors import ModelUnknown
from policies.evaluate import ANY_MODEL, resolve_model

router = data_router("/v1/models")


class ServedModel(TypedDict):
    """A model in OpenAI's shape; `root` is the model behind an alias."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str


class ServedModels(TypedDict):
    """A list of models in OpenAI's shape."""

    object: Literal["list"]
    data: list[ServedModel]


@router.get("", responses=failures(*FOR_CLIENTS))
async def show_all(gateway: CurrentGateway, api_key: CurrentKey) -> ServedModels:
    """List the models."""
    roots = _roots(gateway, api_key)
    return {"object": "list", "data": [_model(name, root) for name, root in roots.items()]}


@router.get("/{name:path}", responses=failures(*FOR_CLIENTS, ModelUnknown))
async def show(name: str, gateway: CurrentGateway, api_key: CurrentKey) -> ServedModel:
    """Show one model."""
    root = _roots(gateway, api_key).get(name)
    if root is None:
        raise ModelUnknown(name)
    return _model(name, root)


def _roots(gateway: Gateway, api_key: ApiKey) -> dict[str, str]:
    """Map each name that the key may request now to the model behind it."""
    served = gateway.fleet.view().served_models
    policy = gateway.policy_store.current
    aliases = [alias for model in policy.models.values() for alias in model.aliases]
    names = [*sorted(served), *aliases, ANY_MODEL]
    resolved = {name: resolve_model(policy, name, served) for name in names}
    allowed = served if api_key.models is None else served & api_key.models
    return {name: model for name, model in resolved.items() if model in allowed}


def _model(name: str, root: str) -> ServedModel:
    return {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "root": root}
