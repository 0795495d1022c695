"""`/admin/v1/engines`: engines of other kinds, which admins join, list and remove at run time."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field
from typing_extensions import TypedDict

from gateway.api.auth import Author, CurrentGateway, admin_router
from gateway.api.openapi import FOR_ADMINS, STORED, WITH_BODY, failures
from gateway.assembly import Gateway
from gateway.config.static_workers import WORKER_ID, StaticWorker, pool_problems
from gateway.engines.base import EngineModel
from gateway.engines.openai import OpenAIEngine
from gateway.errors import EngineListed, EngineUnknown, FieldInvalid, WorkerIdTaken
from gateway.fleet.engine_watch import WatchedEngine

router = admin_router("/admin/v1/engines")
_JOIN = failures(*FOR_ADMINS, *STORED, *WITH_BODY, FieldInvalid, WorkerIdTaken, EngineListed)
_REMOVE = failures(*FOR_ADMINS, *STORED, EngineUnknown, EngineListed)


class EngineTerms(StaticWorker):
    """An engine to join; only its URL is required."""

    id: str = Field(default="", pattern=f"^$|{WORKER_ID}")
    """Its id as a worker; by default it is made of its address."""


class ModelDetails(TypedDict):
    """One model of an engine."""

    name: str
    """For clients."""
    engine_name: str
    """At the engine."""
    loaded: bool
    """It is in memory, according to the engine."""
    load_s: float
    """The estimated time to load it; 0 if it is in memory."""
    context_tokens: int
    """0 if unknown."""
    lacks: list[str]
    """Features that it does not take; other workers get such requests."""


class EngineDetails(TypedDict):
    """One engine as the gateway sees it, without models until it has answered."""

    id: str
    kind: str
    """As the gateway has found out; `auto` until then."""
    url: str
    source: Literal["settings", "admin"]
    problem: str
    """Why it gets no requests; empty if it does."""
    models: list[ModelDetails]
    pools: list[str]
    labels: list[str]
    slots: int
    """Requests at a time; 0 until the engine has answered."""
    isolation: Literal["cache_salt", "no reuse", "none"]
    """How it keeps the cached prompts of isolation scopes apart."""
    drafts: bool
    """It decodes speculatively, according to the engine."""
    api_key_env: str
    """The environment variable of its API key at the gateway; empty if it needs none."""


class Engines(TypedDict):
    """All engines of other kinds."""

    engines: list[EngineDetails]


@router.get("", responses=failures(*FOR_ADMINS, *STORED))
async def show_all(gateway: CurrentGateway) -> Engines:
    """Show the engines in the settings and the joined ones."""
    await gateway.engine_records.refresh()
    return {"engines": [_details(gateway, one) for one in gateway.engine_watch.engines.values()]}


@router.post("", status_code=201, responses=_JOIN)
async def join(terms: EngineTerms, author: Author, gateway: CurrentGateway) -> EngineDetails:
    """Join an engine: the gateway asks it for its kind and its models, and stores a record."""
    worker_id = terms.id or _id_of(terms.url)
    worker = StaticWorker.model_validate({**terms.model_dump(), "id": worker_id})
    for problem in pool_problems((worker,), gateway.policy_store.current):
        raise FieldInvalid(f"{problem[0].upper()}{problem[1:]}.", param="pools")
    watched = await gateway.engine_records.add(worker, author)
    return _details(gateway, watched)


@router.delete("/{worker_id}", status_code=204, responses=_REMOVE)
async def remove(worker_id: str, author: Author, gateway: CurrentGateway) -> None:
    """Remove an engine that an admin has joined; its running requests continue."""
    await gateway.engine_records.remove(worker_id, author)


def _details(gateway: Gateway, watched: WatchedEngine) -> EngineDetails:
    entry, engine = watched.entry, watched.engine
    known = engine if engine is not None and engine.names else None
    lanes = watched.report.lanes if known else ()
    return {
        "id": entry.id,
        "kind": engine.kind if engine else entry.kind,
        "url": entry.url,
        "source": "admin" if entry.id in gateway.engine_records.joined else "settings",
        "problem": watched.problem,
        "models": [_model(known, name) for name in known.names] if known else [],
        "pools": [lane.name for lane in lanes] if known else list(entry.pools),
        "labels": list(entry.labels),
        "slots": lanes[0].slots if lanes else entry.slots or 0,
        "isolation": known.isolation.value if known else "none",
        "drafts": known is not None and known.state.drafts,
        "api_key_env": entry.api_key_env,
    }


def _model(engine: OpenAIEngine, name: str) -> ModelDetails:
    model: EngineModel = engine.model(name)
    return {
        "name": name,
        "engine_name": model.name,
        "loaded": model.loaded,
        "load_s": round(model.load_s, 1),
        "context_tokens": model.context_tokens,
        "lacks": sorted(feature.value for feature in engine.lacks | model.lacks),
    }


def _id_of(url: str) -> str:
    """Return a worker id that names the address of an engine."""
    parts = urlsplit(url)
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", parts.hostname or "").strip("-.") or "engine"
    return f"{host[:50]}-{parts.port or (443 if parts.scheme == 'https' else 80)}"
