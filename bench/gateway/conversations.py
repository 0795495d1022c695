"""Memory and CPU time of following conversations in a gateway, and their memory in Redis.

`python -m bench.gateway.conversations` computes the digests of chats, and fills the index of a
gateway with the last turns of 200,000 conversations of 20 ends each. Redis gets the claims of the
same turns, from the code that gateways exchange them with.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from rich.progress import track

from bench.harness.options import parser
from bench.harness.parts import running_redis
from bench.harness.process_cost import resident_bytes
from bench.harness.tables import Grid, Target, provenance, report, targets
from gateway.routing.prefix_affinity import PrefixIndex
from gateway.routing.prefix_keys import PrefixEnd, PrefixHasher, PrefixKeys
from gateway.state.prefix_claims import SharedPrefixClaims
from gateway.state.redis import RedisClient
from gateway.types import Caller, Inspected, Usage
from paceline.request.profile import Endpoint, RequestProfile
from policies.sections import PrefixPolicy

CONVERSATIONS: Final = 200_000
QUICK_CONVERSATIONS: Final = 2_000
_ENDS: Final = 20
_TURNS: Final = (_ENDS // 2 - 4, _ENDS // 2)
_RULES: Final = PrefixPolicy()
_BOOTS: Final = tuple((f"mac-{number}", "boot-1") for number in range(8))
_CALLER: Final = Caller(key="k", team="lab")
_HASHER: Final = PrefixHasher(b"secret")
_RUNS: Final = 200
_SENT_AT_ONCE: Final = 500
_WORDS: Final = "the tide brings ships into the small harbour and takes them out again "


def _chat(messages: int, chars: int, system: str = "") -> list[dict[str, Any]]:
    text = (_WORDS * (chars // len(_WORDS) + 1))[:chars]
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": text} for number in range(messages)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def measure_digests() -> Iterator[tuple[str, str, str]]:
    """Yield the median CPU time of the digests of chats of several sizes."""
    for name, messages in (
        ("a question of 60 characters", _chat(1, 60)),
        ("a question of 400 characters", _chat(1, 400)),
        ("a chat of 20 messages", _chat(20, 600, _WORDS * 20)),
        ("an agent's session of 80 messages, 240 kB", _chat(80, 2900, _WORDS * 100)),
    ):
        size = sum(len(message["content"]) for message in messages)
        profile = RequestProfile(endpoint=Endpoint.CHAT, model="demo", text_chars=size)
        inspected = Inspected("demo", profile, {"messages": messages})
        times_us = []
        for _ in range(_RUNS):
            began_s = time.thread_time()
            _HASHER.prefix_keys(inspected, _CALLER, _RULES)
            times_us.append((time.thread_time() - began_s) * 1e6)
        yield name, f"{size:,}", f"{median(times_us):.1f}"


class IndexCost(NamedTuple):
    """Memory of the index, and the CPU time of one turn in it."""

    ends: int
    size_bytes: int
    turn_us: float
    kept: float
    """The share of the conversations whose next turn finds its worker."""


def _key(conversation: int, end: int) -> bytes:
    # As evenly distributed as digests; a real digest would take most of the time.
    return ((conversation * _ENDS + end) * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8)


def _turn(conversation: int, turn: int) -> PrefixKeys:
    """Return the keys of a turn: each adds the ends of an answer and of a question."""
    ends = [PrefixEnd(_key(conversation, end), 4000 * (end + 1), end + 1)
            for end in range(2 * turn + 2)]  # fmt: skip
    return PrefixKeys((*reversed(ends),), has_system=True, unscoped=ends[0].key)


def measure_index(conversations: int) -> IndexCost:
    """Send the last turns of all conversations, one turn of each at a time."""
    before_bytes, began_s, turns = resident_bytes(os.getpid()), time.process_time(), 0
    index = PrefixIndex(lambda: 1_000_000.0)
    for turn in track(range(*_TURNS), transient=True):
        for conversation in range(conversations):
            prefix, boot = _turn(conversation, turn), _BOOTS[conversation % len(_BOOTS)]
            expected = index.record_dispatch(prefix, boot, _RULES)
            usage = Usage(1000 * turn + 1000, 100, 1000 * turn)
            index.record_usage(prefix, boot, usage, expected)
            turns += 1
    turn_us = (time.process_time() - began_s) / turns * 1e6
    index.take_pending()
    size_bytes = resident_bytes(os.getpid()) - before_bytes
    found = sum(
        any(not one.is_system for one in index.cached(_turn(conversation, _ENDS // 2 - 1)).values())
        for conversation in range(conversations)
    )
    return IndexCost(len(index), size_bytes, turn_us, found / conversations)


async def measure_redis(conversations: int, folder: Path) -> int:
    """Send the claims of the last turn of each conversation; return the memory that Redis needs."""
    async with running_redis(folder) as server:
        before_bytes = int(server.client.info("memory")["used_memory"])
        client, index = RedisClient(server.url, 30.0), PrefixIndex(lambda: 1_000_000.0)
        shared = SharedPrefixClaims(client, index)
        for begin in track(range(0, conversations, _SENT_AT_ONCE), transient=True):
            for conversation in range(begin, min(begin + _SENT_AT_ONCE, conversations)):
                prefix = _turn(conversation, _ENDS // 2 - 1)
                index.record_dispatch(prefix, _BOOTS[conversation % len(_BOOTS)], _RULES)
            await shared.exchange()
        await client.close()
        return int(server.client.info("memory")["used_memory"]) - before_bytes


def main() -> None:
    options = parser("gateway.conversations", __doc__).parse_args()
    conversations = QUICK_CONVERSATIONS if options.quick else CONVERSATIONS
    digests = Grid(
        "CPU time of the digests of a request, median",
        ("request", "characters", "us"),
        [*measure_digests()],
    )
    index = measure_index(conversations)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        redis_bytes = asyncio.run(measure_redis(conversations, Path(folder)))
    index_mb, redis_mb = index.size_bytes / 1e6, redis_bytes / 1e6
    judged = (
        Target("memory of the index, MB", index_mb, 200),
        Target("memory of Redis, MB", redis_mb, 400),
        Target("share of next turns that find their worker", index.kept, 0.99, at_least=True),
    )
    figures = {
        "ends in the index": f"{index.ends:,}",
        "memory of an end, bytes": f"{index.size_bytes / max(1, index.ends):.0f}",
        "memory of the index, MB": f"{index_mb:.0f}",
        "memory of Redis, MB": f"{redis_mb:.0f}",
        "CPU time of a turn in the index, us, with this program's own": f"{index.turn_us:.0f}",
    }
    title = f"{conversations:,} conversations of {_ENDS} ends"
    costs = Grid(title, ("figure", "result"), [*figures.items()])
    about = (
        f"{provenance()}. The last four turns of each conversation pass through the index, one "
        "turn of each at a time; it keeps the last four ends and the system prompt of each. "
        "Redis has the claims of one turn of each."
    )
    grids = (targets(judged), digests, costs)
    name, title = "gateway_conversations.md", "Following conversations in a gateway"
    report(name, title, about, *grids, write=not options.quick)


if __name__ == "__main__":
    main()
