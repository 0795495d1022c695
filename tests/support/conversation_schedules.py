"""Random conversations over the prefix caches of two engines: each answer is checked.

Chats begin, go on, fork from an earlier turn, lose a message, and change one; several are answered
at once, by both lanes, with drafts and without, while others are cancelled and the cache is evicted
in part. Evicted nodes go to disk and come back from there, also after a restart. Chats move to the
other engine, which gets their nodes from the first. What an engine has read before must not change
an answer: one pass of the bare model over the prompt and the answer finds the likeliest token at
each place.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import mlx.core as mx

from tests.support.engine_lane import RowEvents, lanes_of, row_for
from workers.engine.lane.prefix_exchange import PrefixExchange
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.lane.thread import EngineThread
from workers.engine.model.checkpoint import Checkpoint
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles
from workers.engine.prefix.transfer import CacheLayout, PrefixOffer, PrefixQuery
from workers.engine.startup.probes import probe_cache_layout
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import Finished, LaneName, Prompt

Messages: TypeAlias = tuple[dict[str, str], ...]
T = TypeVar("T")

TIE = 1e-4
"""Two scores that are closer are a tie, which rounding may decide either way."""
MAX_CONTEXT_CHARS = 2000
SCOPES = ("red", "blue")
SYSTEMS = ("", "Be brief. " + "The blue boat finds the warm stone. " * 9)
QUESTIONS = (
    "Hello",
    "Count from 1 to 20.",
    "Tell me a story about a fox.",
    "What is 2 + 2?",
    "Name three fruits. " + "The old tree sees the red fox. " * 12,
)


class _SameThread(EngineThread):
    """Runs calls at once: the schedules have one thread, which runs the lanes too."""

    def call(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(work())
        return future


class _Engine:
    """Two lanes over one small prefix cache, which gives nodes and takes some."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        cache_bytes: int,
        folder: Path,
        layout: CacheLayout,
    ) -> None:
        files = PrefixCacheFiles(folder, 16 * cache_bytes, "demo", b"secret")
        self.cache = PrefixCache(cache_bytes, files)
        self.exchange = PrefixExchange(self.cache, _SameThread(), layout, cuttable=False)
        self.exchange.identify("demo")
        self.lanes = lanes_of(
            checkpoint, prompts, *LaneName, draft_tokens=3, chunk_tokens=192, cache=self.cache
        )


@dataclass(frozen=True)
class _Source:
    """The nodes of the other engine."""

    exchange: PrefixExchange
    tokens: int
    name: str = "other"

    def open(self, query: PrefixQuery) -> AbstractAsyncContextManager[PrefixOffer]:
        return self.exchange.open(query)


class ConversationRunner:
    """Conversations that two engines answer in turn."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prompts: PromptRenderer,
        seed: int,
        cache_bytes: int,
        folder: Path,
        *,
        longest_answer: int = 200,
    ) -> None:
        self.stats: Counter[str] = Counter()
        """What the conversations covered, by the names in `bench.engine.schedules`."""
        self._folders = [folder / name for name in ("one", "two")]
        for each in self._folders:
            each.mkdir(mode=0o700)
        self._checkpoint, self._prompts = checkpoint, prompts
        self._rng = random.Random(seed)
        self._cache_bytes = cache_bytes
        self._longest_answer = longest_answer
        self._chats: list[tuple[str, Messages]] = []
        self._layout = probe_cache_layout(checkpoint.target, checkpoint.head)
        self._start()

    def close(self) -> None:
        """Write the caches to disk, and end their threads."""
        for engine in self._engines:
            engine.cache.close()

    def _start(self) -> None:
        """Start both engines, the one that answers next first."""
        self._engines = [
            _Engine(self._checkpoint, self._prompts, self._cache_bytes, folder, self._layout)
            for folder in self._folders
        ]

    def run(self, tokens: int) -> Counter[str]:
        """Answer until so many tokens are checked; raise `AssertionError` at a wrong one."""
        for batch in itertools.count(1):
            if self.stats["tokens"] >= tokens:
                break
            if batch % 3 == 0:
                self.stats["restarts"] += 1
                self.close()
                self._start()
            if batch % 2 == 0:
                self._engines.reverse()
            engine = self._engines[0]
            lanes = engine.lanes if self._rng.random() < 0.2 else [self._rng.choice(engine.lanes)]
            count = self._rng.randint(2, 9)
            rows = [self._submit(self._rng.choice(lanes), *self._next_chat()) for _ in range(count)]
            while any(lane.busy for lane in engine.lanes):
                for lane in engine.lanes:
                    lane.step()
                if self._rng.random() < 0.02:
                    self._rng.choice(rows)[2].row.cancelled = True
                if self._rng.random() < 0.01:
                    self.stats["evictions"] += 1
                    engine.cache.evict_to(int(self._rng.random() * engine.cache.size_bytes))
            for one in self._engines:
                assert one.cache.size_bytes == sum(node.size_bytes for node in one.cache._nodes())
                assert one.cache.size_bytes <= self._cache_bytes
            for scope, messages, result in rows:
                self._check(result)
                if isinstance(result.end, Finished):
                    answer = {"role": "assistant", "content": result.text}
                    self._chats.append((scope, (*messages, answer)))
        return self.stats

    def _next_chat(self) -> tuple[str, Messages]:
        rng, stats = self._rng, self.stats
        if not self._chats or rng.random() < 0.1:
            system = rng.choice(SYSTEMS)
            start: Messages = ({"role": "system", "content": system},) if system else ()
            return rng.choice(SCOPES), (*start, self._question())
        scope, messages = self._chats[-1] if rng.random() < 0.6 else rng.choice(self._chats)
        turns = [at for at, message in enumerate(messages) if message["role"] == "user"]
        if rng.random() < 0.25:
            stats["forks"] += 1
            messages = messages[: rng.choice(turns)]
        elif rng.random() < 0.25:
            stats["edits"] += 1
            at = rng.choice(turns)
            messages = (*messages[:at], self._question(), *messages[at + 1 :])
        elif rng.random() < 0.3:
            stats["cuts"] += 1
            messages = messages[:1] + messages[3:] if len(messages) > 3 else messages
        while sum(len(message["content"]) for message in messages) > MAX_CONTEXT_CHARS:
            messages = messages[: len(messages) // 2]
        if messages and messages[-1]["role"] == "user":
            return scope, messages
        return scope, (*messages, self._question())

    def _question(self) -> dict[str, str]:
        return {"role": "user", "content": self._rng.choice(QUESTIONS)}

    def _submit(
        self, lane: LaneScheduler, scope: str, messages: Messages
    ) -> tuple[str, Messages, RowEvents]:
        text = self._prompts.chat(messages)
        prompt = Prompt(
            text=text,
            prefix_text=self._prompts.shared_prefix(messages),
            turn_end=self._prompts.turn_end(text, messages),
            continues=self._rng.random() < 0.7,
            scope=scope,
        )
        result = RowEvents()
        result.row = row_for(
            lane,
            self._prompts,
            self._prompts.prepare(prompt),
            self._rng.choice((0, 3, 3, 3)),
            self._rng.randint(1, self._longest_answer),
            asked=prompt,
            ends=lane.ends if self._rng.random() < 0.3 else frozenset(),
            looks_up=self._rng.random() < 0.5,
            sink=result.on_event,
        )
        engine, other = self._engines
        result.row.prefetched = engine.cache.prefetch(scope, result.row.prompt.identity)
        source = _Source(other.exchange, other.lanes[0].cached_tokens(result.row))
        asyncio.run(engine.exchange.fetch(result.row, lane, [source]))
        lane.add(result.row)
        return scope, messages, result

    def _check(self, result: RowEvents) -> None:
        row, stats = result.row, self.stats
        stats.update(
            {
                "rows": 1,
                "cancelled": result.end is None,
                "prompt tokens": len(row.prompt.tokens),
                "cached tokens": row.cached_tokens,
                "disk tokens": row.cached_kinds.get("disk", 0),
                "moved tokens": row.cached_kinds.get("moved", 0),
                "tokens": len(row.answer),
                "drafted tokens": row.speculation.total().drafted,
            }
        )
        assert result.end is None or isinstance(result.end, Finished), result.end
        if row.answer:
            stats["ties"] += check_greedy(self._checkpoint, row.prompt.tokens, row.answer)


def check_greedy(checkpoint: Checkpoint, prompt: tuple[int, ...], answer: list[int]) -> int:
    """Raise `AssertionError` unless each token is the likeliest; return how many are ties."""
    tokens = [*prompt, *answer[:-1]]
    language = checkpoint.target.language
    positions = mx.broadcast_to(mx.arange(len(tokens))[None, None], (3, 1, len(tokens)))
    output = language(mx.array([tokens]), cache=language.make_cache(), position_ids=positions)
    scores = output.logits[0, len(prompt) - 1 :].astype(mx.float32)
    chosen = mx.take_along_axis(scores, mx.array(answer)[:, None], axis=1)[:, 0]
    behind = (scores.max(axis=1) - chosen).tolist()
    at = next((at for at, gap in enumerate(behind) if gap > TIE), None)
    assert at is None, f"token {at} of {len(answer)} is {behind[at]} behind the likeliest"
    return sum(gap > 0 for gap in behind)
