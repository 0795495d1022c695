"""Nodes of the prefix cache on their way between workers: the route, and the client that asks it.

A question and each part of its answer carry a code that only workers with the same join token can
compute, from a key that is derived from it; the token itself does not travel. A question has a new
number, which the codes of its answer contain, so that no answer fits another question. A part of an
answer is a line, with its code and JSON, and the bytes of a safetensors file.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import ssl
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self, TypeVar

import httpx
import numpy as np
from pydantic import Base64Bytes, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import to_json
from safetensors.numpy import load, save
from starlette.requests import Request
from starlette.types import Send

from paceline.http import certificate_authorities
from paceline.protocol import MAX_SOURCES, SOURCES_HEADER, Count, NodeSource, Record
from workers.engine.prefix.files import FileName, HostPrefix, Prefetched
from workers.engine.prefix.transfer import (
    MAX_TRANSFERS,
    FailureReason,
    PrefixOffer,
    PrefixQuery,
    PrefixSource,
    TransferFailed,
)
from workers.server.errors import BadRequest, NotAuthorised, PrefixRefused
from workers.server.request import read_content
from workers.server.response import WorkResponse
from workers.server.runtime import Worker

PATH = "/v1/prefix/nodes"
MAX_QUESTION_BYTES = 16 << 20
"""Room for a prompt of more than a million tokens."""
_SCHEME = "PacelineNodes"
_CREDENTIALS = re.compile(rf"{_SCHEME} ([0-9a-f]{{32}}) ([0-9a-f]{{64}}) ([0-9a-f]{{64}})")
_CODE_CHARS = 64
_MAX_LINE_BYTES = 1 << 18
"""A line names the arrays of every layer."""
_FILE_HEAD_BYTES = 1 << 20
_TIMEOUT = httpx.Timeout(5.0, connect=1.0)
_PIECE_BYTES = 1 << 18
_STATUS_REASONS: Mapping[int, FailureReason] = {404: "absent", 409: "other_model", 503: "busy"}
_NODE_SOURCES = TypeAdapter(Annotated[tuple[NodeSource, ...], Field(max_length=MAX_SOURCES)])


class _Question(Record):
    """A `PrefixQuery` as it travels."""

    model: str = Field(max_length=64)
    scope: str = Field(max_length=256)
    tokens: Base64Bytes
    """Little-endian integers of 64 bits."""
    known: Count
    with_head: bool
    run_bytes: int = Field(ge=1 << 16, le=1 << 26)


class _OfferHead(Record):
    tokens: Count
    size_bytes: ClassVar[int] = 0


class _RunHead(Record):
    begin: Count
    end: Count
    resumable: bool
    bfloat16: tuple[str, ...] = Field(max_length=100_000)
    size_bytes: Count


Head = TypeVar("Head", _OfferHead, _RunHead)


class NodeKey:
    """Codes that prove the knowledge of a join token, or of the key that is derived from it."""

    def __init__(self, token: SecretStr, key: str = "") -> None:
        secret = token.get_secret_value().encode()
        self._key = bytes.fromhex(key) or hmac.digest(secret, b"paceline prefix nodes", "sha256")

    def credentials(self, nonce: str, body: bytes) -> str:
        """Return the `authorization` of a question with this number and this body."""
        digest = hashlib.sha256(body).hexdigest()
        return f"{_SCHEME} {nonce} {digest} {self._code('question', nonce, digest.encode())}"

    def check(self, authorization: str) -> tuple[str, str]:
        """Return the number of a question and the digest of its body; raise `NotAuthorised`."""
        match = _CREDENTIALS.fullmatch(authorization)
        if match is None:
            raise NotAuthorised
        nonce, digest, code = match.groups()
        if not hmac.compare_digest(code, self._code("question", nonce, digest.encode())):
            raise NotAuthorised
        return nonce, digest

    def answer_code(self, nonce: str, index: int, head: bytes, content: bytes) -> str:
        """Return the code of one part of the answer to a question."""
        return self._code(f"answer {index}", nonce, head, content)

    def _code(self, kind: str, nonce: str, *texts: bytes) -> str:
        code = hmac.new(self._key, digestmod="sha256")
        for text in (kind.encode(), nonce.encode(), *texts):
            code.update(len(text).to_bytes(8, "little"))
            code.update(text)
        return code.hexdigest()


# --- the route ------------------------------------------------------------------------------------


async def read_question(request: Request, key: NodeKey) -> tuple[str, PrefixQuery]:
    """Return the number of a question, and the question; raise a `RequestError`."""
    nonce, digest = key.check(request.headers.get("authorization", ""))
    body = await read_content(request, MAX_QUESTION_BYTES)
    return nonce, await asyncio.to_thread(_parse_question, body, digest)


def _parse_question(body: bytes | bytearray, digest: str) -> PrefixQuery:
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), digest):
        raise NotAuthorised
    try:
        fields = dict(_Question.model_validate_json(body))
        fields["tokens"] = np.frombuffer(fields["tokens"], "<i8").astype(np.int64)
    except ValueError as error:
        raise BadRequest("The question is not one of this version.") from error
    return PrefixQuery(**fields)


class NodesResponse(WorkResponse):
    """The answer to a question: the offer, then one part after another.

    A draining worker waits for its end.
    """

    def __init__(self, worker: Worker, key: NodeKey, nonce: str, query: PrefixQuery) -> None:
        super().__init__(worker, nonce, even_draining=True)
        self._key = key
        self._nonce = nonce
        self._query = query
        self._parts = 0

    async def _respond(self, send: Send) -> None:
        try:
            async with self._worker.engine.open(self._query) as offer:
                headers = [(b"content-type", b"application/octet-stream")]
                first = await asyncio.to_thread(self._part, _OfferHead(tokens=offer.tokens), b"")
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._send_part(send, first)
                async for run in offer.runs:
                    await self._send_part(send, await asyncio.to_thread(self._run_part, run))
        except TransferFailed as failure:
            raise PrefixRefused(failure.reason) from failure
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, send: Send, part: bytes) -> None:
        for begin in range(0, len(part), _PIECE_BYTES):
            piece = part[begin : begin + _PIECE_BYTES]
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _run_part(self, run: Prefetched) -> bytes:
        name, node = run
        content = save(dict(node.arrays))
        head = _RunHead(
            begin=name.begin,
            end=name.end,
            resumable=name.resumable,
            bfloat16=tuple(sorted(node.bfloat16)),
            size_bytes=len(content),
        )
        return self._part(head, content)

    def _part(self, head: Record, content: bytes) -> bytes:
        line = head.model_dump_json().encode()
        code = self._key.answer_code(self._nonce, self._parts, line, content)
        self._parts += 1
        return b"".join((code.encode(), b" ", line, b"\n", content))


# --- the client -----------------------------------------------------------------------------------


class PrefixPeers:
    """The other workers of the fleet; open it as a context."""

    def __init__(self, token: SecretStr, key: str = "", tls: ssl.SSLContext | None = None) -> None:
        self.key = NodeKey(token, key)
        self.client = httpx.AsyncClient(
            verify=tls or certificate_authorities(),
            timeout=_TIMEOUT,
            limits=httpx.Limits(max_connections=2 * MAX_TRANSFERS, max_keepalive_connections=0),
            trust_env=False,  # a proxy to the internet cannot reach the local network
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    def sources(self, headers: Mapping[str, str]) -> tuple[PrefixSource, ...]:
        """Return the workers that the gateway names in a request."""
        given = headers.get(SOURCES_HEADER)
        if given is None:
            return ()
        try:
            named = _NODE_SOURCES.validate_json(given)
        except ValidationError as error:
            message = f"The header '{SOURCES_HEADER}' must list workers."
            raise BadRequest(message, param=SOURCES_HEADER) from error
        with_all = self.key, self.client
        return tuple(_Peer(one.url, one.tokens, one.server_name, *with_all) for one in named)


@dataclass(frozen=True, slots=True)
class _Peer:
    """Another worker, asked over HTTP."""

    name: str
    tokens: int
    server_name: str
    key: NodeKey
    client: httpx.AsyncClient

    @asynccontextmanager
    async def open(self, query: PrefixQuery) -> AsyncIterator[PrefixOffer]:
        """Ask the worker; raise `TransferFailed`."""
        nonce = secrets.token_hex(16)
        body, credentials = await asyncio.to_thread(self._question, nonce, query)
        headers = {"content-type": "application/json", "authorization": credentials}
        try:
            named = {"sni_hostname": self.server_name}
            async with self.client.stream(
                "POST", self.name + PATH, content=body, headers=headers, extensions=named
            ) as response:
                if response.status_code != httpx.codes.OK:
                    reason = _STATUS_REASONS.get(response.status_code, "failed")
                    raise TransferFailed(reason, f"status {response.status_code}")
                answer = _AnswerReader(response, self.key, nonce, query.run_limit_bytes)
                offer, _ = await answer.part(_OfferHead)
                async with aclosing(answer.runs()) as runs:
                    yield PrefixOffer(offer.tokens, runs)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TransferFailed("failed", type(error).__name__) from error

    def _question(self, nonce: str, query: PrefixQuery) -> tuple[bytes, str]:
        question = {
            "model": query.model,
            "scope": query.scope,
            "tokens": b64encode(query.tokens.astype("<i8").tobytes()).decode(),
            "known": query.known,
            "with_head": query.with_head,
            "run_bytes": query.run_bytes,
        }
        body = to_json(question)
        return body, self.key.credentials(nonce, body)


class _AnswerReader:
    """Reads the parts of an answer, each within its bounds."""

    def __init__(
        self, response: httpx.Response, key: NodeKey, nonce: str, run_limit_bytes: int
    ) -> None:
        self._chunks = response.aiter_raw(_PIECE_BYTES)
        self._buffer = bytearray()
        self._key = key
        self._nonce = nonce
        self._limit_bytes = run_limit_bytes + _FILE_HEAD_BYTES
        self._parts = 0

    async def runs(self) -> AsyncGenerator[Prefetched, None]:
        """Yield the runs up to the end of the answer."""
        while self._buffer or await self._fill():
            head, content = await self.part(_RunHead)
            try:
                arrays = await asyncio.to_thread(load, content)
            except Exception as error:  # safetensors has errors of its own
                raise TransferFailed("failed", "a run is no safetensors file") from error
            node = HostPrefix(arrays=arrays, bfloat16=frozenset(head.bfloat16))
            yield FileName(head.begin, head.end, "", head.resumable), node

    async def part(self, kind: type[Head]) -> tuple[Head, bytes]:
        """Read a part: its line and its content; raise `TransferFailed`."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES or not await self._fill():
                raise TransferFailed("failed", "the answer has no line")
        line = self._take(end + 1)
        code, text = line[:_CODE_CHARS], line[_CODE_CHARS + 1 : -1]
        try:
            head = kind.model_validate_json(text)
        except ValidationError as error:
            raise TransferFailed("failed", "a line is not one of this version") from error
        if head.size_bytes > self._limit_bytes:
            raise TransferFailed("failed", f"a run has {head.size_bytes} bytes")
        while len(self._buffer) < head.size_bytes:
            if not await self._fill():
                raise TransferFailed("failed", "the answer is cut short")
        content = self._take(head.size_bytes)
        expected = await asyncio.to_thread(
            self._key.answer_code, self._nonce, self._parts, text, content
        )
        self._parts += 1
        if not hmac.compare_digest(expected.encode(), code):
            raise TransferFailed("failed", "a part has a wrong code")
        return head, content

    def _take(self, size_bytes: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size_bytes])
        del self._buffer[:size_bytes]
        return taken

    async def _fill(self) -> bool:
        chunk = await anext(self._chunks, b"")
        self._buffer += chunk
        return bool(chunk)
