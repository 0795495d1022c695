"""`/admin/v1/keys`: create, show, change and revoke API keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Body
from pydantic import AwareDatetime, ValidationError
from pydantic_core import to_json
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.api.auth import CurrentGateway, admin_router
from gateway.api.openapi import FOR_ADMINS, STORED, WITH_BODY, failures, ref, takes
from gateway.api.recent_errors import time_of
from gateway.assembly import Gateway
from gateway.auth.records import KeyRecord, KeyTerms
from gateway.errors import FieldInvalid, KeyIsRevoked, KeyUnknown, RevocationUnstored
from paceline.error_messages import message_of

router = admin_router("/admin/v1/keys", body_limit_bytes=64 * 1024)
_BODY = (*FOR_ADMINS, *STORED, *WITH_BODY)
Fields = Annotated[dict[str, Any], Body(description="Fields to set; null for the default.")]


class Key(KeyTerms):
    """An API key without its secret."""

    id: str
    prefix: str
    """The first characters of the secret."""
    created_at: AwareDatetime
    revoked_at: AwareDatetime | None
    state: Literal["active", "expired", "revoked"]
    refused: int = 0
    """How often clients offered a secret of the ended key, according to the last errors."""
    refused_at: str | None = None
    refused_from: str = ""
    """The address that offered it last."""
    warnings: tuple[str, ...] = ()
    """Of the terms that have no effect now, such as a model that no worker serves."""


class CreatedKey(Key):
    """A new API key, or a new secret of one, with the secret that no other response shows."""

    secret: str


class Keys(TypedDict):
    """All API keys that were ever created."""

    keys: list[Key]
    required: bool
    """Whether clients need a key: from the first one on, for good."""


@router.post("", status_code=201, responses=failures(*_BODY), openapi_extra=takes(ref("KeyTerms")))
async def create(fields: Fields, gateway: CurrentGateway, response: Response) -> CreatedKey:
    """Create a key."""
    record, secret = await gateway.key_store.create(_terms({}, fields, gateway))
    response.headers["cache-control"] = "no-store"
    return CreatedKey(**dict(_key(record, gateway)), secret=secret)


@router.post("/{name}/rotate", responses=failures(*FOR_ADMINS, *STORED, KeyUnknown, KeyIsRevoked))
async def rotate(name: str, gateway: CurrentGateway, response: Response) -> CreatedKey:
    """Give a key a new secret, and end its old one."""
    record, secret = await gateway.key_store.rotate(name)
    response.headers["cache-control"] = "no-store"
    return CreatedKey(**dict(_key(record, gateway)), secret=secret)


@router.get("", responses=failures(*FOR_ADMINS, *STORED))
async def show_all(gateway: CurrentGateway) -> Keys:
    """Show all keys."""
    await gateway.key_store.refresh()
    keys = [_key(record, gateway) for record in gateway.api_keys.records.values()]
    return {"keys": keys, "required": gateway.api_keys.required}


@router.get("/{name}", responses=failures(*FOR_ADMINS, *STORED, KeyUnknown))
async def show(name: str, gateway: CurrentGateway) -> Key:
    """Show one key."""
    await gateway.key_store.refresh()
    return _key(gateway.key_store.find(name), gateway)


@router.patch("/{name}", responses=failures(*_BODY, KeyUnknown, KeyIsRevoked))
async def change(name: str, fields: Fields, gateway: CurrentGateway) -> Key:
    """Change fields of a key."""

    def merged(terms: KeyTerms) -> KeyTerms:
        before = terms.model_dump(mode="json", include=set(KeyTerms.model_fields))
        return _terms(before, fields, gateway, name)

    return _key(await gateway.key_store.change(name, merged), gateway)


@router.delete("/{name}", responses=failures(*FOR_ADMINS, *STORED, RevocationUnstored, KeyUnknown))
async def revoke(name: str, gateway: CurrentGateway) -> Key:
    """Revoke a key for good."""
    return _key(await gateway.key_store.revoke(name), gateway)


def _terms(
    before: Mapping[str, Any], patch: Mapping[str, Any], gateway: Gateway, key_id: str = ""
) -> KeyTerms:
    """Apply a JSON Merge Patch, where null means the default; raise `FieldInvalid`."""
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
        problems = _ineffective(terms, patch, gateway, key_id)
        if not problems:
            return terms
    text = "; ".join(f"{field}: {what}" for field, what in problems)
    raise FieldInvalid(f"{text}.", param=problems[0][0] or None)


def _ineffective(
    terms: KeyTerms, patch: Mapping[str, Any], gateway: Gateway, key_id: str
) -> list[tuple[str, str]]:
    """List the valid values in the patch that could have no effect, or not the intended one."""
    policy = gateway.policy_store.current
    aliases = {alias: name for name, model in policy.models.items() for alias in model.aliases}
    problems = [
        (f"models.{index}", f"'{name}' is an alias; use '{aliases[name]}'")
        for index, name in enumerate(terms.models if "models" in patch else ())
        if name in aliases
    ]
    problems += [
        ("name", f"the key {one.id} has this name; choose another")
        for one in gateway.api_keys.records.values()
        if {"name", "expires_at"} & patch.keys()
        and one.id != key_id
        and one.name.casefold() == terms.name.casefold()
        and not one.ended(gateway.wall())
    ][:1]
    problems += [
        (f"pools.{index}", f"the policy has no pool '{name}'")
        for index, name in enumerate(terms.pools if "pools" in patch else ())
        if name not in policy.pools
    ]
    expires_at = terms.expires_at if "expires_at" in patch else None
    if expires_at is not None and expires_at.timestamp() <= gateway.wall():
        problems.append(("expires_at", "this time is in the past"))
    return problems


def _key(record: KeyRecord, gateway: Gateway) -> Key:
    served = {name for worker in gateway.fleet.workers() for name in worker.models}
    unserved = [name for name in record.models if name not in served]
    refusals = gateway.recent_errors.of_ended_key(record.id)
    last = max(refusals, key=lambda one: one.unix_s, default=None)
    shown = {
        "state": record.ended(gateway.wall()) or "active",
        "refused": sum(one.count for one in refusals),
        "refused_at": time_of(last.unix_s) if last else None,
        "refused_from": last.address if last else "",
        "warnings": tuple(f"No worker serves the model '{name}' now." for name in unserved),
    }
    return Key.model_validate({**record.model_dump(exclude={"digest"}), **shown})
