"""`/admin/v1/keys`: make keys, look at them, change their terms, revoke them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.auth import with_admin_key
from gateway.api.openapi import FOR_ADMINS, KEPT, WITH_BODY, failures, ref, success, takes
from gateway.assembly import Gateway
from gateway.auth.records import KeyRecord, KeyTerms
from gateway.errors import FieldInvalid, KeyIsRevoked, KeyUnknown
from gateway.http.downstream import read_small_body
from gateway.protocols.openai import parse
from policies.error_messages import message_of

_TERMS_LIMIT_BYTES = 64 * 1024


def keys(gateway: Gateway) -> APIRouter:
    """Hold the routes under /admin/v1/keys."""
    router = APIRouter(prefix="/admin/v1/keys", dependencies=[Depends(with_admin_key(gateway))])

    async def asked(request: Request) -> dict[str, Any]:
        raw = await read_small_body(
            request.scope,
            request.receive,
            limit_bytes=_TERMS_LIMIT_BYTES,
            timeout_s=gateway.settings.body_timeout_s,
        )
        return parse(raw)

    told = failures(*FOR_ADMINS, *KEPT)
    one_told = failures(*FOR_ADMINS, *KEPT, KeyUnknown)
    terms = takes(ref("KeyTerms"))
    patch = takes({"type": "object", "description": "Fields to change; null for none."})

    @router.post(
        "",
        status_code=201,
        responses=failures(*FOR_ADMINS, *KEPT, *WITH_BODY) | success(ref("KeyMade"), status=201),
        openapi_extra=terms,
    )
    async def create(request: Request) -> Response:
        record, secret = await gateway.key_store.create(_terms({}, await asked(request), gateway))
        told = {**_told(record, gateway), "secret": secret}
        # The only answer that ever holds a secret: nothing on its way may keep it.
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        return Response(to_json(told), status_code=201, headers=headers)

    @router.get("", responses=told)
    async def listing() -> dict[str, Any]:
        await gateway.key_store.refresh()
        return {"keys": [_told(record, gateway) for record in gateway.api_keys.records.values()]}

    @router.get("/{name}", responses=one_told | success(ref("Key")))
    async def one(name: str) -> dict[str, Any]:
        await gateway.key_store.refresh()
        return _told(gateway.key_store.find(name), gateway)

    @router.patch(
        "/{name}",
        responses=failures(*FOR_ADMINS, *KEPT, *WITH_BODY, KeyUnknown, KeyIsRevoked)
        | success(ref("Key")),
        openapi_extra=patch,
    )
    async def change(name: str, request: Request) -> dict[str, Any]:
        patch = await asked(request)

        def patched(terms: KeyTerms) -> KeyTerms:
            return _terms(terms.model_dump(mode="json"), patch, gateway)

        return _told(await gateway.key_store.change(name, patched), gateway)

    @router.delete("/{name}", responses=one_told | success(ref("Key")))
    async def revoke(name: str) -> dict[str, Any]:
        return _told(await gateway.key_store.revoke(name), gateway)

    return router


def _terms(before: Mapping[str, Any], patch: Mapping[str, Any], gateway: Gateway) -> KeyTerms:
    """Merge as JSON Merge Patch does, null for none; raise `FieldInvalid` naming what is wrong."""
    both = {**before, **patch}
    known = KeyTerms.model_fields
    merged = {name: both[name] for name in both if both[name] is not None or name not in known}
    try:
        terms = KeyTerms.model_validate_json(to_json(merged))
    except ValidationError as invalid:
        problems = [
            (".".join(map(str, problem["loc"])), message_of(problem))
            for problem in invalid.errors(include_url=False, include_input=False)
        ]
    else:
        problems = _senseless(terms, patch, gateway)
        if not problems:
            return terms
    text = "; ".join(f"{field}: {what}" for field, what in problems)
    raise FieldInvalid(f"{text}.", param=problems[0][0] or None)


def _senseless(
    terms: KeyTerms, patch: Mapping[str, Any], gateway: Gateway
) -> list[tuple[str, str]]:
    """Find what is said here, well written, and would do nothing, or not what was meant."""
    policy = gateway.policy_store.current
    aliases = {alias: name for name, model in policy.models.items() for alias in model.aliases}
    problems = [
        (f"models.{index}", f"'{name}' is an alias; say '{aliases[name]}'")
        for index, name in enumerate(terms.models if "models" in patch else ())
        if name in aliases
    ]
    problems += [
        (f"pools.{index}", f"the policy has no pool '{name}'")
        for index, name in enumerate(terms.pools if "pools" in patch else ())
        if name not in policy.pools
    ]
    expires_at = terms.expires_at if "expires_at" in patch else None
    if expires_at is not None and expires_at.timestamp() <= gateway.wall():
        problems.append(("expires_at", "this time is over"))
    return problems


def _told(record: KeyRecord, gateway: Gateway) -> dict[str, Any]:
    """Tell all of a key but what opens anything."""
    state = record.ended(gateway.wall()) or "active"
    return {**record.model_dump(mode="json", exclude={"digest"}), "state": state}
