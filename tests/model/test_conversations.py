"""Conversations: no turn reads again what an earlier one has read, and no answer changes by it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.request.profile import Sampling
from tests.support.chat_bodies import assistant, user
from tests.support.conversation_schedules import ConversationRunner
from tests.support.engine_lane import RowEvents, run_until_idle
from tests.support.reference_decoder import assert_equal_but_for_ties
from workers.engine.lane import prefix_exchange
from workers.engine.lane.scheduler import LaneScheduler
from workers.engine.model.target import PictureFeatures
from workers.engine.prefix.cache import PrefixCache
from workers.engine.prefix.files import PrefixCacheFiles
from workers.engine.text.tokenizer import PromptRenderer
from workers.engine.types import LaneName, Picture, Prompt

SYSTEM = "You are the help desk of a small shop. " + "The red fox sees the old tree. " * 20
LANES: dict[str, tuple[LaneName, dict[str, Any]]] = {
    "drafting": (LaneName.TEXT_MTP, {}),
    "sampled": (LaneName.VLM, {"sampling": Sampling(temperature=0.7), "draft_tokens": 0}),
}
RED = Picture(width_px=64, height_px=64, rgb=bytes([220, 30, 30]) * 64 * 64)
BLUE = Picture(width_px=64, height_px=64, rgb=bytes([30, 30, 220]) * 64 * 64)


@pytest.fixture
def ask(prompt_renderer: PromptRenderer, submit: Callable[..., RowEvents]) -> Callable[..., Any]:
    """Return a function that answers a conversation in a lane."""

    def answer(
        lane: LaneScheduler,
        messages: Sequence[dict[str, Any]],
        *,
        scope: str | None = "",
        pictures: tuple[Picture, ...] = (),
        prefix_cache: PrefixCache | None = None,
        max_tokens: int = 12,
        **options: Any,
    ) -> RowEvents:
        text = prompt_renderer.chat(messages)
        prompt = Prompt(
            text=text,
            pictures=pictures,
            prefix_text=prompt_renderer.shared_prefix(messages),
            turn_end=prompt_renderer.turn_end(text, messages),
            continues=prompt_renderer.continues(),
            scope=scope,
        )
        prepared = prompt_renderer.prepare(prompt)
        result = submit(lane, prepared, max_tokens=max_tokens, **options)
        if prefix_cache is not None:
            result.row.prefetched = prefix_cache.prefetch(scope, prepared.identity)
        run_until_idle(lane)
        return result

    return answer


@pytest.mark.parametrize("kind", LANES)
def test_each_turn_of_a_chat_reads_its_new_tokens_only(make_lane, ask, checkpoint, kind) -> None:
    """An answer that ended inside a draft is found too, and so is one of a row without drafts."""
    name, options = LANES[kind]
    lane = make_lane(name)
    messages = [{"role": "system", "content": SYSTEM}]
    known = 0
    for number in range(3):
        messages.append(user(f"Tell me story {number} about a fox."))
        row = ask(lane, messages, seed=number, max_tokens=50, **options).row
        assert row.cached_tokens == known
        known = row.context_tokens
        cold = ask(make_lane(name), messages, scope=None, seed=number, max_tokens=50, **options)
        assert_equal_but_for_ties(checkpoint, row.prompt.tokens, row.answer, cold.row.answer)
        messages.append(assistant(cold.text))


def test_a_chat_goes_on_in_the_other_lane(make_lane, ask) -> None:
    prefix_cache = PrefixCache(1 << 30)
    first = [user("Tell me a story about a fox and a boat, and then another one about a tree.")]
    one = ask(make_lane(LaneName.TEXT_MTP, prefix_cache=prefix_cache), first)
    both = [*first, assistant(one.text), user("Go on.")]
    two = ask(make_lane(LaneName.VLM, prefix_cache=prefix_cache), both, draft_tokens=0)
    assert two.row.cached_tokens == one.row.context_tokens
    three = ask(
        make_lane(LaneName.TEXT_MTP, prefix_cache=prefix_cache),
        [*both, assistant(two.text), user("And then?")],
    )
    # The lane without drafts has left nothing of its answer for the head.
    assert two.row.cached_tokens <= three.row.cached_tokens < two.row.context_tokens
    assert three.row.speculation.total().steps > 0


def test_a_row_of_the_head_starts_only_where_the_head_can_go_on(make_lane, ask) -> None:
    """A row that drafts passes the end of a plain answer, whose snapshot lacks the hidden state."""
    prefix_cache = PrefixCache(1 << 30)
    lane = make_lane(prefix_cache=prefix_cache)
    chat = [{"role": "system", "content": SYSTEM}, user("Tell me a story about a fox.")]
    plain = ask(lane, chat, draft_tokens=0)
    chat += [assistant(plain.text), user("Go on.")]
    row = ask(lane, chat).row
    read = (*plain.row.prompt.tokens, *plain.row.answer[:-1])
    assert row.prompt.tokens[: len(read)] == read
    tokens = row.prompt.identity[: plain.row.context_tokens + 1]
    ends = []
    for with_head in (False, True):
        match = prefix_cache.match("", tokens, with_head=with_head, cuttable=False)
        assert match is not None
        assert match.snapshot is not None
        assert match.snapshot.last_hidden is not None or not with_head
        ends.append(match.tokens)
    assert ends[1] < ends[0] == plain.row.context_tokens


def test_one_token_of_a_known_prompt_is_read(make_lane, ask) -> None:
    """The next token needs its scores, also where a row may start at any token."""
    prefix_cache = PrefixCache(1 << 30)
    row = ask(make_lane(prefix_cache=prefix_cache), [user(SYSTEM)]).row
    tokens = row.prompt.identity
    match = prefix_cache.match("", tokens, with_head=False, cuttable=True)
    assert match is not None
    assert match.tokens == len(tokens) - 1


def test_an_answer_is_generated_again_from_the_end_of_its_question(make_lane, ask) -> None:
    lane = make_lane()
    system = {"role": "system", "content": SYSTEM}
    for question in ("Tell me a story about a fox.", "The red fox sees the old tree. " * 40):
        first, again = (ask(lane, [system, user(question)]).row for _ in range(2))
        short = first.prompt.turn_tokens - first.prompt.prefix.tokens < 256
        ends = first.prompt.prefix.tokens, first.prompt.turn_tokens
        assert again.cached_tokens == ends[not short], "a short question is read again"
        assert len(again.prompt.tokens) - ends[1] < 8
        assert again.answer == first.answer


def test_an_edited_message_costs_at_most_one_interval_more(make_lane, ask, monkeypatch) -> None:
    """Message 3 of 20 changes, in a chat that was read at once and in one that has grown.

    The grown one keeps a snapshot of every turn until memory is short.
    """
    interval = 128
    for module in ("decode.prefill", "prefix.cache"):
        monkeypatch.setattr(f"workers.engine.{module}.SNAPSHOT_INTERVAL_TOKENS", interval)
    messages = [user("The red fox sees the old tree. " * 20), assistant("Yes. " * 80)]
    messages += [user("What is 2 + 2? " * 4), assistant("It is 4. " * 5)] * 9
    edited = [*messages[:2], user("What is 3 + 3? " * 4), *messages[3:], user("Go on.")]
    kept = ask(make_lane(), messages[:2], scope=None, max_tokens=1).row.prompt.tokens
    for turns in ([20], range(0, 21, 4)):
        prefix_cache = PrefixCache(1 << 30)
        lane = make_lane(prefix_cache=prefix_cache)
        for turn in turns:
            ask(lane, [*messages[:turn], user("Go on.")], max_tokens=4)
        snapshots = [node for node in prefix_cache._nodes() if node.snapshot]
        prefix_cache.evict_to(prefix_cache.size_bytes * 3 // 4)
        thinned = [node for node in prefix_cache._nodes() if node.snapshot]
        assert len(thinned) < len(snapshots)
        row = ask(lane, edited, max_tokens=4).row
        assert 0 <= len(kept) - row.cached_tokens <= interval


def test_what_is_too_large_is_counted_before_it_is_copied(make_lane, ask, caplog) -> None:
    prefix_cache = PrefixCache(100_000)
    lane = make_lane(prefix_cache=prefix_cache)
    messages = [user("Tell me a story about a fox. " * 60)]
    for _ in range(2):
        ask(lane, messages)
    assert prefix_cache.size_bytes == 0
    assert lane.counters.report().prefix.too_large == 4, "two ends of a message, two of an answer"
    warned = [one.message.split()[0] for one in caplog.records if one.name.startswith("workers")]
    assert warned == ["prefix_cache.too_large"]


def test_a_picture_is_found_by_its_pixels(make_lane, ask) -> None:
    """All pictures of one size have the same tokens."""
    lane = make_lane(LaneName.VLM)
    content = [{"type": "image"}, {"type": "text", "text": "What is this? " * 10}]
    question = {"role": "user", "content": content}
    first = ask(lane, [question], pictures=(RED,))
    then = [question, assistant(first.text), user("Are you sure?")]
    red = ask(lane, then, pictures=(RED,))
    blue = ask(lane, then, pictures=(BLUE,))
    assert red.row.cached_tokens == first.row.context_tokens
    assert blue.row.cached_tokens == 0
    for result, picture in ((red, RED), (blue, BLUE)):
        cold = ask(make_lane(LaneName.VLM), then, pictures=(picture,), scope=None)
        assert result.row.answer == cold.row.answer


def test_a_picture_goes_through_the_vision_tower_once_in_a_chat(
    make_lane, ask, checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, runs = checkpoint.target, 0
    monkeypatch.setattr(target, "picture_features", PictureFeatures())
    run_tower = type(target.model.vision_tower).__call__

    def count(*arguments: Any, **options: Any) -> Any:
        nonlocal runs
        runs += 1
        return run_tower(*arguments, **options)

    monkeypatch.setattr(type(target.model.vision_tower), "__call__", count)
    content = [{"type": "image"}, {"type": "text", "text": "What is this? " * 10}]
    question = {"role": "user", "content": content}
    lane = make_lane(LaneName.VLM)
    first = ask(lane, [question], pictures=(RED,))
    then = [question, assistant(first.text), user("Are you sure?")]
    counts = []
    for picture, scope in ((RED, ""), (BLUE, ""), (RED, ""), (RED, "other"), (RED, None)):
        ask(lane, then, pictures=(picture,), scope=scope)
        counts.append(runs)
    assert counts == [1, 2, 2, 3, 4], "scopes share nothing"
    target.picture_features.drop("")
    for scope in ("other", ""):
        ask(lane, then, pictures=(RED,), scope=scope)
        counts.append(runs)
    assert counts[-2:] == [4, 5]
    target.picture_features.drop(None)
    assert target.picture_features.size_bytes == 0


@pytest.mark.parametrize("tokens", [700, pytest.param(3000, marks=pytest.mark.proof)])
def test_any_schedule_of_conversations_gets_the_likeliest_tokens(
    checkpoint, prompt_renderer, tmp_path, monkeypatch, tokens
) -> None:
    """`bench.engine.schedules` checks 100,000 tokens."""
    # On a busy machine no transfer may take longer than reading.
    monkeypatch.setattr(prefix_exchange, "_reading_s", lambda *_: 60.0)
    conversations = ConversationRunner(
        checkpoint, prompt_renderer, 17, 4 << 20, tmp_path, longest_answer=60
    )
    stats = conversations.run(tokens)
    conversations.close()

    events = ("forks", "edits", "cuts", "evictions", "cancelled", "restarts")
    tokens_of = ("drafted tokens", "cached tokens", "disk tokens", "moved tokens")
    assert min(stats[kind] for kind in (*events, *tokens_of)) > 0, "every kind of event occurs"
    assert stats["ties"] <= stats["tokens"] // 500


def test_a_chat_goes_on_after_a_restart_and_after_its_eviction(make_lane, ask, tmp_path) -> None:
    """What memory has evicted comes back from disk, its runs joined again."""

    def start() -> tuple[PrefixCache, LaneScheduler]:
        files = PrefixCacheFiles(tmp_path, 1 << 30, "demo", b"secret")
        prefix_cache = PrefixCache(1 << 30, files)
        return prefix_cache, make_lane(prefix_cache=prefix_cache)

    prefix_cache, lane = start()
    messages = [{"role": "system", "content": SYSTEM}]
    known = 0
    kinds: Counter[str] = Counter()
    for number in range(5):
        messages.append(user(f"Tell me story {number} about a fox."))
        result = ask(lane, messages, prefix_cache=prefix_cache)
        assert result.row.cached_tokens == known
        assert result.row.answer == ask(make_lane(), messages, scope=None).row.answer
        known = result.row.context_tokens
        kinds.update(result.row.cached_kinds)
        assert sum(result.row.cached_kinds.values()) == result.row.cached_tokens
        messages.append(assistant(result.text))
        if number == 2:
            continue
        if number % 2:
            prefix_cache.evict_to(0)
            prefix_cache._writer.submit(lambda: None).result()
        else:
            prefix_cache.close()
            prefix_cache, lane = start()
    assert min(kinds[kind] for kind in ("system", "conversation", "disk")) > 0
    assert ask(lane, messages[:-1], scope="other", prefix_cache=prefix_cache).row.cached_tokens == 0
    prefix_cache.close()
