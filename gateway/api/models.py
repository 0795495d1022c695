"""`GET /v1/models`: the models that can be requested now, and their aliases."""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from gateway.api.auth import CurrentGateway, CurrentKey, data_router, of_anthropic
from gateway.api.openapi import FOR_CLIENTS, failures
from gateway.assembly import Gateway
from gateway.auth.api_keys import ApiKey
from gateway.engines.openai import OpenAIEngine
from gateway.errors import ModelUnknown
from paceline.request.profile import Endpoint
from policies.evaluate import ANY_MODEL, resolve_model, sampling_defaults

router = data_router("/v1/models")


class ModelSampling(TypedDict):
    """The default sampling values of a model."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class ServedModel(TypedDict):
    """A model in OpenAI's shape; `root` is the model behind an alias.

    `max_model_len` is vLLM's name of the context length. `endpoints` lists the endpoints that the
    model serves now, by their names in a policy. `sampling` has the values for requests that omit
    them: the policy's, else those of the model's `generation_config.json`, else OpenAI's.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    endpoints: list[str]
    sampling: ModelSampling


class ServedModels(TypedDict):
    """A list of models in OpenAI's shape."""

    object: Literal["list"]
    data: list[ServedModel]


@router.get("", responses=failures(*FOR_CLIENTS), response_model=ServedModels)
async def show_all(
    request: Request, gateway: CurrentGateway, api_key: CurrentKey
) -> ServedModels | Response:
    """List the models."""
    roots = _roots(gateway, api_key)
    if of_anthropic(request.scope):
        chats = gateway.fleet.view().models_of(Endpoint.CHAT)
        names = [name for name, root in roots.items() if root in chats]
        return JSONResponse(
            {
                "data": [_anthropic_model(gateway, name, roots[name]) for name in names],
                "has_more": False,
                "first_id": next(iter(names), None),
                "last_id": next(reversed(names), None),
            }
        )
    return {"object": "list", "data": [_model(gateway, name, root) for name, root in roots.items()]}


@router.get(
    "/{name:path}", responses=failures(*FOR_CLIENTS, ModelUnknown), response_model=ServedModel
)
async def show(
    name: str, request: Request, gateway: CurrentGateway, api_key: CurrentKey
) -> ServedModel | Response:
    """Show one model."""
    root = _roots(gateway, api_key).get(name)
    if root is None:
        raise ModelUnknown(name)
    if of_anthropic(request.scope):
        return JSONResponse(_anthropic_model(gateway, name, root))
    return _model(gateway, name, root)


def _roots(gateway: Gateway, api_key: ApiKey) -> dict[str, str]:
    """Map each name that the key may request now to the model behind it."""
    fleet = gateway.fleet.view()
    served = fleet.served_models
    policy = gateway.policy_store.current
    aliases = [alias for model in policy.models.values() for alias in model.aliases]
    resolved = {name: resolve_model(policy, name, served) for name in (*sorted(served), *aliases)}
    resolved[ANY_MODEL] = resolve_model(policy, ANY_MODEL, fleet.models_of(Endpoint.CHAT))
    allowed = served if api_key.models is None else served & api_key.models
    return {name: model for name, model in resolved.items() if model in allowed}


def _anthropic_model(gateway: Gateway, name: str, root: str) -> dict[str, str | int | None]:
    context_tokens = _context_tokens(gateway, root)
    limits = (context_tokens, gateway.policy_store.current.limits.max_tokens)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": context_tokens,
        "max_tokens": min((limit for limit in limits if limit), default=None),
    }


def _context_tokens(gateway: Gateway, root: str) -> int | None:
    """Return the context that each worker of a model has at least; None if no worker reports it."""
    contexts = [
        one.backend.model(root).context_tokens
        if isinstance(one.backend, OpenAIEngine)
        else one.report.context_tokens
        for one in gateway.fleet.workers()
        if root in one.models
    ]
    return min(filter(None, contexts), default=None)


def _model(gateway: Gateway, name: str, root: str) -> ServedModel:
    fleet = gateway.fleet.view()
    sampling = sampling_defaults(gateway.policy_store.current, root, fleet.sampling)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "paceline",
        "root": root,
        "max_model_len": _context_tokens(gateway, root),
        "endpoints": sorted(fleet.endpoints_of(root)),
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        },
    }
