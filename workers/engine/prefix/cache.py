"""Prefix cache: a tree over tokens, so that no prompt is read twice.

A node is a run of tokens with its keys and values; conversations that begin alike share the nodes
of their beginning, and each turn adds a node. A node may end with a snapshot: the recurrent states,
the windows of layers that see only the last tokens, and the last hidden state there. A row starts
from the longest common beginning of its prompt and the tree, with speculation, and continues
exactly as if it had read the prompt. A model of plain attention starts at any token; one with
recurrent or windowed layers, or an MTP head, starts at a snapshot.

Each isolation scope has its own tree. The key of a system prompt is the gateway's name for it,
and decides nothing: tokens are compared.
"""

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import nlargest

import numpy as np

from paceline.protocol import whole_scope
from workers.engine.prefix.files import FileName, Prefetched, PrefixCacheFiles
from workers.engine.prefix.tree import Match, Node, PendingRun, RowState, TokenArray, from_host

logger = logging.getLogger(__name__)

MIN_TOKENS = 32
"""Reading fewer tokens again costs less than a cache entry."""
SNAPSHOT_INTERVAL_TOKENS = 2048
"""Where memory is short, earlier snapshots are thinned to this distance."""
_KNOWN_EVICTIONS = 64
_KEYS_PER_NODE = 64
"""Prompts whose keys differ may have the same tokens."""
_PENDING_BYTES = 256 << 20
_PENDING_SHARE = 0.125
"""Memory of evicted nodes that wait to be written: this much, or a share of the limit. What is
evicted beyond it is lost, so nodes are written ahead of their eviction."""
_WRITE_AHEAD_SHARE = 0.75
"""Share of the limit from which on the nodes that come next are written."""
_PREFETCH_SHARE = 0.25
"""Share of the limit that nodes read from disk for queued requests may hold."""
_FLUSH_S = 5.0
_OTHER_TEXTS = 32
_OTHER_TOKENS = 1 << 15
_CONTEXT_TOKENS = 8


class PrefixCache:
    """Trees of prompts and answers in memory, evicted at `limit_bytes`.

    With `files`, a background thread writes evicted nodes to disk, and all nodes at the end. Used
    by the engine thread only, unless a method says otherwise.
    """

    def __init__(
        self, limit_bytes: int, files: PrefixCacheFiles | None = None, *, quantized: bool = False
    ) -> None:
        """Create an empty cache; `quantized` keeps keys and values in 8 bits."""
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        """Memory in use."""
        self._quantized = quantized
        self._files = files
        self._writer = ThreadPoolExecutor(1, "paceline-prefix-cache")
        self._roots: dict[str, Node] = {}
        self._by_key: dict[str, Node] = {}
        self._uses = itertools.count(1)
        self._lock = threading.Lock()
        """Guards nodes that wait to be written, and nodes that were read."""
        self._pending: dict[FileName, int] = {}
        """Sizes of the nodes that the background thread has not written yet."""
        self._prefetched_bytes = 0
        """Memory of runs that queued requests have read from disk."""
        self._evicted: deque[str] = deque(maxlen=_KNOWN_EVICTIONS)
        self._warned = False
        """Whether something was too large to store, which is logged once."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys in memory, most recently used first, then those on disk.

        Safe from any thread.
        """
        files = self._files
        on_disk = files.keys if files is not None else ()
        return tuple(dict.fromkeys((*tuple(self._by_key)[::-1], *on_disk)))

    @property
    def evicted_keys(self) -> tuple[str, ...]:
        """Return the keys whose tokens were evicted and are not on disk, the last one first."""
        return tuple(self._evicted)[::-1]

    def use_files(self, files: PrefixCacheFiles | None) -> None:
        """Keep nodes in these files from now on; safe from any thread."""
        self._files = files

    # --- reading ----------------------------------------------------------------------------------

    def match(
        self, scope: str, tokens: TokenArray, *, with_head: bool, cuttable: bool
    ) -> Match | None:
        """Return the longest beginning of `tokens` from which a row can start; None without one.

        One token at least remains to be read, since the next token needs its scores.
        `cuttable`: a row of this model can start at any token.
        """
        path, found = [], None
        limit = len(tokens) - 1
        for node, common in self._walk(scope, tokens):
            if with_head and not node.head:
                break
            path.append(node)
            end = min(node.begin + common, limit)
            if cuttable:
                found = Match(tuple(path), end, None)
                continue
            snapshot = node.snapshot if node.end == end else None
            if snapshot is not None and (not with_head or snapshot.last_hidden is not None):
                found = Match(tuple(path), end, snapshot)
        return found if found and found.tokens >= MIN_TOKENS else None

    def other_texts(self, scope: str | None, tokens: TokenArray) -> list[TokenArray]:
        """Return runs of a scope that `tokens` do not begin with, the last used one last.

        There are at most `_OTHER_TEXTS`, of `_OTHER_TOKENS` together; each begins with the last
        tokens of the run before it.
        """
        root = self._roots.get(scope or "")
        if scope is None or root is None:
            return []
        own = {node for node, common in root.walk(tokens) if common == len(node.tokens)}
        others = (node for node in root.below() if node not in own)
        texts: list[TokenArray] = []
        room = _OTHER_TOKENS
        for node in nlargest(_OTHER_TEXTS, others, key=lambda node: node.used):
            before = node.parent.tokens[-_CONTEXT_TOKENS:] if node.parent else node.tokens[:0]
            texts.append(np.concatenate([before, node.tokens[:room]]))
            room -= len(node.tokens)
            if room <= 0:
                break
        return texts[::-1]

    def known_tokens(self, scope: str, tokens: TokenArray, *, with_head: bool = False) -> int:
        """Return for how many tokens memory has keys and values; safe from any thread."""
        path = itertools.takewhile(
            lambda step: step[0].head or not with_head, self._walk(scope, tokens)
        )
        return sum(common for _, common in path)

    def read_run(
        self, scope: str, tokens: TokenArray, begin: int, end: int, size_bytes: int
    ) -> PendingRun | None:
        """Return a run that begins at `begin`, of about `size_bytes`, and ends at `end` or before.

        It has a snapshot if a row can start at its end, and its end is `end` or that of a system
        prompt. None: memory does not hold these tokens any more.
        """
        for node, common in self._walk(scope, tokens):
            stop = min(node.begin + common, end)
            if not node.begin <= begin < stop:
                continue
            stop = min(stop, begin + max(size_bytes // max(node.token_bytes, 1), MIN_TOKENS))
            part = node.part(begin, stop)
            if stop == node.end and (stop == end or node.keys):
                part.snapshot = node.snapshot
            return part.compute(FileName(begin, stop, "", part.snapshot is not None))
        return None

    def find_files(self, scope: str, tokens: TokenArray, known: int) -> list[FileName]:
        """Return the files that continue the first `known` tokens; safe from any thread."""
        return self._files.find(scope, tokens, known) if self._files is not None else []

    def read_files(self, names: Sequence[FileName]) -> Iterator[Prefetched]:
        """Yield runs from disk up to the first that is lost; safe from any thread, blocks."""
        for name in names:
            host = self._files.load(name) if self._files is not None else None
            if host is None:
                return
            yield name, host

    def prefetch(
        self,
        scope: str | None,
        tokens: TokenArray,
        is_cancelled: Callable[[], bool] = lambda: False,
        share: float = _PREFETCH_SHARE,
    ) -> list[Prefetched]:
        """Read from disk the nodes of a prompt that memory lacks; safe from any thread, blocks.

        The runs count against a share of the limit until nobody holds them any more.
        """
        if scope is None:
            return []
        # The engine thread may change the tree meanwhile: then a file is read in vain.
        files = self.read_files(self.find_files(scope, tokens, self.known_tokens(scope, tokens)))
        runs = []
        while not is_cancelled() and self._prefetched_bytes < share * self.limit_bytes:
            run = next(files, None)
            if run is None:
                break
            size_bytes = run[1].size_bytes
            self._add_prefetched(size_bytes)
            weakref.finalize(run[1], self._add_prefetched, -size_bytes).atexit = False
            runs.append(run)
        return runs

    @property
    def is_behind(self) -> bool:
        """Return whether nodes wait to be written, or as much is read as requests may hold."""
        return bool(self._pending) or self._prefetched_bytes >= _PREFETCH_SHARE * self.limit_bytes

    def reload(
        self, scope: str | None, tokens: TokenArray, is_cancelled: Callable[[], bool]
    ) -> Future[list[Prefetched]]:
        """Read the next prompt's nodes that memory lacks from disk, after all waiting writes."""
        return self._writer.submit(self.prefetch, scope, tokens, is_cancelled, 1.0)

    def _add_prefetched(self, size_bytes: int) -> None:
        with self._lock:
            self._prefetched_bytes += size_bytes

    def _walk(self, scope: str, tokens: TokenArray) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that begin like the rest of `tokens`, and for how many tokens."""
        root = self._roots.get(scope)
        return root.walk(tokens) if root is not None else iter(())

    # --- storing ----------------------------------------------------------------------------------

    def store(
        self,
        scope: str | None,
        tokens: TokenArray,
        state: RowState,
        *,
        room_bytes: int,
        key: str = "",
    ) -> bool:
        """Store a copy of the caches after these tokens; evict others until all fit.

        Returns whether there is room for it, which is known before it is copied. `key` names the
        tokens if they are a system prompt. The device copies while the host continues.
        """
        if scope is None or not self.limit_bytes or len(tokens) < MIN_TOKENS:
            return True
        node = self._store(scope, tokens, state, room_bytes)
        if node is not None and key:
            self.name((node,), len(tokens), key)
        return node is not None

    def insert(self, scope: str, tokens: TokenArray, runs: Sequence[Prefetched]) -> bool:
        """Store runs from disk or from another worker; return whether `tokens` begin with all."""
        for name, host in runs:
            try:
                run, state = from_host(name, host)
                expected = tokens[name.begin : name.end]
                if name.begin + len(run) != name.end or not np.array_equal(run, expected):
                    return False
                if self._store(scope, tokens[: name.end], state, self.limit_bytes) is None:
                    return False
            except Exception as error:  # noqa: BLE001  # the prompt is read again
                logger.warning("prefix_cache.run_unusable error=%s", type(error).__name__)
                return False
        return True

    def _store(
        self, scope: str, tokens: TokenArray, state: RowState, room_bytes: int
    ) -> Node | None:
        path = list(self._walk(scope, tokens))
        begin = sum(common for _, common in path)
        known = [node for node, _ in path]
        state = state._replace(quantized=self._quantized)
        needed_bytes = state.copy_bytes(begin, len(tokens))
        total_bytes = needed_bytes + sum(node.size_bytes for node in known)
        limit_bytes = min(self.limit_bytes, room_bytes)
        if total_bytes > limit_bytes:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "prefix_cache.too_large tokens=%d needed_bytes=%d limit_bytes=%d",
                    len(tokens), total_bytes, limit_bytes,
                )  # fmt: skip
            return None
        if state.begin > begin:
            return None  # memory has lost what comes before
        self.touch(known)
        self.evict_to(limit_bytes - needed_bytes, frozenset(known))
        # Not earlier: an eviction also removes the roots of empty trees.
        root = self._roots.setdefault(scope, Node(tokens=tokens[:0], end=0))
        ends_within_run = bool(path) and path[-1][1] < len(known[-1].tokens)
        if ends_within_run and (begin < len(tokens) or not state.cuttable):
            known[-1] = self._split(known[-1], path[-1][1])
        end = known[-1] if known else root
        self.size_bytes += sum(node.add_head(state) for node in known)
        if begin < len(tokens):
            end = end.add_child(tokens[begin:], state)
            self.size_bytes += end.size_bytes
        self.size_bytes += end.add_snapshot(state)
        self.touch([end])
        self.evict_to(limit_bytes)
        self._write_ahead(limit_bytes)
        return end

    def _split(self, node: Node, length: int) -> Node:
        upper = node.split(length)
        for key in upper.turns:
            if self._by_key.get(key) is node:
                self._by_key[key] = upper
        return upper

    def touch(self, nodes: Sequence[Node]) -> None:
        """Mark nodes as the most recently used."""
        now = next(self._uses)
        for node in nodes:
            node.used = now
            for key in node.keys:
                if self._by_key.get(key) is node:  # scopes may use the same key
                    self._by_key[key] = self._by_key.pop(key)

    def name(self, nodes: Sequence[Node], tokens: int, key: str) -> None:
        """Give the key of a system prompt to the one of these nodes that ends it."""
        for node in nodes:
            if node.end == tokens and len(node.keys) < _KEYS_PER_NODE:
                node.keys.add(key)
                self._index(key, node)

    def name_turn(self, scope: str | None, tokens: TokenArray, key: str) -> None:
        """Give the key of a conversation to the node that holds the last of these tokens."""
        if scope is None or not key:
            return
        path = list(self._walk(scope, tokens))
        if not path or sum(common for _, common in path) < len(tokens):
            return
        node, _ = path[-1]
        if key in node.turns or len(node.turns) < _KEYS_PER_NODE:
            node.turns[key] = len(tokens)
            self._index(key, node)

    def _index(self, key: str, node: Node) -> None:
        self._by_key.pop(key, None)
        self._by_key[key] = node
        if key in self._evicted:
            self._evicted.remove(key)

    # --- eviction ---------------------------------------------------------------------------------

    def drop(self, scope: str | None) -> Future[None]:
        """Forget all of a scope in memory, then delete its files; None: of all scopes."""
        for name in [name for name in self._roots if scope in (None, whole_scope(name))]:
            for node in self._roots.pop(name).below():
                self._release(node)
        files = self._files
        return self._writer.submit(lambda: files.drop(scope) if files is not None else None)

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from root.below()

    def evict_to(self, size_bytes: int, kept: frozenset[Node] = frozenset()) -> None:
        """Evict until the rest fits into `size_bytes`, the least recently used nodes first."""
        while self.size_bytes > size_bytes:
            thinned = min(self._thinnable(), key=lambda node: (node.used, node.end), default=None)
            if thinned is not None:
                self.size_bytes -= thinned.drop_snapshot()
                continue
            leaves = (node for node in self._nodes() if not node.children and node not in kept)
            leaf = min(leaves, key=_eviction_order, default=None)
            if leaf is None:
                return
            self._remove(leaf, kept)

    def _thinnable(self) -> Iterator[Node]:
        """Yield the nodes without whose snapshot the next one is still near.

        The last turn of a conversation keeps its snapshots, and so do system prompts.
        """
        for node in self._nodes():
            if (
                node.snapshot
                and node.snapshot.size_bytes
                and not node.keys
                and any(child.children for child in node.children.values())
                and node.snapshot_distance() <= SNAPSHOT_INTERVAL_TOKENS
            ):
                yield node

    def _remove(self, node: Node, kept: frozenset[Node]) -> None:
        """Remove a leaf, and the nodes before it from which no row could start any more."""
        root = node.path()[0].parent
        scope = next(scope for scope, other in self._roots.items() if other is root)
        while node.parent is not None and not node.children and node not in kept:
            self._write(scope, node)
            del node.parent.children[int(node.tokens[0])]
            keys = self._release(node)
            if self._files is None:
                self._evicted.extend(keys)
            node = node.parent
            if node.snapshot is not None:
                return
        if not self._roots[scope].children:
            del self._roots[scope]

    def _release(self, node: Node) -> list[str]:
        """Give back the memory of a node, and return the keys that nothing has any more."""
        self.size_bytes -= node.size_bytes
        keys = [key for key in (*node.keys, *node.turns) if self._by_key.get(key) is node]
        for key in keys:
            self._by_key.pop(key, None)
        return keys

    # --- files ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all nodes that the disk lacks, the most recently used first.

        Nodes that are not written within some seconds are lost, since somebody waits for the end.
        """
        until_s = time.monotonic() + _FLUSH_S
        for scope, root in self._roots.items():
            for node in sorted(root.below(), key=lambda node: (-node.used, node.end)):
                self._write(scope, node, until_s=until_s)

    def close(self) -> None:
        """Write everything to disk, and wait for it."""
        self.flush()
        self._writer.shutdown()

    def _write_ahead(self, limit_bytes: int) -> None:
        """Write the conversation that is evicted next, if that is near."""
        near = self.size_bytes >= _WRITE_AHEAD_SHARE * limit_bytes
        if self._files is None or self._pending or not near:
            return
        unwritten = (
            (scope, node)
            for scope, root in self._roots.items()
            for node in root.below()
            if not node.children and not node.written
        )
        scope, leaf = min(unwritten, key=lambda one: _eviction_order(one[1]), default=("", None))
        for node in leaf.path() if leaf is not None else ():
            self._write(scope, node)

    def _write(self, scope: str, node: Node, until_s: float | None = None) -> None:
        """Let the background thread write a node, unless too much waits for it already."""
        files, size_bytes = self._files, node.size_bytes
        if files is None:
            return
        tokens = np.concatenate([each.tokens for each in node.path()])
        name = files.name(scope, tokens, node.begin, resumable=node.snapshot is not None)
        limit_bytes = max(_PENDING_BYTES, int(_PENDING_SHARE * self.limit_bytes))
        with self._lock:
            pending_bytes = sum(self._pending.values())
        if pending_bytes + size_bytes > limit_bytes and until_s is None:
            return
        node.written = True
        keys = (*node.keys, *node.turns)
        if name in files:
            files.add_keys(name, keys)
            return
        if name in self._pending:
            return
        run = node.compute(name)
        with self._lock:
            self._pending[name] = size_bytes

        def save() -> None:
            if until_s is None or time.monotonic() < until_s:
                files.save(*run.to_host(), keys)
            run.arrays.clear()
            with self._lock:
                del self._pending[name]

        self._writer.submit(save)


def _eviction_order(leaf: Node) -> tuple[bool, int]:
    return bool(leaf.keys), leaf.used
