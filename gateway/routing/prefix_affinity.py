"""Prefix affinity: which workers have cached the beginnings of which prompts.

A worker caches each prompt that it has read, and answers the next turn of a conversation, or the
next request with the same system prompt, much sooner. A claim records a cached prompt: it is made
when a request is sent, confirmed or dropped by the `cached_tokens` of its response and by the
worker's reports, and void after the worker's boot. It lasts as long as reports confirm it, and a
time beyond that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from struct import Struct
from typing import NamedTuple

from gateway.routing.prefix_keys import KEY_BYTES, MAX_PROMPT_ENDS, PrefixEnd, PrefixKeys
from gateway.routing.view import CachedPrefix
from gateway.types import Usage, WorkerBoot
from paceline.protocol import WorkerReport
from policies.sections import PrefixPolicy

MAX_ENDS = 1_000_000
"""Claimed ends of prompts: four turns and the system prompt of 200,000 conversations."""
MAX_PENDING_CLAIMS = 2_000
_MAX_REPORTED_BOOTS = 256
# After so many boots all claims are forgotten once, so that a boot has a number of two bytes.
_MAX_BOOTS = 4096
_NO_KEYS: frozenset[str] = frozenset()
_BYTES_PER_TOKEN = 4
_NEGLIGIBLE_TOKENS = 256
_EVICTED = 2**32 - 1
"""In place of tokens: the worker has had this end and has it no more."""
_MAX_SCOPES = 10_000
# Messages whose number a reason names.
_NAMED_MESSAGES = 32
# Between the end of a prompt and that of its next turn are its answer and a new message.
_ENDS_PER_TURN = 2
OTHER_MAC = "other Mac"
EVICTED = "evicted"
ISOLATED = "isolated"


class PrefixClaim(NamedTuple):
    """A claim as gateways exchange it; a `ttl_s` of 0 withdraws it."""

    ends: tuple[tuple[str, int], ...]
    """Keys, longest last, and the tokens that the worker has up to there; 0 if unknown."""
    worker_id: str
    boot_id: str
    ttl_s: float


class ExpectedReuse(NamedTuple):
    """The index's expectation for a request when it was sent."""

    tokens: int = 0
    """Tokens that the chosen worker had cached, as it counted them; 0 if unknown."""
    kept: int = 0
    """Number of claimed ends, the shortest ones, that the worker already had."""
    missed: str = ""
    """Why it had not all earlier turns; empty if it had, or if no worker is known to have them."""
    holders: tuple[tuple[WorkerBoot, int], ...] = ()
    """Other workers that had more, and the tokens of each, the most first."""


NOTHING_EXPECTED = ExpectedReuse()


class _Claims:
    """Claims by the key of an end: at most `MAX_ENDS`, the most recently used ones.

    One value of bytes for each end, and many small maps: a map of a million entries would stop the
    event loop for 50 ms whenever it grows.
    """

    _SHARDS = 256
    _EVICTED_AT_ONCE = 32
    _CLAIM = Struct("<HId")
    """Number of the boot, tokens up to the end, and the time at which the claim ends."""

    def __init__(self) -> None:
        self._shards: tuple[dict[bytes, bytes], ...] = tuple({} for _ in range(self._SHARDS))

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()

    def get(self, key: bytes) -> Iterable[tuple[int, int, float]]:
        """Return the claims of an end, those made last at the end."""
        packed = self._shards[key[0]].get(key)
        return () if packed is None else self._CLAIM.iter_unpack(packed)

    def set(self, key: bytes, claims: Iterable[tuple[int, int, float]]) -> None:
        shard = self._shards[key[0]]
        shard.pop(key, None)  # a key that is set again is the last used one
        packed = b"".join([self._CLAIM.pack(*claim) for claim in claims])
        if not packed:
            return
        shard[key] = packed
        if len(shard) > MAX_ENDS // self._SHARDS:
            for oldest in list(islice(shard, self._EVICTED_AT_ONCE)):
                del shard[oldest]


class PrefixIndex:
    """Claims of workers to beginnings of prompts. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._claims = _Claims()
        self._boots: dict[WorkerBoot, int] = {}
        self._boots_by_number: list[WorkerBoot] = []
        self._scopes: dict[bytes, bytes] = {}
        """Key of each system prompt in the isolation scope that used it last."""
        self._rules = PrefixPolicy()
        """Rules of the policy of the last request."""
        self._reported: OrderedDict[WorkerBoot, tuple[frozenset[str], frozenset[str]]] = (
            OrderedDict()
        )
        """Cached and evicted keys in the last report of each boot."""
        self._pending: dict[tuple[str, str, str], PrefixClaim] = {}

    def __len__(self) -> int:
        """Return the number of ends with claims."""
        return len(self._claims)

    def cached(self, prefix: PrefixKeys) -> dict[WorkerBoot, CachedPrefix]:
        """Return the longest beginning of a prompt that each boot has cached."""
        now_s, boots = self._clock(), self._boots_by_number
        found: dict[WorkerBoot, CachedPrefix] = {}
        for end in prefix.ends:
            for number, tokens, until_s in self._claims.get(end.key):
                if until_s <= now_s or tokens == _EVICTED or (boot := boots[number]) in found:
                    continue
                estimate = end.size_bytes // _BYTES_PER_TOKEN
                found[boot] = CachedPrefix(
                    tokens or estimate, end, prefix.is_system(end), bool(tokens)
                )
        return found

    def record_dispatch(
        self, prefix: PrefixKeys, boot: WorkerBoot, rules: PrefixPolicy
    ) -> ExpectedReuse:
        """Claim a prompt for the worker that is about to read it; return its cached part."""
        self._rules = rules
        ends = prefix.claimed
        if not rules.max_workers:
            for end in ends:
                self._claims.set(end.key, ())
            return NOTHING_EXPECTED
        number = self._number(boot)
        expected = self._expect(prefix, boot)
        until_s = self._clock() + rules.ttl_s
        claimed = [
            (end.key.hex(), self._claim(end.key, number, 0, until_s)) for end in reversed(ends)
        ]
        self._publish(PrefixClaim(tuple(claimed), *boot, rules.ttl_s))
        return expected

    def record_usage(
        self, prefix: PrefixKeys, boot: WorkerBoot, usage: Usage | None, expected: ExpectedReuse
    ) -> str:
        """Confirm or drop the claims of a request by the usage of its response, None without one.

        Returns why the worker read earlier turns again; empty if it did not.
        """
        ends = prefix.claimed
        if usage is None:  # the worker may not have read the prompt
            self._withdraw(ends[: len(ends) - expected.kept], boot)
            return ""
        if not usage.cached_known:
            return expected.missed
        cached = usage.cached_tokens
        if expected.kept and (not cached or _is_far_less(cached, expected.tokens)):
            # It keeps less than it reads, so it will not keep this prompt either.
            kept_bytes = cached * _BYTES_PER_TOKEN
            lost = [end for end in prefix.ends if end.size_bytes > kept_bytes]
            self._withdraw(lost, boot, _EVICTED)
            return EVICTED
        self._learn(ends[0], boot, usage.prompt_tokens)
        if cached and expected.kept:
            self._learn(ends[len(ends) - expected.kept], boot, cached)
        moved = cached and expected.holders and not _is_far_less(cached, expected.holders[0][1])
        return "" if moved else expected.missed

    def record_report(self, report: WorkerReport) -> None:
        """Add and drop claims as a worker has cached and evicted since its last report.

        All gateways receive each report, so these claims are not exchanged.
        """
        boot = (report.worker_id, report.boot_id)
        before, evicted_before = self._reported.get(boot, (_NO_KEYS, _NO_KEYS))
        now, evicted = frozenset(report.prefixes), frozenset(report.evicted_prefixes)
        if not self._rules.max_workers:
            return
        number, until_s = self._number(boot), self._clock() + self._rules.ttl_s
        for key in (*report.prefixes, *report.held_prefixes):
            if (raw := _parse_key(key)) is not None and self._needs_claim(raw, number, until_s):
                self._claim(raw, number, 0, until_s)
        if (now, evicted) == (before, evicted_before):
            return
        for key in now - before:
            if (raw := _parse_key(key)) is not None:
                self._claim(raw, number, 0, until_s)
        for key in evicted - evicted_before - now:
            if (raw := _parse_key(key)) is not None:
                self._change(raw, number, _EVICTED)
        self._reported[boot] = now, evicted
        self._reported.move_to_end(boot)
        if len(self._reported) > _MAX_REPORTED_BOOTS:
            self._reported.popitem(last=False)

    def _needs_claim(self, key: bytes, number: int, until_s: float) -> bool:
        """Return whether a confirmed claim is missing, or ends soon.

        A claim that a response has disproved is not made again before its time has ended.
        """
        now_s, others = self._clock(), 0
        for other, tokens, other_until_s in self._claims.get(key):
            if other == number and other_until_s > now_s:
                ends_soon = other_until_s < until_s - self._rules.ttl_s / 2
                return tokens != _EVICTED and ends_soon
            others += other != number and other_until_s > now_s
        return others < self._rules.max_workers

    def take_pending(self) -> tuple[PrefixClaim, ...]:
        """Return the latest claims that other gateways have not received."""
        pending, self._pending = tuple(self._pending.values()), {}
        return pending

    def merge(self, claim: PrefixClaim, age_s: float) -> None:
        """Apply a claim that another gateway made `age_s` ago."""
        if 0 < claim.ttl_s <= age_s:
            return
        number = self._number((claim.worker_id, claim.boot_id))
        until_s = self._clock() + claim.ttl_s - age_s
        for key, tokens in claim.ends[:MAX_PROMPT_ENDS]:
            if (raw := _parse_key(key)) is None:
                continue
            if claim.ttl_s:
                self._claim(raw, number, min(max(tokens, 0), _EVICTED - 1), until_s)
            else:
                self._change(raw, number, None)

    def _expect(self, prefix: PrefixKeys, boot: WorkerBoot) -> ExpectedReuse:
        """Return the cached part of a prompt at a worker, and why it is not longer."""
        cached = self.cached(prefix)
        own = cached.get(boot)
        own_bytes = own.end.size_bytes if own else 0
        longer = [item for item in cached.items() if item[1].end.size_bytes > own_bytes]
        holders = sorted(longer, key=lambda item: -item[1].end.size_bytes)
        missed = ""
        if self._is_isolated(prefix) and not cached:
            missed = ISOLATED
        elif holders:
            missed = OTHER_MAC
        elif self._has_evicted(prefix, own_bytes):
            missed = EVICTED
        elif own is not None and not own.is_system:
            missed = _difference(prefix, own.end)
        kept = sum(end.size_bytes <= own_bytes for end in prefix.claimed)
        return ExpectedReuse(
            own.tokens if own and own.measured else 0,
            kept,
            missed,
            tuple([(holder, found.tokens) for holder, found in holders]),
        )

    def _has_evicted(self, prefix: PrefixKeys, beyond_bytes: int) -> bool:
        """Return whether a worker has reported the eviction of a longer end than this."""
        now_s = self._clock()
        return any(
            tokens == _EVICTED and until_s > now_s
            for end in prefix.claimed
            if end.size_bytes > beyond_bytes
            for _, tokens, until_s in self._claims.get(end.key)
        )

    def _is_isolated(self, prefix: PrefixKeys) -> bool:
        """Return whether another isolation scope was the last to use this system prompt."""
        if not prefix.has_system:
            return False
        key = prefix.ends[-1].key
        before = self._scopes.pop(prefix.unscoped, key)
        self._scopes[prefix.unscoped] = key
        if len(self._scopes) > _MAX_SCOPES:
            for oldest in list(islice(self._scopes, _MAX_SCOPES // 100)):
                del self._scopes[oldest]
        return before != key

    def _number(self, boot: WorkerBoot) -> int:
        number = self._boots.get(boot)
        if number is None:
            if len(self._boots) == _MAX_BOOTS:
                self._claims.clear()
                self._boots.clear()
                self._boots_by_number.clear()
            number = self._boots[boot] = len(self._boots)
            self._boots_by_number.append(boot)
        return number

    def _publish(self, claim: PrefixClaim) -> None:
        key = (claim.ends[-1][0], claim.worker_id, claim.boot_id)
        self._pending.pop(key, None)
        self._pending[key] = claim
        if len(self._pending) > MAX_PENDING_CLAIMS:  # no exchange takes place
            del self._pending[next(iter(self._pending))]

    def _claim(self, key: bytes, number: int, tokens: int, until_s: float) -> int:
        """Claim one end, and return the tokens up to there; 0 if unknown."""
        now_s, others = self._clock(), []
        for other, known, other_until_s in self._claims.get(key):
            if other != number and other_until_s > now_s:
                others.append((other, known, other_until_s))
            elif other == number and not tokens and known != _EVICTED:
                tokens = known
        if len(others) >= self._rules.max_workers:  # who has it no more goes first
            others.sort(key=lambda claim: claim[1] != _EVICTED)
            del others[: len(others) - self._rules.max_workers + 1]
        others.append((number, tokens, until_s))
        self._claims.set(key, others)
        return tokens

    def _withdraw(
        self, ends: Sequence[PrefixEnd], boot: WorkerBoot, left: int | None = None
    ) -> None:
        """Drop claims, here and at other gateways; `left` stays here in their place."""
        number = self._number(boot)
        dropped = [end.key.hex() for end in reversed(ends) if self._change(end.key, number, left)]
        if dropped:
            self._publish(PrefixClaim(tuple([(key, 0) for key in dropped]), *boot, 0.0))

    def _learn(self, end: PrefixEnd, boot: WorkerBoot, tokens: int) -> None:
        self._change(end.key, self._number(boot), min(tokens, _EVICTED - 1))

    def _change(self, key: bytes, number: int, tokens: int | None) -> bool:
        """Set the tokens of a claim, or drop it without any; return whether there was one."""
        claims = tuple(self._claims.get(key))
        if all(claim[0] != number for claim in claims):
            return False
        changed = [(one, tokens if one == number else old, s) for one, old, s in claims]
        self._claims.set(key, [(one, left, s) for one, left, s in changed if left is not None])
        return True


def _is_far_less(cached: int, expected: int) -> bool:
    """Return whether a worker had so much less cached that it must have evicted the rest."""
    return 2 * cached < expected and expected - cached > _NEGLIGIBLE_TOKENS


def _difference(prefix: PrefixKeys, known: PrefixEnd) -> str:
    """Return where a conversation differs from the turns that are known; empty if it goes on."""
    turns = prefix.ends[:-1] if prefix.has_system else prefix.ends
    if known in turns[: _ENDS_PER_TURN + 1] or not known.messages:
        return ""
    if known.messages >= _NAMED_MESSAGES:
        return f"changed after message {_NAMED_MESSAGES}"
    return f"changed at message {known.messages + 1}"


def _parse_key(text: str) -> bytes | None:
    """Parse a key; None for one of another version of Paceline."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
