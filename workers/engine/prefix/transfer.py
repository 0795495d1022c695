"""Prefix transfer: the question for nodes of another worker, and the checks of its answer.

This is the one way in which nodes travel. A worker that is about to read a prompt sends a
`PrefixQuery` to a `PrefixSource`, which offers the runs of tokens that continue its beginning.
Nothing of an answer is trusted: each run must continue the one before it, hold the tokens of the
prompt, and have the arrays of the worker's own model. A digest of these arrays, of the weights and
of the preprocessing of pictures names the model. Pure: no clock is read, and no socket.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from workers.engine.prefix.files import HostPrefix, Prefetched

RUN_BYTES = 8 << 20
"""A run on its way: the engine thread copies one between two steps."""
MAX_TRANSFERS = 4
"""Transfers of a worker at a time, in each direction."""
MAX_TRANSFER_S = 60.0
"""Time after which both sides end a transfer."""
_PACE_DECAY = 0.5
"""Weight of the past transfers against one more."""
_PACE_TTL_S = 60.0
"""Age at which the pace of a source is measured anew."""

FailureReason = Literal["absent", "busy", "other_model", "slower", "too_large", "failed"]
"""Why no node came: the source has none, has too many transfers, or serves another model; reading
is faster; the cache has no room; or the source broke off, or sent something else."""


class TransferFailed(Exception):
    """No node comes from this source, or no further one; the message is for the log."""

    def __init__(self, reason: FailureReason, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixQuery:
    """A question for the nodes that a prompt begins with."""

    model: str
    """Digest of the asking worker's model, as `model_digest` computes it."""
    scope: str
    """Isolation scope of the prompt: no other scope's nodes are an answer."""
    tokens: npt.NDArray[np.int64]
    """The prompt as the prefix cache compares it."""
    known: int
    """Tokens whose keys and values the asking worker has."""
    with_head: bool
    """Whether the row drafts, so that it needs the part of the MTP head where there is one."""
    run_bytes: int
    """About the size of the runs that the asking worker takes, without snapshots."""
    run_limit_bytes: int = 0
    """The most that a run may have with its snapshot; only for the asking side."""


class PrefixOffer(NamedTuple):
    """The part of a prompt that a source has."""

    tokens: int
    """Tokens that the asking worker need not read once it has all runs."""
    runs: AsyncIterator[Prefetched]
    """Runs in order; the first begins at the known tokens, or before them."""


class PrefixSource(Protocol):
    """A worker that may have read the beginning of a prompt."""

    @property
    def name(self) -> str:
        """Name of the source for the log and for its measured pace."""

    @property
    def tokens(self) -> int:
        """Tokens that it is believed to have."""

    def open(self, query: PrefixQuery) -> AbstractAsyncContextManager[PrefixOffer]:
        """Ask for nodes; raise `TransferFailed` if there are none.

        The end of the context ends the transfer, complete or not.
        """


class ArrayLayout(NamedTuple):
    """Shape and type of an array of a node."""

    shape: tuple[int, ...]
    """The size of the token axis is 0 where it is the number of tokens, and the most that it can be
    where a windowed layer has only the last tokens."""
    dtype: str


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Arrays of a model's nodes by name, which expose a node of another model."""

    arrays: Mapping[str, ArrayLayout]

    @classmethod
    def of(cls, node: HostPrefix, windows: Sequence[int] = ()) -> Self:
        """Return the layout of a node with a snapshot; `windows` are those of the windowed layers.

        Such a layer's arrays are named `window.` and its number.
        """
        arrays = {name: _layout(name, node) for name in node.arrays if name != "tokens"}
        for name, (shape, dtype) in arrays.items():
            if name.startswith("window."):
                tokens = windows[int(name.split(".")[1])]
                arrays[name] = ArrayLayout((*shape[:2], tokens, *shape[3:]), dtype)
        return cls(arrays)

    @property
    def has_head(self) -> bool:
        """Return whether the nodes have a part for an MTP head."""
        return any(name.startswith("head.") for name in self.arrays)

    def size_bytes(self, tokens: int) -> int:
        """Return the most bytes that the arrays of this many tokens and a snapshot may have."""
        return sum(
            _size(array) * (tokens if has_token_axis(name) else 1)
            for name, array in self.arrays.items()
        )

    def check(self, run: Prefetched, query: PrefixQuery, at: int) -> None:
        """Raise `TransferFailed` unless a run continues the first `at` tokens, for this model."""
        name, node = run
        if not (name.begin == at or name.begin < at == query.known) or name.end < at:
            raise TransferFailed("failed", "a run does not continue the one before")
        expected = query.tokens[name.begin : name.end]
        tokens = node.arrays.get("tokens")
        if tokens is None or not np.array_equal(tokens, expected) or not len(expected):
            raise TransferFailed("failed", "a run has other tokens")
        found = {key: _layout(key, node) for key in node.arrays if key != "tokens"}
        if any(self._expected(key, name.end) != layout for key, layout in found.items()):
            raise TransferFailed("failed", "a run has arrays of another model")
        required = [key for key in self.arrays if key.startswith("attention.")]
        if any(key.startswith("head.") for key in found):
            required += [key for key in self.arrays if key.startswith("head.")]
        if name.resumable:
            required += [key for key in self.arrays if key.startswith(("recurrent.", "window."))]
        elif any(not has_token_axis(key) for key in found):
            raise TransferFailed("failed", "a run has a snapshot unasked")
        if not found.keys() >= set(required):
            raise TransferFailed("failed", "a run lacks arrays")
        pairs = max(name.end - 1, 0) - max(name.begin - 1, 0)
        lengths = {"attention": len(expected), "head": pairs}
        for key, array in node.arrays.items():
            if has_token_axis(key) and array.shape[2] != lengths[key.partition(".")[0]]:
                raise TransferFailed("failed", "a run has arrays of another length")

    def _expected(self, name: str, tokens: int) -> ArrayLayout | None:
        """Return the layout of an array at the end of this many tokens; None if it is empty."""
        layout = self.arrays.get(name)
        if layout is None or not name.startswith("window."):
            return layout
        shape = (*layout.shape[:2], min(layout.shape[2], tokens), *layout.shape[3:])
        return ArrayLayout(shape, layout.dtype)

    def model_digest(self, fingerprint: str) -> str:
        """Return the name of a model: its weights, and the layout of its caches."""
        layout = sorted((name, *array) for name, array in self.arrays.items())
        return blake2b(f"{fingerprint}\0{layout}".encode(), digest_size=16).hexdigest()


class TransferPace:
    """Measured throughput of transfers by source; the caller passes the time."""

    def __init__(self) -> None:
        self._measured: dict[str, tuple[float, float, float]] = {}
        """Bytes, seconds, and the time of the last transfer."""

    def record(self, source: str, size_bytes: int, duration_s: float, now_s: float) -> None:
        """Record a transfer, or the part of it before it was ended."""
        sent_bytes, spent_s, _ = self._measured.pop(source, (0.0, 0.0, now_s))
        sent_bytes, spent_s = _PACE_DECAY * sent_bytes, _PACE_DECAY * spent_s
        self._measured[source] = sent_bytes + size_bytes, spent_s + duration_s, now_s
        for name in list(self._measured)[: -4 * MAX_TRANSFERS]:
            del self._measured[name]

    def estimate_s(self, source: str, size_bytes: int, now_s: float) -> float | None:
        """Estimate the time of a transfer; None without a recent measurement."""
        sent_bytes, duration_s, measured_s = self._measured.get(source, (0.0, 0.0, 0.0))
        if not duration_s or now_s - measured_s > _PACE_TTL_S:
            return None
        return size_bytes * duration_s / max(sent_bytes, 1.0)


def has_token_axis(name: str) -> bool:
    """Return whether the third axis of an array is that of the tokens."""
    return name.startswith(("attention.", "head."))


def _layout(name: str, node: HostPrefix) -> ArrayLayout:
    array = node.arrays[name]
    shape = array.shape
    if has_token_axis(name) and array.ndim == 4:
        shape = (*shape[:2], 0, shape[3])
    return ArrayLayout(shape, "bfloat16" if name in node.bfloat16 else str(array.dtype))


def _size(array: ArrayLayout) -> int:
    """Return the bytes of an array, or of each of its tokens."""
    width = 2 if array.dtype == "bfloat16" else np.dtype(array.dtype).itemsize
    return int(np.prod([size or 1 for size in array.shape])) * width
