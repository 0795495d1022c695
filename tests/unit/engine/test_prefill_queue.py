"""The order in which open prompts are read."""

from collections import Counter
from dataclasses import dataclass

from workers.engine.prefill_queue import MAX_OVERTAKES, PrefillQueue


@dataclass(eq=False)
class Prompt:
    name: str
    remaining_tokens: int


def read(queue: PrefillQueue[Prompt], lane: str = "a", tokens: int = 100) -> str:
    """Read one chunk, and return the name of its prompt."""
    prompt = queue.next(lane, ())
    assert prompt is not None
    queue.record_chunk(prompt)
    prompt.remaining_tokens -= tokens
    if prompt.remaining_tokens <= 0:
        queue.remove(lane, lambda other: other is prompt)
    return prompt.name


def test_a_short_prompt_overtakes_a_long_one_at_once() -> None:
    queue: PrefillQueue[Prompt] = PrefillQueue()
    queue.add("a", Prompt("long", 1000))
    order = [read(queue) for _ in range(4)]
    queue.add("a", Prompt("short", 12))
    order += [read(queue) for _ in range(7)]

    assert order == [*["long"] * 4, "short", *["long"] * 6]
    assert queue.next("a", ()) is None


def test_the_long_prompt_moves_however_many_short_ones_come() -> None:
    queue: PrefillQueue[Prompt] = PrefillQueue()
    queue.add("a", Prompt("long", 1000))
    counts: Counter[str] = Counter()
    for _ in range(10 * (MAX_OVERTAKES + 2)):  # one of them has waited longer than the long one
        if len(queue.of("a")) == 1:
            queue.add("a", Prompt("short", 12))
        counts[read(queue)] += 1

    assert counts == {"long": 10, "short": 10 * (MAX_OVERTAKES + 1)}


def test_every_one_of_several_long_prompts_moves() -> None:
    queue: PrefillQueue[Prompt] = PrefillQueue()
    names = [f"long {number}" for number in range(5)]
    for number, name in enumerate(names):
        queue.add("a", Prompt(name, 10_000 + number))
    counts = Counter(read(queue, tokens=1) for _ in range(100))

    assert set(counts) == set(names)
    assert counts["long 0"] > max(counts[name] for name in names[1:]), "it is the shortest"


def test_lanes_take_turns_by_the_length_of_their_prompts() -> None:
    queue: PrefillQueue[Prompt] = PrefillQueue()
    queue.add("a", Prompt("long", 1000))
    queue.add("b", Prompt("short", 12))

    assert queue.next("a", ()) is None
    assert read(queue, "b") == "short"
    assert read(queue, "a") == "long"


def test_a_lane_that_decodes_waits_for_one_reading_at_most() -> None:
    queue: PrefillQueue[Prompt] = PrefillQueue()
    for lane in "ab":
        queue.add(lane, Prompt(lane, 1000))
    assert queue.next("a", "b") is not None
    queue.end_reading("ab")
    queue.record_decode("a")

    assert queue.next("a", "ab") is None, "b has not decoded since"
    assert queue.next("a", "a") is not None, "nobody decodes in b"
    queue.record_decode("b")
    assert queue.next("a", "ab") is not None


def test_removed_prompts_are_returned() -> None:
    queue: PrefillQueue[Prompt] = PrefillQueue()
    prompts = [Prompt(name, 10) for name in ("one", "two")]
    for prompt in prompts:
        queue.add("a", prompt)

    assert queue.remove("b") == []
    assert queue.remove("a", lambda prompt: prompt.name == "one") == prompts[:1]
    assert queue.of("a") == prompts[1:]
