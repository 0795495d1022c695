"""The order in which open prompts are read."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from workers.engine.lane.prefill_queue import MAX_OVERTAKES, PrefillQueue


@dataclass(eq=False)
class Prompt:
    name: str
    remaining_tokens: int


class Queue(PrefillQueue):
    def __init__(self, **remaining_tokens: int) -> None:
        super().__init__()
        for name, tokens in remaining_tokens.items():
            self.put(name, tokens)

    def put(self, name: str, tokens: int, lane: str = "a") -> None:
        self.add(lane, cast("Any", Prompt(name, tokens)))

    def read(self, lane: str = "a", tokens: int = 100) -> str:
        """Read one chunk, and return the name of its prompt."""
        prompt: Any = self.next(lane, decoding=False)
        assert prompt is not None
        self.record_chunk(prompt)
        prompt.remaining_tokens -= tokens
        if prompt.remaining_tokens <= 0:
            self.remove(lane, lambda other: other is prompt)
        return str(prompt.name)


def test_a_short_prompt_overtakes_a_long_one_at_once() -> None:
    queue = Queue(long=1000)
    order = [queue.read() for _ in range(4)]
    queue.put("short", 12)
    order += [queue.read() for _ in range(7)]
    assert order == [*["long"] * 4, "short", *["long"] * 6]
    assert queue.next("a", decoding=False) is None


def test_the_long_prompt_moves_however_many_short_ones_come() -> None:
    queue = Queue(long=10_000)
    counts: Counter[str] = Counter()
    for _ in range(10 * (MAX_OVERTAKES + 2)):  # one of them has waited longer than the long one
        if len(queue.of("a")) == 1:
            queue.put("short", 12)
        counts[queue.read()] += 1
    assert counts == {"long": 10, "short": 10 * (MAX_OVERTAKES + 1)}


def test_every_one_of_several_long_prompts_moves() -> None:
    names = [f"long {number}" for number in range(5)]
    queue = Queue(**{name: 10_000 + number for number, name in enumerate(names)})
    counts = Counter(queue.read(tokens=1) for _ in range(100))
    assert set(counts) == set(names)
    assert counts["long 0"] > max(counts[name] for name in names[1:]), "it is the shortest"


def test_lanes_take_turns_by_the_length_of_their_prompts() -> None:
    queue = Queue(long=1000)
    queue.put("short", 12, lane="b")
    assert queue.next("a", decoding=False) is None
    assert [queue.read("b"), queue.read("a")] == ["short", "long"]


def test_rows_that_decode_wait_for_one_reading_at_most() -> None:
    queue = Queue()
    for lane in "ab":
        queue.put(lane, 1000, lane)
    assert queue.next("a", decoding=True) is not None
    queue.end_reading()
    assert queue.next("a", decoding=True) is None, "nothing was decoded since"
    assert queue.next("a", decoding=False) is not None, "nothing decodes"
    queue.record_decode()
    assert queue.next("a", decoding=True) is not None
