"""A conversation goes on at another worker: its nodes travel, checked, or the worker reads them."""

import asyncio
import hmac
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from pydantic import SecretStr
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.certificates import Authority
from paceline.http import paired_tls
from paceline.protocol import SCOPE_HEADER, SOURCES_HEADER, PrefixCounts
from tests.support.chat_bodies import assistant, user
from tests.support.images import encode_image
from tests.support.running_gateway import wait_until
from tests.support.scripted_engine import ScriptedEngine, make_worker, serve_app
from tests.support.served_engine import running_engine
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.lane import prefix_exchange
from workers.engine.prefix.files import FileName, HostPrefix, Prefetched
from workers.engine.prefix.fingerprint import ModelFiles
from workers.engine.prefix.transfer import (
    MAX_TRANSFERS,
    PrefixOffer,
    PrefixQuery,
    TransferFailed,
    TransferPace,
)
from workers.engine.types import Prompt
from workers.server.app import create_app
from workers.server.prefix_nodes import PATH, PrefixPeers

TOKEN = "join-token"
STORY = "The red fox sees the old tree and the blue boat finds the warm stone. " * 9
FURTHER = "And then the old tree tells the red fox about the river and the sea. " * 3
PICTURE = encode_image(Image.new("RGB", (64, 64), (220, 30, 30)))


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Run a second engine, which has a folder for its prefix cache."""
    folder = tmp_path_factory.mktemp("prefix-cache")
    with running_engine(prefix_cache_dir=folder, prefix_cache_secret=b"secret") as running:
        yield running


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no transfer take longer than reading on a busy machine."""
    monkeypatch.setattr(prefix_exchange, "_reading_s", lambda *_: 60.0)


@asynccontextmanager
async def serving(
    engine: Any, server: ssl.SSLContext | None = None, client: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    token = SecretStr(TOKEN)
    async with (
        PrefixPeers(token, tls=client) as peers,
        serve_app(create_app(make_worker(engine), token, peers), tls=server) as url,
    ):
        yield url


@dataclass(slots=True, kw_only=True)
class Reply:
    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int


async def ask(
    url: str,
    messages: Sequence[dict[str, Any]],
    *,
    scope: str,
    lane: str = "text-mtp",
    sources: Sequence[tuple[str, int]] = (),
    server_name: str = "",
    **fields: Any,
) -> Reply:
    headers = {"authorization": f"Bearer {TOKEN}", "x-paceline-lane": lane, SCOPE_HEADER: scope}
    if sources:
        name = {"server_name": server_name}
        named = [{"url": source, "tokens": tokens, **name} for source, tokens in sources]
        headers[SOURCES_HEADER] = json.dumps(named)
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 4, **fields}
    async with httpx.AsyncClient(timeout=120) as client:
        response = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return Reply(
        text=response.json()["choices"][0]["message"]["content"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        tokens=usage["total_tokens"],
    )


@pytest.fixture
async def source(holder: Engine) -> AsyncIterator[str]:
    """Yield the address of a worker that gives nodes."""
    async with serving(holder) as url:
        yield url


@pytest.fixture
async def taker(engine: Engine) -> AsyncIterator[str]:
    """Yield the address of a worker that takes nodes."""
    async with serving(engine) as url:
        yield url


async def begin(
    source: str, scope: str, content: Any = STORY, **fields: Any
) -> tuple[list[dict[str, Any]], int]:
    """Begin a conversation; return it with its next question, and the tokens that are held."""
    first = await ask(source, [user(content)], scope=scope, **fields)
    return [user(content), assistant(first.text), user("Go on.")], first.tokens


def counts(engine: Engine) -> PrefixCounts:
    return sum((lane.prefix for lane in engine.lane_reports()), PrefixCounts())


def on_thread(engine: Engine, work: Callable[[], Any]) -> None:
    engine.thread.call(work).result(60)


@pytest.mark.parametrize(
    ("lane", "where"),
    [("vlm", "memory"), ("text-mtp", "memory"), ("text-mtp", "disk"), ("vlm", "memory and disk")],
)
async def test_the_next_turn_at_another_worker_reads_its_new_tokens_only(
    engine: Engine, holder: Engine, source: str, taker: str, *, lane: str, where: str
) -> None:
    scope = f"{lane} {where}"
    messages, held = await begin(source, scope, lane=lane)
    if where != "memory":
        on_thread(holder, lambda: holder.prefix_cache.evict_to(0))
        holder.prefix_cache._writer.submit(lambda: None).result(60)
    if where == "memory and disk":
        messages[-1] = user(FURTHER)
        second = await ask(source, messages, scope=scope, lane=lane)
        held = second.tokens
        messages += [assistant(second.text), user("Go on.")]
    before = counts(engine)
    moved = await ask(taker, messages, scope=scope, lane=lane, sources=[(source, held)])
    after = counts(engine)
    cold = await ask(taker, messages, scope=f"cold {scope}", lane=lane)
    assert moved.text == cold.text
    assert cold.cached_tokens == 0
    assert held - 2 <= moved.cached_tokens < moved.prompt_tokens
    kinds = after.tokens_by_kind["moved"] - before.tokens_by_kind.get("moved", 0)
    assert kinds == moved.cached_tokens
    assert after.moves["moved"] - before.moves.get("moved", 0) == 1


async def test_nodes_travel_between_paired_workers_by_their_certificates(
    engine: Engine, holder: Engine, source: str, taker: str
) -> None:
    messages, held = await begin(source, "paired")
    server, client = paired_tls(server=True), paired_tls()
    authority = Authority(b"x" * 32)
    for context, name in ((server, "holder.worker"), (client, "taker.worker")):
        authority.new_identity(name, time.time()).load(context)
    before = counts(engine).moves
    async with serving(holder, server=server) as secure, serving(engine, client=client) as paired:
        given: dict[str, Any] = {"scope": "paired", "sources": [(secure, held)]}
        for asked, name in ((taker, "holder.worker"), (paired, "other.worker")):
            assert not (await ask(asked, messages, server_name=name, **given)).cached_tokens
            await engine.drop_prefixes("paired")
        moved = await ask(paired, messages, server_name="holder.worker", **given)
    assert held - 2 <= moved.cached_tokens < moved.prompt_tokens
    after = counts(engine).moves
    assert after["failed"] - before.get("failed", 0) == 2, "without a certificate; another name"
    assert after["moved"] - before.get("moved", 0) == 1


async def test_a_worker_takes_what_its_own_nodes_lack(engine, source, taker) -> None:
    own = await ask(taker, [user(STORY)], scope="own")
    messages, _ = await begin(source, "own")
    messages[-1] = user(2 * FURTHER)
    second = await ask(source, messages, scope="own")
    messages += [assistant(second.text), user(2 * FURTHER)]
    before = counts(engine).tokens_by_kind
    moved = await ask(taker, messages, scope="own", sources=[(source, second.tokens)])
    after = counts(engine).tokens_by_kind
    assert moved.cached_tokens >= second.tokens - 2
    kinds = {kind: after[kind] - before.get(kind, 0) for kind in ("conversation", "moved")}
    assert own.tokens - 2 <= kinds["conversation"] <= own.tokens
    assert sum(kinds.values()) == moved.cached_tokens


async def test_a_drafting_row_takes_the_part_of_the_head_that_others_left_out(
    engine: Engine, source: str, taker: str
) -> None:
    """A row without drafts has read the beginning that all chats share."""
    for word in ("Hello! ", "Who? "):
        await ask(taker, [user(word * 12)], scope="head", lane="vlm", draft_tokens=0)
    identity = engine_tokens(engine, [user(STORY)])
    node = next(engine.prefix_cache._walk("head", identity))[0]
    before_bytes = node.size_bytes
    node.head = []
    engine.prefix_cache.size_bytes -= before_bytes - node.size_bytes
    messages, held = await begin(source, "head")
    moved = await ask(taker, messages, scope="head", sources=[(source, held)])
    cold = await ask(taker, messages, scope="no head")
    assert moved.cached_tokens >= held - 2
    assert moved.text == cold.text


def engine_tokens(engine: Engine, messages: Sequence[dict[str, Any]]) -> Any:
    text = engine.prompts.chat(messages)
    return engine.prompts.prepare(Prompt(text=text)).identity


async def test_a_beginning_of_one_token_travels(holder: Engine, source: str, taker: str) -> None:
    """Other prompts may share no more; the head has read no pair of it."""
    scope = {"authorization": f"Bearer {TOKEN}", SCOPE_HEADER: "one token"}
    story = holder.prompts.tokenize_completion(30 * "The red fox sees the old tree. ")
    tokens = list(story[:180])
    async with httpx.AsyncClient(timeout=120, headers=scope) as client:

        async def complete(url: str, prompt: list[int], **headers: str) -> Any:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
            response = await client.post(f"{url}/v1/completions", json=body, headers=headers)
            return response.raise_for_status().json()["usage"]["prompt_tokens_details"]

        for prompt in ([tokens[0], *tokens[:100]], tokens):
            await complete(source, prompt)
        held = json.dumps([{"url": source, "tokens": len(tokens)}])
        details = await complete(taker, [*tokens, *tokens[:9]], **{SOURCES_HEADER: held})
    assert details["cached_tokens"] == len(tokens)


async def test_pictures_travel_with_their_conversation(source: str, taker: str) -> None:
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    content = [picture, {"type": "text", "text": STORY}]
    messages, held = await begin(source, "pictures", content, lane="vlm")
    sources = [(source, held)]
    moved = await ask(taker, messages, scope="pictures", lane="vlm", sources=sources)
    cold = await ask(taker, messages, scope="no pictures", lane="vlm")
    assert moved.text == cold.text
    assert moved.cached_tokens >= held - 2


async def test_no_node_leaves_its_isolation_scope(engine: Engine, source: str, taker: str) -> None:
    messages, held = await begin(source, "red")
    before = counts(engine).moves.get("absent", 0)
    other = await ask(taker, messages, scope="blue", sources=[(source, held)])
    assert other.cached_tokens == 0
    assert counts(engine).moves["absent"] == before + 1


async def test_the_choices_of_a_request_share_one_transfer(engine, source, taker) -> None:
    messages, held = await begin(source, "choices")
    before = counts(engine).moves
    reply = await ask(taker, messages, scope="choices", sources=[(source, held)], n=3)
    assert counts(engine).moves == before | {"moved": before.get("moved", 0) + 1}
    assert reply.cached_tokens >= held - 2


async def test_the_second_source_serves_where_the_first_is_away(source: str, taker: str) -> None:
    messages, held = await begin(source, "away")
    sources = [("http://127.0.0.1:1", held), (source, held)]
    moved = await ask(taker, messages, scope="away", sources=sources)
    assert moved.cached_tokens >= held - 2


@dataclass(slots=True)
class Liar:
    """The engine of a holder that changes what it gives."""

    engine: Engine
    change: Callable[[Prefetched], Prefetched | None]
    repeats: bool = False

    @asynccontextmanager
    async def open(self, query: PrefixQuery) -> AsyncIterator[PrefixOffer]:
        async with self.engine.open(replace(query, scope="liar")) as offer:
            yield PrefixOffer(offer.tokens, self._runs(offer))

    async def _runs(self, offer: PrefixOffer) -> AsyncIterator[Prefetched]:
        async for run in offer.runs:
            while (changed := self.change(run)) is not None:
                yield changed
                if not self.repeats:
                    break

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def with_array(run: Prefetched, name: str, change: Callable[[Any], Any]) -> Prefetched:
    arrays = {**run[1].arrays, name: change(run[1].arrays[name])}
    return run[0], HostPrefix(arrays=arrays, bfloat16=run[1].bfloat16)


def without_snapshot(node: HostPrefix) -> HostPrefix:
    kept = {
        name: node.arrays[name] for name in node.arrays if name[0] in "aht" and name != "hidden"
    }
    return HostPrefix(arrays=kept, bfloat16=node.bfloat16 & kept.keys())


LIES: dict[str, Callable[[Prefetched], Prefetched | None]] = {
    "other tokens": lambda run: with_array(run, "tokens", lambda tokens: tokens + 1),
    "another type": lambda run: with_array(
        run, "attention.0.0", lambda keys: keys.astype(np.float16)
    ),
    "another width": lambda run: with_array(run, "attention.0.1", lambda keys: keys[..., 1:]),
    "fewer slots": lambda run: with_array(run, "attention.0.0", lambda keys: keys[:, :, 1:]),
    "no array": lambda run: (
        run[0],
        HostPrefix(arrays={"tokens": run[1].arrays["tokens"]}, bfloat16=frozenset()),
    ),
    "a gap": lambda run: (run[0]._replace(begin=run[0].begin + 1), run[1]),
    "an end far away": lambda run: (run[0]._replace(end=1 << 40), run[1]),
    "a snapshot that its head denies": lambda run: (run[0]._replace(resumable=False), run[1]),
    "no snapshot": lambda run: (run[0]._replace(resumable=False), without_snapshot(run[1])),
    "nothing": lambda _: None,
    "no progress": lambda run: (FileName(run[0].begin, run[0].begin, "", False), run[1]),
}


@pytest.mark.parametrize("lie", LIES)
async def test_l12_a_holder_that_lies_costs_its_nodes_and_nothing_else(
    engine: Engine, holder: Engine, taker: str, lie: str
) -> None:
    liar: Any = Liar(holder, LIES[lie], repeats=lie == "no progress")
    async with serving(liar) as source:
        await _compare(engine, taker, source, lie, "failed", source_scope="liar")


@dataclass(slots=True)
class Wire:
    """An ASGI application whose answers with nodes are damaged on their way."""

    app: Any
    damage: str
    question: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        self.question.set()
        try:
            await self._answer(scope, receive, send)
        finally:
            self.closed.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        bodies = 0

        async def damaged(message: Any) -> None:
            nonlocal bodies
            if message["type"] == "http.response.body" and message["body"]:
                bodies += 1
                if bodies > 1:
                    await self._damage(message, send)
                    return
            await send(message)

        await self.app(scope, receive, damaged)

    async def _damage(self, message: Any, send: Send) -> None:
        body = message["body"]
        match self.damage:
            case "one bit":
                body = body[:-1] + bytes([body[-1] ^ 1])
            case "cut short":
                body = body[: len(body) // 2]
            case "endless line":
                while True:
                    await send({**message, "body": b"x" * 65536, "more_body": True})
                    await asyncio.sleep(0)  # the end of the connection cancels this
            case "stall":
                await asyncio.Event().wait()
        await send({**message, "body": body})


@asynccontextmanager
async def damaging(holder: Engine, damage: str) -> AsyncIterator[tuple[str, Wire]]:
    token = SecretStr(TOKEN)
    async with PrefixPeers(token) as peers:
        wire = Wire(create_app(make_worker(holder), token, peers), damage)
        async with serve_app(wire) as url:
            yield url, wire


@pytest.mark.parametrize("damage", ["one bit", "cut short", "endless line"])
async def test_a_damaged_answer_is_found_out(engine, holder, taker, damage) -> None:
    async with damaging(holder, damage) as (source, _):
        await _compare(engine, taker, source, damage, "failed")


async def test_a_stalled_transfer_ends_when_reading_would_have_ended(
    engine: Engine, holder: Engine, taker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_exchange, "_reading_s", lambda *_: 0.2)
    async with damaging(holder, "stall") as (source, wire):
        await _compare(engine, taker, source, "stall", "slower")
        await wire.closed.wait()


async def test_a_client_that_leaves_ends_the_transfer(holder: Engine, taker: str) -> None:
    async with damaging(holder, "stall") as (source, wire):
        messages, held = await begin(source, "leave")
        asking = asyncio.create_task(ask(taker, messages, scope="leave", sources=[(source, held)]))
        await wire.question.wait()
        asking.cancel()
        await asyncio.wait((asking,))
        await wire.closed.wait()


async def test_a_source_that_is_no_worker_is_left(engine: Engine, taker: str) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        pieces = (b"<html>" for _ in range(3))
        await StreamingResponse(aiter_of(pieces))(scope, receive, send)

    async def aiter_of(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async with serve_app(answer) as source:
        before = counts(engine).moves.get("failed", 0)
        reply = await ask(taker, [user(STORY)], scope="html", sources=[(source, 500)])
    assert reply.cached_tokens == 0
    assert counts(engine).moves["failed"] == before + 1


async def _compare(
    engine: Engine, taker: str, source: str, scope: str, reason: str, *, source_scope: str = ""
) -> None:
    """Let a conversation go on without the nodes of its source, for this reason."""
    messages, held = await begin(source, source_scope or scope)
    before = counts(engine).moves.get(reason, 0)
    reply = await ask(taker, messages, scope=scope, sources=[(source, held)])
    assert counts(engine).moves[reason] == before + 1
    cold = await ask(taker, messages, scope=f"cold {scope}")
    assert reply.text == cold.text
    assert reply.cached_tokens == 0


async def test_a_worker_takes_no_nodes_before_it_has_read_its_weights(
    tmp_path, monkeypatch, source: str
) -> None:
    reading, read, known = threading.Event(), ModelFiles.read, ModelFiles(CHECKPOINT).fingerprint()
    assert known is not None
    monkeypatch.setattr("workers.engine.prefix.fingerprint.AT_ONCE_BYTES", 0)
    monkeypatch.setattr(ModelFiles, "read", lambda *given: reading.wait() and read(*given))
    moved = []
    with running_engine(prefix_cache_dir=tmp_path, prefix_cache_secret=b"secret") as engine:
        async with serving(engine) as url:
            for scope in ("unread", "read"):
                chat = [{"role": "user", "content": STORY}]
                first = await ask(source, chat, scope=scope)
                chat.append({"role": "assistant", "content": first.text})
                chat.append({"role": "user", "content": FURTHER})
                reply = await ask(url, chat, scope=scope, sources=[(source, first.tokens)])
                moved.append((engine.card.fingerprint, reply.cached_tokens > 100))
                reading.set()
                await asyncio.to_thread(wait_until, lambda: bool(engine.card.fingerprint))
        assert engine.exchange is not None
    assert moved == [("", False), (known.answers, True)]
    assert engine.exchange.model == engine.exchange._layout.model_digest(known.caches)
    assert list(tmp_path.glob("*.safetensors")), "written at its end"


async def test_an_engine_of_another_model_gives_nothing(engine: Engine) -> None:
    assert engine.exchange is not None
    query = PrefixQuery(
        model="other",
        scope="",
        tokens=np.zeros(64, np.int64),
        known=0,
        with_head=False,
        run_bytes=1 << 20,
    )
    with pytest.raises(TransferFailed, match="other_model"):
        async with engine.open(query):
            pass


async def test_a_worker_gives_to_few_at_a_time(engine, holder, source, taker, monkeypatch) -> None:
    messages, held = await begin(source, "busy")
    monkeypatch.setattr(holder.exchange, "_given", MAX_TRANSFERS)
    reply = await ask(taker, messages, scope="busy", sources=[(source, held)])
    assert reply.cached_tokens == 0
    assert counts(engine).moves["busy"] == 1


async def test_a_source_that_was_slower_than_reading_is_not_asked(engine, holder, taker) -> None:
    assert engine.exchange is not None
    async with damaging(holder, "") as (source, wire):
        messages, held = await begin(source, "slow")
        engine.exchange._pace.record(source, 1, 1000.0, time.monotonic())
        reply = await ask(taker, messages, scope="slow", sources=[(source, held)])
    assert reply.cached_tokens == 0
    assert not wire.question.is_set()


def test_a_pace_is_of_the_last_transfers_and_grows_old() -> None:
    pace = TransferPace()
    assert pace.estimate_s("a", 100, 0.0) is None
    for _ in range(20):
        pace.record("a", 100, 1.0, 10.0)
    assert pace.estimate_s("a", 200, 11.0) == pytest.approx(2.0)
    for _ in range(20):
        pace.record("a", 100, 4.0, 20.0)
    assert pace.estimate_s("a", 100, 21.0) == pytest.approx(4.0, rel=0.01)
    assert pace.estimate_s("b", 100, 21.0) is None
    assert pace.estimate_s("a", 100, 1000.0) is None
    for number in range(100):
        pace.record(f"c{number}", 1, 1.0, 30.0)
    assert pace.estimate_s("a", 100, 31.0) is None


@pytest.mark.parametrize(
    "sources", ["[", "{}", '[{"url": "ftp://x", "tokens": 1}]', '[{"url": "http://x"}]']
)
async def test_a_header_that_lists_no_workers_is_refused(taker: str, sources: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", SOURCES_HEADER: sources}
    body = {"model": "demo", "messages": [user("Hello")]}
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{taker}/v1/chat/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, SOURCES_HEADER)


async def test_a_question_needs_a_code_of_its_body() -> None:
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=60) as client:
        peers = PrefixPeers(SecretStr(TOKEN))
        right = peers.key.credentials("0" * 32, b"{}")
        other = PrefixPeers(SecretStr("other")).key.credentials("0" * 32, b"{}")
        nodes_key = hmac.digest(TOKEN.encode(), b"paceline prefix nodes", "sha256").hex()
        paired = PrefixPeers(SecretStr("its own"), nodes_key)
        assert paired.key.credentials("0" * 32, b"{}") == right
        for authorization, body, status in (
            (right, b"{}", 400),
            (right, b"[]", 401),
            (other, b"{}", 401),
            (f"Bearer {TOKEN}", b"{}", 401),
        ):
            response = await client.post(
                url + PATH, content=body, headers={"authorization": authorization}
            )
            assert response.status_code == status, authorization
        assert TOKEN not in right


async def test_a_worker_without_a_token_asks_and_answers_nobody(engine: Engine) -> None:
    async with serve_app(create_app(make_worker(engine), None)) as url:
        source = [(url, 1000)]
        before = counts(engine).moves
        assert (await ask(url, [user("Hello")], scope="none", sources=source)).text
        assert counts(engine).moves == before
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.post(url + PATH, content=b"{}")).status_code == 401
