"""Prefix tree: runs of tokens with their keys and values, and the states between them.

A row that starts from a node continues exactly as if it had read the tokens on the path to it.
`state_of` copies a row's read tokens out of its caches into a tree, `Match.restore` copies it back
into the caches of another row, and `PendingRun` and `from_host` move a run between MLX and NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten

from workers.engine.model.kv_cache import KVCache, LayerCache, RowCache, capacity
from workers.engine.model.windows import FamilyWindow, WindowCache, recent_tokens, restore_window
from workers.engine.prefix.files import FileName, HostPrefix, Prefetched
from workers.engine.prefix.kv_quantization import KeysValues, dequantize, quantize, quantized_bytes

TokenArray: TypeAlias = npt.NDArray[np.int64]
"""Tokens as the cache compares them; those of a picture are digests of it."""


class RowState(NamedTuple):
    """Caches of one row; the arrays may hold more tokens, and may be computed later."""

    attention: Sequence[KeysValues]
    recurrent: Sequence[Sequence[mx.array | None]] | None
    """None if only keys and values are known."""
    head: Sequence[KeysValues] = ()
    """Of the MTP head: one token less. Empty if it has not read all tokens."""
    last_hidden: mx.array | None = None
    """[1, 1, width] of the last token, which the head reads together with the next one."""
    begin: int = 0
    """Number of tokens before those of the arrays."""
    windows: Sequence[KeysValues] = ()
    """Of windowed layers: the last tokens that a layer may still see, and no others."""
    quantized: bool = False
    """Whether copies of keys and values have 8 bits."""

    @property
    def cuttable(self) -> bool:
        """Return whether a row can start at any token: no part has a separate end."""
        return not (self.recurrent or self.windows or self.head)

    def copy_bytes(self, begin: int, end: int) -> int:
        """Return the size of a copy of these tokens, which is known before it is made."""
        size = quantized_bytes if self.quantized else _size_bytes
        run_bytes = sum(
            size(layer) * (end - begin) // max(layer[0].shape[2], 1)
            for layer in (*self.attention, *self.head)
        )
        return run_bytes + _size_bytes((self.recurrent or (), self.last_hidden, self.windows))

    def copies(self, layers: Sequence[KeysValues], begin: int, end: int) -> list[KeysValues]:
        """Return a copy of these tokens in some of the layers."""
        copies = _copies(layers, begin, end)
        return quantize(copies) if self.quantized else copies


def state_of(
    caches: Sequence[LayerCache],
    head_caches: Sequence[KVCache | RowCache],
    last_hidden: mx.array | None,
    row: int = 0,
    end: int = 0,
) -> RowState:
    """Return the state of one row, given its caches, or those of its batch after `end` tokens."""
    one = slice(row, row + 1)
    attention, recurrent, windows = [], [], []
    for cache in caches:
        if isinstance(cache, WindowCache):
            windows.append(cache.recent_tokens(row, end))
        elif isinstance(cache, FamilyWindow):
            windows.append(recent_tokens(cache))
        elif isinstance(cache, KVCache | RowCache):
            attention.append(_keys_values(cache, one))
        else:
            recurrent.append([None if array is None else array[one] for array in cache.state])
    head = [_keys_values(c, one) for c in head_caches if not c.empty()]
    return RowState(attention, recurrent, head, last_hidden, windows=windows)


class Snapshot(NamedTuple):
    """State after a token that keys and values do not contain."""

    recurrent: Sequence[Sequence[mx.array | None]]
    last_hidden: mx.array | None
    windows: Sequence[KeysValues]

    @property
    def size_bytes(self) -> int:
        """Return the size of all arrays."""
        return _size_bytes(self)


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A run of tokens after those of its parent; the root of a tree has none.

    The device copies arrays into a node while the host continues.
    """

    tokens: TokenArray
    end: int
    """Number of tokens from the beginning to the end of this run."""
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    """By the first token of their run."""
    attention: Sequence[KeysValues] = ()
    head: Sequence[KeysValues] = ()
    snapshot: Snapshot | None = None
    keys: set[str] = field(default_factory=set)
    """Keys of the system prompts that end here."""
    turns: dict[str, int] = field(default_factory=dict)
    """Keys of conversations, and the number of tokens up to the ends that they name."""
    used: int = 0
    """Time of the last use, in uses of the cache."""
    written: bool = False
    """Whether a file has been written, as far as memory knows."""

    @property
    def begin(self) -> int:
        """Return the number of tokens before this run."""
        return self.end - len(self.tokens)

    @property
    def size_bytes(self) -> int:
        """Return the size of all arrays."""
        return _size_bytes((self.attention, self.head, self.snapshot or ()))

    @property
    def token_bytes(self) -> int:
        """Return the size of the keys and values of one token."""
        return _size_bytes((self.attention, self.head)) // len(self.tokens)

    # --- reading ----------------------------------------------------------------------------------

    def path(self) -> list[Node]:
        """Return the nodes from the first run to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """Yield all nodes that come after this one."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node

    def walk(self, tokens: TokenArray) -> Iterator[tuple[Node, int]]:
        """Yield the next nodes that begin like the rest of `tokens`, and for how many tokens."""
        node, at = self, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                return
            node, common = child, common_length(child.tokens, tokens[at:])
            yield node, common
            if common < len(node.tokens):
                return
            at += common

    def snapshot_distance(self) -> int:
        """Return the tokens from the snapshot before this node to the farthest of the next ones."""
        before = self.parent
        while before is not None and before.parent is not None and not before.snapshot:
            before = before.parent
        farthest, nodes = self.end, list(self.children.values())
        while nodes:
            child = nodes.pop()
            farthest = max(farthest, child.end)  # beyond each before it
            nodes += () if child.snapshot else child.children.values()
        return farthest - (before.end if before is not None else 0)

    def part(self, begin: int, end: int) -> Node:
        """Return a copy of the tokens from `begin` to `end`, without a parent and a snapshot."""
        first, last = begin - self.begin, end - self.begin
        pairs = (_pairs(at) - _pairs(self.begin) for at in (begin, end))
        return Node(
            tokens=self.tokens[first:last],
            end=end,
            attention=_copies(self.attention, first, last),
            head=_copies(self.head, *pairs),
        )

    def compute(self, name: FileName) -> PendingRun:
        """Compute all arrays; return them under the name of their file."""
        tree: dict[str, Any] = {"attention": self.attention, "head": self.head}
        if self.snapshot is not None:
            tree |= zip(("recurrent", "hidden", "window"), self.snapshot, strict=True)
        arrays = {key: array for key, array in tree_flatten(tree) if array is not None}
        bfloat16 = frozenset(key for key, array in arrays.items() if array.dtype == mx.bfloat16)
        arrays |= {key: arrays[key].view(mx.uint16) for key in bfloat16}
        mx.eval(arrays)
        return PendingRun(name, self.tokens, arrays, bfloat16)

    # --- growing ----------------------------------------------------------------------------------

    def add_child(self, tokens: TokenArray, state: RowState) -> Node:
        """Add the run of `tokens`, with a copy of their keys and values; return the new node."""
        begin, end = self.end, self.end + len(tokens)
        first = _pairs(state.begin)
        node = Node(
            tokens=tokens.copy(),
            end=end,
            parent=self,
            attention=state.copies(state.attention, begin - state.begin, end - state.begin),
            head=state.copies(state.head, _pairs(begin) - first, _pairs(end) - first),
        )
        self.children[int(tokens[0])] = node
        mx.async_eval(node.attention, node.head)
        return node

    def add_snapshot(self, state: RowState) -> int:
        """Copy the state after the last token, unless the node has as much; return the bytes."""
        found = self.snapshot
        if state.recurrent is None:
            return 0
        if found is not None and (found.last_hidden is not None or not state.head):
            return 0
        self.snapshot = Snapshot(
            [[_copy(array) for array in arrays] for arrays in state.recurrent],
            _copy(state.last_hidden if state.head else None),
            [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in state.windows],
        )
        self.written = False
        mx.async_eval(*self.snapshot)
        return self.snapshot.size_bytes - (found.size_bytes if found is not None else 0)

    def drop_snapshot(self) -> int:
        """Drop the snapshot; return its bytes."""
        dropped, self.snapshot = self.snapshot, None
        return dropped.size_bytes if dropped is not None else 0

    def add_head(self, state: RowState) -> int:
        """Copy the head's part if a row that did not draft left none; return the bytes."""
        if not state.head or self.head or self.begin < state.begin:
            return 0
        pairs = (_pairs(at) - _pairs(state.begin) for at in (self.begin, self.end))
        self.head = state.copies(state.head, *pairs)
        mx.async_eval(self.head)
        return _size_bytes(self.head)

    def split(self, length: int) -> Node:
        """Split a run in two of the same size; return the new node, with its first tokens."""
        assert self.parent is not None
        begin, middle = self.begin, self.begin + length
        head_length = _pairs(middle) - _pairs(begin)
        upper = self.part(begin, middle)
        upper.parent, upper.used = self.parent, self.used
        upper.children[int(self.tokens[length])] = self
        for key, end in list(self.turns.items()):
            if end <= middle:
                upper.turns[key] = self.turns.pop(key)
        self.parent.children[int(self.tokens[0])] = upper
        self.parent = upper
        self.tokens = self.tokens[length:]
        self.attention = _copies(self.attention, length, None)
        self.head = _copies(self.head, head_length, None)
        mx.async_eval(upper.attention, upper.head, self.attention, self.head)
        return upper


@dataclass(frozen=True, slots=True)
class Match:
    """Nodes from which a row can start."""

    nodes: Sequence[Node]
    tokens: int
    """Tokens that the row need not read; the last node may have more."""
    snapshot: Snapshot | None

    def restore(
        self, caches: Sequence[LayerCache], head_caches: Sequence[KVCache], slots: int
    ) -> None:
        """Fill empty caches of one row that is going to have `slots` tokens."""
        attention = [cache for cache in caches if isinstance(cache, KVCache)]
        windows = [cache for cache in caches if isinstance(cache, FamilyWindow)]
        others = [cache for cache in caches if not isinstance(cache, KVCache | FamilyWindow)]
        for layer, cache in enumerate(attention):
            _fill(cache, [node.attention[layer] for node in self.nodes], self.tokens, slots)
        for layer, cache in enumerate(head_caches):
            _fill(cache, [node.head[layer] for node in self.nodes], self.tokens - 1, slots)
        if self.snapshot is not None:
            for recurrent, arrays in zip(others, self.snapshot.recurrent, strict=True):
                recurrent.state = list(arrays)
            for window, (keys, values) in zip(windows, self.snapshot.windows, strict=True):
                restore_window(window, keys, values, self.tokens)


class PendingRun(NamedTuple):
    """A run that MLX has computed, and that any thread may copy out of it."""

    name: FileName
    tokens: TokenArray
    arrays: dict[str, mx.array]
    """By name; those in bfloat16, which NumPy lacks, as bits."""
    bfloat16: frozenset[str]

    def to_host(self) -> Prefetched:
        """Copy the run out of MLX; safe from any thread."""
        host = {name: np.array(array) for name, array in self.arrays.items()}
        return self.name, HostPrefix(arrays={"tokens": self.tokens, **host}, bfloat16=self.bfloat16)


def from_host(name: FileName, host: HostPrefix) -> tuple[TokenArray, RowState]:
    """Copy a run back into MLX; raise any error if it is invalid."""
    arrays = {key: mx.array(values) for key, values in host.arrays.items() if key != "tokens"}
    arrays |= {key: arrays[key].view(mx.bfloat16) for key in host.bfloat16}
    tree = tree_unflatten(arrays)
    state = RowState(
        [tuple(layer) for layer in tree["attention"]],
        tree.get("recurrent", ()) if name.resumable else None,
        [tuple(layer) for layer in tree.get("head", ())],
        tree.get("hidden"),
        begin=name.begin,
        windows=[(keys, values) for keys, values in tree.get("window", ())],
    )
    return host.arrays["tokens"].astype(np.int64), state


def common_length(first: TokenArray, second: TokenArray) -> int:
    """Return the length of the common beginning."""
    length = min(len(first), len(second))
    differences = np.flatnonzero(first[:length] != second[:length])
    return int(differences[0]) if differences.size else length


def _keys_values(cache: KVCache | RowCache, row: slice) -> KeysValues:
    return cache.keys[row], cache.values[row]


def _pairs(tokens: int) -> int:
    """Return how many tokens the head has read: each together with the next one."""
    return max(tokens - 1, 0)


def _fill(cache: KVCache, runs: Sequence[KeysValues], tokens: int, slots: int) -> None:
    """Join runs in a cache, with room for the tokens that follow: one copy."""
    joined = []
    for parts in zip(*runs, strict=True):
        arrays, room = [], capacity(slots)
        for array in parts:
            kept = min(array.shape[2], tokens - (capacity(slots) - room))
            arrays.append(array if kept == array.shape[2] else array[:, :, :kept])
            room -= kept
        shape = (*parts[0].shape[:2], room, parts[0].shape[3])
        joined.append(mx.concatenate([*arrays, mx.zeros(shape, parts[0].dtype)], axis=2))
    cache.keys, cache.values = dequantize(joined)
    cache.offset = tokens


def _copies(layers: Sequence[KeysValues], begin: int, end: int | None) -> list[KeysValues]:
    return [tuple(mx.contiguous(array[:, :, begin:end]) for array in layer) for layer in layers]


def _copy(array: mx.array | None) -> mx.array | None:
    """Return a copy that keeps no other memory alive, as a view of a larger array would."""
    return None if array is None else mx.contiguous(array)


def _size_bytes(tree: object) -> int:
    return sum(array.nbytes for _, array in tree_flatten(tree) if array is not None)
