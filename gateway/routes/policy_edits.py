"""What a request about the policy says: a policy or a patch, onto which version, and by whom."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from pydantic_core import from_json
from starlette.requests import Request

from gateway.assembly import Line
from gateway.client import header, read_small_body
from gateway.config.policy_store import PolicyBook
from gateway.config.policy_versions import Signature, Version
from gateway.errors import (
    BodyNotJson,
    BodyTooLarge,
    BodyTooSlow,
    EditUnconditional,
    FieldInvalid,
    MediaTypeRefused,
    PolicyRefused,
)
from gateway.proposal import Document, Proposal, all_told, propose, propose_yaml
from gateway.routes.documented import parameter
from gateway.routes.said import AUTHOR, NOTE_HEADER, read_author, read_note
from policies.document import PolicyInvalid, Problem
from policies.merge_patch import merge_patch
from policies.yaml_io import TextInvalid, read_yaml

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
        except TextInvalid as invalid:
            problem = Problem("", invalid.what, invalid.line)
        except ValueError:
            problem = Problem("", "it is not JSON")
        raise PolicyInvalid("", (problem,)) from None

    def _text(self) -> str:
        try:
            return self.raw.decode()
        except UnicodeDecodeError:
            raise PolicyInvalid("", (Problem("", "it is not UTF-8"),)) from None


async def read_offer(line: Line, request: Request, *kinds: str) -> Offer:
    """Read a body of one of these kinds; raise a `RequestRefused`."""
    named = (header(request.scope, b"content-type") or b"").decode("latin-1")
    kind = named.partition(";")[0].strip().lower()
    if kind not in kinds:
        raise MediaTypeRefused(", ".join(kinds))
    return Offer(kind, await _body(line, request))


async def read_proposal(offer: Offer, *, patched: Document | None) -> Proposal:
    """Check an offer, as a patch to a document if there is one; raise `PolicyInvalid`.

    On a thread: a long text takes longer than others should have to wait.
    """
    if patched is not None:
        return await asyncio.to_thread(offer.onto, patched)
    return await asyncio.to_thread(offer.whole)


async def read_number(line: Line, request: Request) -> int:
    """Read `{"version": 3}`; raise a `RequestRefused`."""
    try:
        body = from_json(await _body(line, request))
    except ValueError:
        raise BodyNotJson from None
    number = body.get("version") if isinstance(body, dict) and len(body) == 1 else None
    if not isinstance(number, int) or isinstance(number, bool):
        raise FieldInvalid('The body must be like {"version": 3}.', param="version")
    return number


async def read_base(request: Request, book: PolicyBook) -> Version:
    """Read from `If-Match` which version is edited; raise where it is not the one in force."""
    given = header(request.scope, b"if-match")
    if given is None:
        raise EditUnconditional
    tags = {tag.strip().strip('"') for tag in given.decode("latin-1").split(",")}
    return book.version if "*" in tags else await book.expect(tags)


def read_signature(request: Request) -> Signature:
    """Read who edits and what for, from headers; raise `FieldInvalid` where there is no note."""
    note = read_note(request)
    if not note:
        raise FieldInvalid(f"An edit needs a note in '{NOTE_HEADER}'.", param=NOTE_HEADER)
    return Signature(read_author(request), note)


def refused(invalid: PolicyInvalid) -> PolicyRefused:
    """Say why a policy is refused."""
    return PolicyRefused(all_told(invalid), param=invalid.problems[0].field or None)


async def _body(line: Line, request: Request) -> bytes:
    return await read_small_body(
        request.scope,
        request.receive,
        limit_bytes=_LIMIT_BYTES,
        timeout_s=line.settings.body_timeout_s,
    )
