"""`/admin/v1/policy`: the active policy, its edits, its history, and the effect of an edit."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from random import Random
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Header
from pydantic import BaseModel, ConfigDict, StrictInt
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from gateway.api.auth import Author, CurrentGateway, Note, RequiredNote, admin_router
from gateway.api.openapi import FOR_ADMINS, JSON, STORED, WITH_BODY, failures, ref, success, takes
from gateway.assembly import Gateway
from gateway.config.policy_store import PolicyStore
from gateway.config.policy_versions import (
    Attribution,
    Document,
    PolicyVersion,
    Proposal,
    Reason,
    VersionInfo,
)
from gateway.errors import (
    BodyTooLarge,
    BodyTooSlow,
    EditUnconditional,
    FieldInvalid,
    MediaTypeRefused,
    PolicyRefused,
    VersionConflict,
    VersionUnknown,
)
from gateway.http.downstream import header
from policies.diff import diff, merge_patch
from policies.document import PolicyInvalid, Problem, default_text, example_texts
from policies.json_schema import schema
from policies.yaml_io import YamlInvalid, read_yaml, write_yaml

router = admin_router("/admin/v1/policy")
YAML = "application/yaml"
MERGE_PATCH = "application/merge-patch+json"
VERSION_HEADER = "x-paceline-policy-version"
_WITH_POLICY = (PolicyRefused, FieldInvalid, BodyTooSlow, BodyTooLarge, MediaTypeRefused)
_EDIT = failures(*FOR_ADMINS, *STORED, *_WITH_POLICY, VersionConflict, EditUnconditional)
_TEST_KINDS = (JSON, YAML, MERGE_PATCH)
_DIGITS = 9
_SCHEMA = functools.cache(schema)


class AppliedVersion(VersionInfo):
    """The version that an edit made."""

    warnings: list[dict[str, Any]]


class Versions(TypedDict):
    """The versions of the policy, the last one first."""

    versions: list[VersionInfo]
    active: int
    """The number of the active one, which is older if this gateway cannot use the last one."""
    problem: str
    """Why the last version or the policy file is not active; empty if both are."""


class Validation(TypedDict):
    """Whether a document can be the policy."""

    valid: bool
    problems: list[dict[str, Any]]
    warnings: list[dict[str, Any]]


class Difference(TypedDict):
    """The effect that a policy would have: changed fields, and recent requests by pool."""

    onto: VersionInfo
    changes: list[dict[str, Any]]
    decisions: int
    moves: list[dict[str, Any]]
    warnings: list[dict[str, Any]]


class Example(TypedDict):
    """A complete policy to start from."""

    name: str
    title: str
    text: str


class Examples(TypedDict):
    """The shipped policy, and the shipped examples."""

    examples: list[Example]


class Rollback(BaseModel):
    """The version to go back to."""

    model_config = ConfigDict(extra="forbid")

    version: StrictInt


class Offer(NamedTuple):
    """A body as it was received: a whole policy, or a patch."""

    kind: str
    raw: bytes

    def whole(self) -> Proposal:
        """Parse it as a whole policy; raise `PolicyInvalid`."""
        if self.kind == YAML:
            return Proposal.from_yaml(self._text())
        return Proposal.from_document(self._value())

    def onto(self, document: Document) -> Proposal:
        """Apply it as a patch to a document; raise `PolicyInvalid`."""
        return Proposal.from_document(merge_patch(document, self._value()))

    def _value(self) -> object:
        try:
            if self.kind == YAML:
                return read_yaml(self._text())
            return from_json(self.raw, allow_inf_nan=False)
        except YamlInvalid as invalid:
            problem = Problem("", invalid.message, invalid.line)
        except ValueError:
            problem = Problem("", "it is not valid JSON")
        raise PolicyInvalid("", (problem,)) from None

    def _text(self) -> str:
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            raise PolicyInvalid("", (Problem("", "it is not UTF-8"),)) from None


async def _base(
    gateway: CurrentGateway,
    if_match: Annotated[str, Header(description="The ETag of the edited version, or *.")],
) -> PolicyVersion:
    """Return the edited version; raise `VersionConflict` if it is not active."""
    store = gateway.policy_store
    tags = {tag.strip().strip('"') for tag in if_match.split(",")}
    return store.version if "*" in tags else await store.require_version(tags)


Base = Annotated[PolicyVersion, Depends(_base)]


@router.get("", responses=failures(*FOR_ADMINS) | success(ref("PolicyDocument"), YAML))
async def show(request: Request, gateway: CurrentGateway) -> Response:
    """Show the active policy."""
    version = gateway.policy_store.version
    headers = {"etag": f'"{version.etag}"', VERSION_HEADER: str(version.number)}
    return await _shown(request, version, to_json(version.document), headers)


@router.put("", responses=_EDIT, openapi_extra=takes(ref("PolicyDocument"), JSON, YAML))
async def put(
    request: Request, base: Base, note: RequiredNote, author: Author, gateway: CurrentGateway
) -> AppliedVersion:
    """Replace the policy."""
    offer = await _offer(request, JSON, YAML)
    proposal = await asyncio.to_thread(offer.whole)
    return await _apply(gateway, proposal, Attribution(author, note, Reason.EDIT), base)


@router.patch("", responses=_EDIT, openapi_extra=takes({"type": "object"}, MERGE_PATCH, JSON, YAML))
async def patch(
    request: Request, base: Base, note: RequiredNote, author: Author, gateway: CurrentGateway
) -> AppliedVersion:
    """Change fields of the policy."""
    offer = await _offer(request, MERGE_PATCH, JSON, YAML)
    proposal = await asyncio.to_thread(offer.onto, base.document)
    return await _apply(gateway, proposal, Attribution(author, note, Reason.EDIT), base)


@router.post(
    "/rollback",
    responses=failures(
        *(*FOR_ADMINS, *STORED, *WITH_BODY, PolicyRefused),
        *(VersionUnknown, VersionConflict, EditUnconditional),
    ),
)
async def rollback(
    body: Rollback, base: Base, note: Note, author: Author, gateway: CurrentGateway
) -> AppliedVersion:
    """Apply an earlier version again."""
    earlier = await gateway.policy_store.read_version(body.version)
    back = f"back to version {body.version}"
    attribution = Attribution(author, f"{back}: {note}" if note else back, Reason.ROLLBACK)
    proposal = await asyncio.to_thread(Proposal.from_document, earlier.document)
    return await _apply(gateway, proposal._replace(text=earlier.text), attribution, base)


@router.get("/schema", responses=failures(*FOR_ADMINS) | success({"type": "object"}))
async def show_schema() -> Response:
    """Show the JSON Schema of the document."""
    return Response(await asyncio.to_thread(_SCHEMA), media_type=JSON)


@router.get("/examples", responses=failures(*FOR_ADMINS))
async def show_examples() -> Examples:
    """Show the shipped policy and the shipped examples."""
    return {"examples": await asyncio.to_thread(_examples)}


@router.get("/history", responses=failures(*FOR_ADMINS, *STORED))
async def show_history(gateway: CurrentGateway) -> Versions:
    """List the versions of the policy."""
    versions = await gateway.policy_store.versions()
    active, last = gateway.policy_store.version.number, versions[-1].number if versions else 0
    problem = gateway.policy_file.problem
    if last > active:
        problem = f"This gateway cannot use version {last}; its log says why."
    elif problem:
        problem = f"The policy file is not in force: {problem}"
    return {"versions": [*reversed(versions)], "active": active, "problem": problem}


@router.get(
    "/history/{number}",
    responses=failures(*FOR_ADMINS, *STORED, VersionUnknown) | success({"type": "object"}, YAML),
)
async def show_version(number: str, request: Request, gateway: CurrentGateway) -> Response:
    """Show one version with its document."""
    if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS):
        raise VersionUnknown(number)
    version = await gateway.policy_store.read_version(int(number))
    return await _shown(request, version, to_json(version), {VERSION_HEADER: number})


@router.post(
    "/validate",
    responses=failures(*FOR_ADMINS, BodyTooSlow, BodyTooLarge, MediaTypeRefused),
    openapi_extra=takes({}, *_TEST_KINDS),
)
async def validate(request: Request, gateway: CurrentGateway) -> Validation:
    """Validate a policy, or a patch to the active policy, without applying it."""
    store = gateway.policy_store
    try:
        proposal = await _tested(request, store)
    except PolicyInvalid as invalid:
        problems = [problem._asdict() for problem in invalid.problems]
        return {"valid": False, "problems": problems, "warnings": []}
    return {"valid": True, "problems": [], "warnings": _warnings(store, proposal)}


@router.post(
    "/diff", responses=failures(*FOR_ADMINS, *_WITH_POLICY), openapi_extra=takes({}, *_TEST_KINDS)
)
async def compare(request: Request, gateway: CurrentGateway) -> Difference:
    """Report the effect of a policy, or of a patch to the active one, without applying it."""
    store = gateway.policy_store
    base, policy = store.version, store.current
    proposal = await _tested(request, store)
    changes = await asyncio.to_thread(diff, base.document, proposal.document)
    moves = await gateway.recent_requests.count_moves(
        policy,
        proposal.policy,
        gateway.fleet.view(),
        now_s=gateway.clock(),
        rng=Random(0),  # noqa: S311  # any worker of a pool will do
        pause=functools.partial(asyncio.sleep, 0),
    )
    return {
        "onto": base,
        "changes": changes,
        "decisions": moves.total(),
        "moves": [
            {"from": old, "to": new, "count": count} for (old, new), count in moves.most_common()
        ],
        "warnings": _warnings(store, proposal),
    }


async def _offer(request: Request, *kinds: str) -> Offer:
    """Read a body of one of these media types; raise a `RequestRefused`."""
    named = (header(request.scope, b"content-type") or b"").decode("latin-1")
    kind = named.partition(";")[0].strip().lower()
    if kind not in kinds:
        raise MediaTypeRefused(", ".join(kinds))
    return Offer(kind, await request.body())


async def _tested(request: Request, store: PolicyStore) -> Proposal:
    """Read and check a policy, or a patch to the active one; raise `PolicyInvalid`.

    In a thread: a long document would block the event loop.
    """
    document = store.version.document
    offer = await _offer(request, *_TEST_KINDS)
    patched = functools.partial(offer.onto, document)
    proposal = await asyncio.to_thread(patched if offer.kind == MERGE_PATCH else offer.whole)
    store.check(proposal)
    return proposal


async def _apply(
    gateway: Gateway, proposal: Proposal, attribution: Attribution, base: PolicyVersion
) -> AppliedVersion:
    store = gateway.policy_store
    version = await store.apply(proposal, attribution, onto=base)
    return AppliedVersion(**dict(version), warnings=_warnings(store, proposal))


@functools.cache
def _examples() -> list[Example]:
    """Return the shipped texts; the second line of an example begins with its title."""
    examples = [Example(name="default", title="The shipped policy", text=default_text())]
    for name, text in example_texts().items():
        title = text.splitlines()[1].removeprefix("# ").partition(":")[0]
        examples.append(Example(name=name, title=title, text=text))
    return examples


async def _shown(
    request: Request, version: PolicyVersion, as_json: bytes, headers: Mapping[str, str]
) -> Response:
    """Return JSON, or for a client that accepts YAML the text of the author, if there is one."""
    if YAML not in request.headers.get("accept", ""):
        return Response(as_json, headers=headers, media_type=JSON)
    text = version.text or await asyncio.to_thread(write_yaml, version.document)
    return Response(text, headers=headers, media_type=YAML)


def _warnings(store: PolicyStore, proposal: Proposal) -> list[dict[str, Any]]:
    return [warning._asdict() for warning in store.warnings(proposal.policy)]
