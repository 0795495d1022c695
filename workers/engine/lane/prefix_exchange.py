"""Prefix exchange: one engine gives nodes of its prefix cache, and takes those of others.

The engine thread copies one run at a time between two steps; files are read and arrays converted
in other threads. Nodes come only if that is faster than to read the prompt, by the measured pace
of both, and a transfer that falls behind is ended. Then the row reads what did not come.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from paceline.protocol import PrefixCounts
from workers.engine.decode.row import LoadedRange, Row
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.lane.thread import EngineThread
from workers.engine.prefix.cache import MIN_TOKENS, PrefixCache
from workers.engine.prefix.files import FileName, HostPrefix, Prefetched
from workers.engine.prefix.transfer import (
    MAX_TRANSFER_S,
    MAX_TRANSFERS,
    RUN_BYTES,
    CacheLayout,
    PrefixOffer,
    PrefixQuery,
    PrefixSource,
    TransferFailed,
    TransferPace,
    has_token_axis,
)

logger = logging.getLogger(__name__)

MIN_GAIN_TOKENS = 128
"""Reading fewer tokens costs less than to ask another worker."""

T = TypeVar("T")


@dataclass(slots=True)
class _Transfer:
    """How far a transfer from another engine is."""

    query: PrefixQuery
    at: int
    """Tokens in memory."""
    begun_s: float
    received_bytes: int = 0


class PrefixExchange:
    """The prefix cache of one engine, for other engines and from them; used by one event loop."""

    def __init__(
        self,
        cache: PrefixCache,
        thread: EngineThread,
        layout: CacheLayout,
        *,
        cuttable: bool,
    ) -> None:
        self._cache = cache
        self._thread = thread
        self._layout = layout
        self.model = ""
        """Engines of the same model give their nodes to each other; empty until it is known."""
        self._cuttable = cuttable
        """Whether a row of this model can start at any token."""
        self._pace = TransferPace()
        self._given = 0
        """Transfers to other engines that run."""
        self._taking = asyncio.Semaphore(MAX_TRANSFERS)
        self._fetches: dict[tuple[str, bytes], asyncio.Event] = {}
        """By scope and prompt; set at their ends."""

    def identify(self, fingerprint: str) -> None:
        """Exchange nodes with engines of this model from now on; safe from any thread."""
        self.model = self._layout.model_digest(fingerprint)

    # --- giving -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def open(self, query: PrefixQuery) -> AsyncIterator[PrefixOffer]:
        """Offer the nodes of a prompt from memory and disk; raise `TransferFailed` without any.

        Nodes that are evicted meanwhile end the runs early.
        """
        if not self.model or query.model != self.model:
            raise TransferFailed("other_model")
        if self._given >= MAX_TRANSFERS:
            raise TransferFailed("busy")
        self._given += 1
        try:
            async with asyncio.timeout(MAX_TRANSFER_S):
                held, files = await asyncio.to_thread(self._find, query)
                tokens = files[-1].end if files else held
                if not tokens:
                    raise TransferFailed("absent")
                async with aclosing(self._runs(query, held, files)) as runs:
                    yield PrefixOffer(tokens, runs)
        finally:
            self._given -= 1

    def _find(self, query: PrefixQuery) -> tuple[int, Sequence[FileName]]:
        """Return for how many tokens memory has nodes, and the files that continue them."""
        known = self._cache.known_tokens(query.scope, query.tokens)
        files = self._cache.find_files(query.scope, query.tokens, max(known, query.known))
        if files:
            return files[0].begin, files
        match = self._cache.match(
            query.scope,
            query.tokens,
            with_head=query.with_head,
            cuttable=self._cuttable and not query.with_head,
        )
        return match.tokens if match else 0, files

    async def _runs(
        self, query: PrefixQuery, held: int, files: Sequence[FileName]
    ) -> AsyncGenerator[Prefetched, None]:
        # Without a file the last run has a snapshot, which may be all that lacks.
        at = query.known if files else min(query.known, held - 1)
        while at < held:
            read = partial(
                self._cache.read_run, query.scope, query.tokens, at, held, query.run_bytes
            )
            pending = await self._on_thread(read)
            if pending is None:
                return
            yield await asyncio.to_thread(pending.to_host)
            at = pending.name.end
        runs = self._cache.read_files(files)
        while (run := await asyncio.to_thread(next, runs, None)) is not None:
            for part in parts(run, query.run_bytes):
                yield part

    # --- taking -----------------------------------------------------------------------------------

    async def fetch(self, row: Row, lane: LaneScheduler, sources: Sequence[PrefixSource]) -> None:
        """Take from one source the nodes that continue a row's beginning in memory and on disk.

        The sources are asked in their order until one has sent all that it offers. The row reads
        what does not come.
        """
        startable = max([lane.cached_tokens(row), *(name.end for name, _ in row.prefetched)])
        most = len(row.prompt.tokens)
        sources = [one for one in sources if min(one.tokens, most) - startable >= MIN_GAIN_TOKENS]
        if not self.model or row.prompt.scope is None or not sources:
            return
        key = row.prompt.scope, row.prompt.identity.tobytes()
        if (other := self._fetches.get(key)) is not None:
            await other.wait()  # of another choice of the request
            return
        ended = self._fetches[key] = asyncio.Event()
        try:
            await self._store_prefetched(row)
            for source in sources:
                result: str = "moved"
                try:
                    await self._take(source, row, startable, lane.counters.prefill_tokens_per_s)
                except TransferFailed as failure:
                    result = failure.reason
                    logger.info(
                        "prefix_transfer.ended source=%s reason=%s: %s",
                        source.name, result, failure,
                    )  # fmt: skip
                lane.counters.add(prefix=PrefixCounts(moves={result: 1}))
                if result == "moved":
                    return
        finally:
            ended.set()
            del self._fetches[key]

    async def _store_prefetched(self, row: Row) -> None:
        """Store nodes from disk, which the nodes of a source continue."""
        scope, tokens = row.prompt.scope, row.prompt.identity
        assert scope is not None, "nothing of the row may be shared"
        runs, row.prefetched = row.prefetched, ()
        for run in runs:
            known = self._cache.known_tokens(scope, tokens)
            for part in parts(run, RUN_BYTES):
                if not await self._on_thread(partial(self._cache.insert, scope, tokens, [part])):
                    return
            row.loaded.append(LoadedRange("disk", max(known, run[0].begin), run[0].end))

    async def _take(
        self, source: PrefixSource, row: Row, startable: int, read_tokens_per_s: float
    ) -> None:
        """Take the nodes of one source; raise `TransferFailed` unless all come in time."""
        scope, tokens = row.prompt.scope, row.prompt.identity
        assert scope is not None, "nothing of the row may be shared"
        with_head = row.uses_head and self._layout.has_head
        known = self._cache.known_tokens(scope, tokens, with_head=with_head)
        limit_s = _reading_s(source.tokens - startable, read_tokens_per_s)
        size_bytes = self._layout.size_bytes(source.tokens - known)
        expected_s = self._pace.estimate_s(source.name, size_bytes, time.monotonic())
        if expected_s is not None and expected_s > limit_s:
            raise TransferFailed("slower", f"{expected_s:.2f} s, reading {limit_s:.2f} s")
        query = PrefixQuery(
            model=self.model,
            scope=scope,
            tokens=tokens,
            known=known,
            with_head=with_head,
            run_bytes=RUN_BYTES,
            run_limit_bytes=2 * RUN_BYTES + self._layout.size_bytes(MIN_TOKENS),
        )
        transfer = _Transfer(query, known, time.monotonic())
        try:
            async with (
                asyncio.timeout(limit_s) as deadline,
                self._taking,
                source.open(query) as offer,
            ):
                if not startable + MIN_GAIN_TOKENS <= offer.tokens < len(tokens):
                    raise TransferFailed("absent", f"{offer.tokens} tokens")
                limit_s = _reading_s(offer.tokens - startable, read_tokens_per_s)
                deadline.reschedule(asyncio.get_running_loop().time() + limit_s)
                await self._store_runs(offer, transfer, limit_s)
        except TimeoutError as error:
            raise TransferFailed("slower", f"more than {limit_s:.2f} s") from error
        finally:
            now_s = time.monotonic()
            if transfer.received_bytes:
                spent_s = now_s - transfer.begun_s
                self._pace.record(source.name, transfer.received_bytes, spent_s, now_s)
            if transfer.at > startable:
                row.loaded.append(LoadedRange("moved", max(known, startable), transfer.at))

    async def _store_runs(self, offer: PrefixOffer, transfer: _Transfer, limit_s: float) -> None:
        """Check and store the runs of an offer; raise `TransferFailed` if they fall behind."""
        query = transfer.query
        size_bytes = self._layout.size_bytes(offer.tokens - query.known)
        if size_bytes > self._cache.limit_bytes:
            raise TransferFailed("too_large", f"{size_bytes} bytes")
        cuttable = self._cuttable and not query.with_head
        transfer.begun_s = time.monotonic()
        tokens = query.tokens[: offer.tokens]
        while transfer.at < offer.tokens:
            run = await anext(offer.runs, None)
            if run is None:
                raise TransferFailed("failed", f"it ended after {transfer.at} tokens")
            self._layout.check(run, query, transfer.at)
            if not await self._on_thread(partial(self._cache.insert, query.scope, tokens, [run])):
                raise TransferFailed("failed", "a run was not stored")
            transfer.at = run[0].end
            transfer.received_bytes += sum(array.nbytes for array in run[1].arrays.values())
            pace_s = (time.monotonic() - transfer.begun_s) / transfer.received_bytes
            if pace_s * size_bytes > limit_s:
                raise TransferFailed("slower", f"{pace_s * size_bytes:.2f} s")
            if transfer.at == offer.tokens and not (run[0].resumable or cuttable):
                raise TransferFailed("failed", "no row can start at its end")

    async def _on_thread(self, work: Callable[[], T]) -> T:
        """Run a part of the work between two steps of the engine."""
        return await asyncio.wrap_future(self._thread.call(work))


def _reading_s(tokens: int, tokens_per_s: float) -> float:
    """Return how long a row would read this many tokens: the limit of a transfer."""
    return min(tokens / tokens_per_s, MAX_TRANSFER_S) if tokens_per_s else MAX_TRANSFER_S


def parts(run: Prefetched, part_bytes: int) -> Iterator[Prefetched]:
    """Cut a run into parts of about this many bytes; the last one has the snapshot."""
    name, node = run
    length = name.end - name.begin
    growing = {key: array for key, array in node.arrays.items() if has_token_axis(key)}
    token_bytes = sum(array.nbytes for array in growing.values()) // length
    step = max(part_bytes // max(token_bytes, 1), MIN_TOKENS)
    for begin in range(name.begin, name.end, step):
        end = min(begin + step, name.end)
        last = end == name.end
        if last and begin == name.begin:
            yield run
            return
        pairs = slice(*(max(at - 1, 0) - max(name.begin - 1, 0) for at in (begin, end)))
        slots = slice(begin - name.begin, end - name.begin)
        arrays = {
            key: array[:, :, slots if key.startswith("attention.") else pairs]
            for key, array in growing.items()
        }
        arrays["tokens"] = node.arrays["tokens"][slots]
        if last:
            arrays = {**node.arrays, **arrays}
        bfloat16 = node.bfloat16 & arrays.keys()
        part = FileName(begin, end, "", name.resumable and last)
        yield part, HostPrefix(arrays=arrays, bfloat16=bfloat16)
