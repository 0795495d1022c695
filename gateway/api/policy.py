"""`/admin/v1/policy`: the policy in force, its edits, its history, and what an edit would do.

What a request about the policy says: a policy or a patch, onto which version, and by whom.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from fastapi import APIRouter, Depends
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.auth import AUTHOR, NOTE_HEADER, read_author, read_note, with_admin_key
from gateway.api.openapi import (
    FOR_ADMINS,
    JSON,
    KEPT,
    WITH_BODY,
    failures,
    parameter,
    ref,
    success,
    takes,
)
from gateway.assembly import Gateway
from gateway.config.policy_store import PolicyStore
from gateway.config.policy_versions import (
    Attribution,
    Document,
    PolicyVersion,
    Proposal,
    Reason,
    problems_text,
    propose,
    propose_yaml,
)
from gateway.errors import (
    BodyNotJson,
    BodyTooLarge,
    BodyTooSlow,
    EditUnconditional,
    FieldInvalid,
    MediaTypeRefused,
    PolicyRefused,
    VersionConflict,
    VersionUnknown,
)
from gateway.http.downstream import header, read_small_body
from gateway.routing.replay import PoolMoves
from policies.diff import diff, merge_patch
from policies.document import PolicyInvalid, Problem
from policies.yaml_io import YamlInvalid, read_yaml, write_yaml

YAML = "application/yaml"
MERGE_PATCH = "application/merge-patch+json"
_IF_MATCH = parameter("if-match", "header", "The ETag that was edited, or *.", required=True)
ROLLBACK_HEADERS = (_IF_MATCH, AUTHOR, parameter(NOTE_HEADER, "header", "What for."))
EDIT_HEADERS = (
    *(_IF_MATCH, AUTHOR),
    parameter(NOTE_HEADER, "header", "What for; percent-encoded.", required=True),
)
WITH_POLICY = (PolicyRefused, FieldInvalid, BodyTooSlow, BodyTooLarge, MediaTypeRefused)
"""What comes where a policy is read."""
_LIMIT_BYTES = 256 * 1024


class Offer(NamedTuple):
    """A body as it came: a whole policy, or a patch to one."""

    kind: str
    raw: bytes

    def whole(self) -> Proposal:
        """Read it as a whole policy; raise `PolicyInvalid`."""
        if self.kind == YAML:
            return propose_yaml(self._text())
        return propose(self._value())

    def onto(self, document: Document) -> Proposal:
        """Read it as a patch to a document; raise `PolicyInvalid`."""
        return propose(merge_patch(document, self._value()))

    def _value(self) -> object:
        try:
            if self.kind == YAML:
                return read_yaml(self._text())
            return from_json(self.raw, allow_inf_nan=False)
        except YamlInvalid as invalid:
            problem = Problem("", invalid.what, invalid.line)
        except ValueError:
            problem = Problem("", "it is not JSON")
        raise PolicyInvalid("", (problem,)) from None

    def _text(self) -> str:
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            raise PolicyInvalid("", (Problem("", "it is not UTF-8"),)) from None


async def read_offer(gateway: Gateway, request: Request, *kinds: str) -> Offer:
    """Read a body of one of these kinds; raise a `RequestRefused`."""
    named = (header(request.scope, b"content-type") or b"").decode("latin-1")
    kind = named.partition(";")[0].strip().lower()
    if kind not in kinds:
        raise MediaTypeRefused(", ".join(kinds))
    return Offer(kind, await _body(gateway, request))


async def read_proposal(offer: Offer, *, patched: Document | None) -> Proposal:
    """Check an offer, as a patch to a document if there is one; raise `PolicyInvalid`.

    On a thread: a long text takes longer than others should have to wait.
    """
    if patched is not None:
        return await asyncio.to_thread(offer.onto, patched)
    return await asyncio.to_thread(offer.whole)


async def read_number(gateway: Gateway, request: Request) -> int:
    """Read `{"version": 3}`; raise a `RequestRefused`."""
    try:
        body = from_json(await _body(gateway, request))
    except ValueError:
        raise BodyNotJson from None
    number = body.get("version") if isinstance(body, dict) and len(body) == 1 else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise FieldInvalid('The body must be like {"version": 3}.', param="version")
    return number


async def read_base(request: Request, book: PolicyStore) -> PolicyVersion:
    """Read from `If-Match` which version is edited; raise where it is not the one in force."""
    given = header(request.scope, b"if-match")
    if given is None:
        raise EditUnconditional
    tags = {tag.strip().strip('"') for tag in given.decode("latin-1").split(",")}
    return book.version if "*" in tags else await book.require_version(tags)


def read_signature(request: Request) -> Attribution:
    """Read who edits and what for, from headers; raise `FieldInvalid` where there is no note."""
    note = read_note(request)
    if not note:
        raise FieldInvalid(f"An edit needs a note in '{NOTE_HEADER}'.", param=NOTE_HEADER)
    return Attribution(read_author(request), note)


def refused(invalid: PolicyInvalid) -> PolicyRefused:
    """Say why a policy is refused."""
    return PolicyRefused(problems_text(invalid), param=invalid.problems[0].field or None)


async def _body(gateway: Gateway, request: Request) -> bytes:
    return await read_small_body(
        request.scope,
        request.receive,
        limit_bytes=_LIMIT_BYTES,
        timeout_s=gateway.settings.body_timeout_s,
    )


PREFIX = "/admin/v1/policy"
VERSION_HEADER = "x-paceline-policy-version"
_DIGITS = 9
_ROLLBACK = {
    "type": "object",
    "required": ["version"],
    "properties": {"version": {"type": "integer"}},
    "additionalProperties": False,
}


def versions(gateway: Gateway) -> APIRouter:
    """Hold the routes that read and change the policy."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(with_admin_key(gateway))])
    book = gateway.policy_store

    version_told = {"type": "object", "required": ["number", "etag", "author", "note", "warnings"]}
    refusals = (*FOR_ADMINS, *KEPT, *WITH_POLICY)
    edited = failures(*refusals, VersionConflict, EditUnconditional) | success(version_told)

    @router.get("", responses=failures(*FOR_ADMINS) | success(ref("PolicyDocument"), YAML))
    async def whole(request: Request) -> Response:
        version = book.version
        headers = {"etag": f'"{version.etag}"', VERSION_HEADER: str(version.number)}
        if _wants_yaml(request):
            return await _as_yaml(version, headers)
        return Response(to_json(version.document), headers=headers, media_type=JSON)

    async def edit(request: Request, *kinds: str, patches: bool) -> dict[str, Any]:
        base, signature = await read_base(request, book), read_signature(request)
        offer = await read_offer(gateway, request, *kinds)
        try:
            proposal = await read_proposal(offer, patched=base.document if patches else None)
            version = await book.apply(proposal, Reason.EDIT, signature, onto=base)
        except PolicyInvalid as invalid:
            raise refused(invalid) from None
        return version.metadata() | {"warnings": _warnings(book, proposal)}

    @router.put(
        "",
        responses=edited,
        openapi_extra=takes(ref("PolicyDocument"), JSON, YAML, headers=EDIT_HEADERS),
    )
    async def put(request: Request) -> dict[str, Any]:
        return await edit(request, JSON, YAML, patches=False)

    @router.patch(
        "",
        responses=edited,
        openapi_extra=takes({"type": "object"}, MERGE_PATCH, JSON, YAML, headers=EDIT_HEADERS),
    )
    async def patch(request: Request) -> dict[str, Any]:
        return await edit(request, MERGE_PATCH, JSON, YAML, patches=True)

    @router.post(
        "/rollback",
        responses=failures(
            *(*FOR_ADMINS, *KEPT, *WITH_BODY, PolicyRefused),
            *(VersionUnknown, VersionConflict, EditUnconditional),
        )
        | success(version_told),
        openapi_extra=takes(_ROLLBACK, headers=ROLLBACK_HEADERS),
    )
    async def rollback(request: Request) -> dict[str, Any]:
        base = await read_base(request, book)
        author, note = read_author(request), read_note(request)
        number = await read_number(gateway, request)
        earlier = await book.read_version(number)
        back = f"back to version {number}"
        signature = Attribution(author, f"{back}: {note}" if note else back)
        try:
            proposal = await asyncio.to_thread(propose, earlier.document)
            version = await book.apply(proposal, Reason.ROLLBACK, signature, onto=base)
        except PolicyInvalid as invalid:
            raise refused(invalid) from None
        return version.metadata() | {"warnings": _warnings(book, proposal)}

    @router.get("/history", responses=failures(*FOR_ADMINS, *KEPT))
    async def history() -> dict[str, Any]:
        return {"versions": [version.metadata() for version in reversed(await book.versions())]}

    @router.get(
        "/history/{number}",
        responses=failures(*FOR_ADMINS, *KEPT, VersionUnknown) | success({"type": "object"}, YAML),
    )
    async def one(number: str, request: Request) -> Response:
        if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS):
            raise VersionUnknown(number)
        version = await book.read_version(int(number))
        if _wants_yaml(request):
            return await _as_yaml(version, {VERSION_HEADER: number})
        return JSONResponse(version.metadata() | {"document": version.document})

    return router


def proposals(gateway: Gateway) -> APIRouter:
    """Hold the routes that tell what would become of a policy, or a patch, without applying it."""
    router = APIRouter(prefix=PREFIX, dependencies=[Depends(with_admin_key(gateway))])
    book = gateway.policy_store
    kinds = (JSON, YAML, MERGE_PATCH)

    told = failures(*FOR_ADMINS, BodyTooSlow, BodyTooLarge, MediaTypeRefused)

    @router.post("/validate", responses=told, openapi_extra=takes({}, *kinds))
    async def validate(request: Request) -> dict[str, Any]:
        offer = await read_offer(gateway, request, *kinds)
        patched = book.version.document if offer.kind == MERGE_PATCH else None
        try:
            proposal = await read_proposal(offer, patched=patched)
            book.check(proposal)
        except PolicyInvalid as invalid:
            told = [problem._asdict() for problem in invalid.problems]
            return {"valid": False, "problems": told, "warnings": []}
        return {"valid": True, "problems": [], "warnings": _warnings(book, proposal)}

    refusals = failures(*FOR_ADMINS, *WITH_POLICY)

    @router.post("/diff", responses=refusals, openapi_extra=takes({}, *kinds))
    async def compare(request: Request) -> dict[str, Any]:
        base, policy = book.version, book.current
        offer = await read_offer(gateway, request, *kinds)
        patched = base.document if offer.kind == MERGE_PATCH else None
        try:
            proposal = await read_proposal(offer, patched=patched)
            book.check(proposal)
        except PolicyInvalid as invalid:
            raise refused(invalid) from None
        changes = await asyncio.to_thread(diff, base.document, proposal.document)
        moves = await gateway.recent_requests.count_moves(
            policy,
            proposal.policy,
            gateway.fleet.view(),
            rng=Random(0),  # noqa: S311  # which worker of a pool does not matter here
            pause=functools.partial(asyncio.sleep, 0),
        )
        return {
            "onto": base.metadata(),
            "changes": [change.to_json() for change in changes],
            "decisions": moves.total(),
            "moves": _told(moves),
            "warnings": _warnings(book, proposal),
        }

    return router


def _wants_yaml(request: Request) -> bool:
    return YAML in request.headers.get("accept", "")


async def _as_yaml(version: PolicyVersion, headers: Mapping[str, str]) -> Response:
    """Give the document as people write it; comments are not kept, so there are none."""
    text = await asyncio.to_thread(write_yaml, version.document)
    return Response(text, headers=headers, media_type=YAML)


def _warnings(book: PolicyStore, proposal: Proposal) -> list[dict[str, Any]]:
    return [warning._asdict() for warning in book.warnings(proposal.policy)]


def _told(moves: PoolMoves) -> list[dict[str, Any]]:
    """List where how many would go, those that stay too, most first."""
    return [{"from": old, "to": new, "count": count} for (old, new), count in moves.most_common()]
