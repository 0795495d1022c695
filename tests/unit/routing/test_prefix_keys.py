"""Keys of prompts: what changes them, where they end, and what they cost."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocols.openai import normalise
from gateway.routing.prefix_keys import MAX_PROMPT_ENDS, NO_KEYS, PrefixHasher, PrefixKeys
from gateway.types import Caller, Inspected
from paceline.request.profile import Endpoint, RequestProfile
from policies.sections import PrefixPolicy
from tests.support.chat_bodies import assistant, user
from tests.support.images import data_url
from tests.support.prefix_claims import RULES

LONG = "You are the clerk of a small harbour and answer in one sentence. " * 8
HASHER = PrefixHasher(b"secret")
LAB = Caller(key="1", team="lab")


def keys(
    *messages: Mapping[str, Any],
    hasher: PrefixHasher = HASHER,
    caller: Caller = LAB,
    model: str = "demo",
    in_place: bool = False,
    **fields: Any,
) -> PrefixKeys:
    chars = sum(len(repr(one)) for one in (*messages, *fields.get("tools", ())))
    profile = RequestProfile(endpoint=Endpoint.CHAT, model=model, text_chars=chars)
    body = {"messages": normalise(messages, in_place=in_place), **fields}
    return hasher.prefix_keys(Inspected("demo", profile, body), caller, RULES)


def system(text: str = LONG) -> dict[str, Any]:
    return {"role": "system", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": text}


CHAT = (system(), user("Who are you?"), assistant("The clerk."), user("Where?"))


def test_a_key_is_that_of_the_same_beginning_and_of_no_other() -> None:
    """S50 (CVE-2025-25183, CVE-2025-46722): the hash is keyed, so that clients cannot compute it,
    and covers whole texts, so that two texts do not collide."""
    found = keys(*CHAT)
    assert [end.messages for end in found.ends] == [4, 3, 2, 1]
    assert found.has_system
    assert all(len(end.key) == 8 for end in found.ends)
    assert found.ends[0].size_bytes > found.ends[1].size_bytes > len(LONG)
    assert keys(*CHAT, temperature=0) == keys(*CHAT, caller=Caller(key="2", team="lab")) == found
    others = [
        keys(*CHAT, model="large"),
        keys(*CHAT, tools=[{"type": "function"}]),
        keys(*CHAT, chat_template_kwargs={"enable_thinking": False}),
        keys(*CHAT, reasoning_effort="low"),
        keys(system(LONG + "!"), *CHAT[1:]),
        keys(*CHAT, caller=Caller(key="1", team="shop")),
        keys(*CHAT, caller=Caller(key="1")),
        keys(*CHAT, hasher=PrefixHasher(b"other")),
    ]
    all_keys = [end.key for one in (found, *others) for end in one.ends]
    assert len(set(all_keys)) == len(all_keys) == 4 * 9
    assert others[5].unscoped == found.unscoped, "only the isolation scope tells them apart"
    assert others[4].unscoped != found.unscoped


@pytest.mark.parametrize("changed", range(1, 4))
def test_a_changed_message_changes_the_keys_from_there_on(changed: int) -> None:
    edited = [*CHAT]
    edited[changed] = {**CHAT[changed], "content": "Something else."}
    before = {end.messages: end.key for end in keys(*CHAT).ends}
    after = {end.messages: end.key for end in keys(*edited).ends}
    assert [before[n] == after[n] for n in range(1, 5)] == [n <= changed for n in range(1, 5)]
    next_turn = keys(*CHAT, assistant("Here."), user("Why?"))
    assert next_turn.ends[2:] == keys(*CHAT).ends
    assert {end.key for end in next_turn.ends[:2]}.isdisjoint(before.values())


def test_the_results_of_several_tools_end_together() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = assistant(None, tool_calls=[call] * 3)
    found = keys(*CHAT[:2], calls, tool("a"), tool("b"), tool("c"), assistant("Done."))
    assert [end.messages for end in found.ends] == [7, 6, 3, 2, 1]


def test_fields_that_no_template_reads_change_no_key() -> None:
    plain = keys(*CHAT)
    noted = keys(*CHAT[:2], assistant("The clerk.", annotations=[], audio=None), user("Where?"))
    assert noted.ends[-2:] == plain.ends[-2:]
    quiet = keys(*CHAT[:2], assistant("The clerk.", refusal=None, audio=None), user("Where?"))
    assert [end.key for end in quiet.ends] == [end.key for end in noted.ends]
    thought = keys(*CHAT[:2], assistant("The clerk.", reasoning_content="Hm."), user("Where?"))
    assert thought.ends[0].key not in {noted.ends[0].key, plain.ends[0].key}


def test_pictures_count_by_their_content_and_as_few_tokens() -> None:
    def picture(color: str) -> dict[str, Any]:
        url = {"url": data_url(color.encode() * 9000)}
        return user([{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": url}])

    red, same, blue = (keys(system(), picture(color)) for color in ("red", "red", "blue"))
    assert red == same
    assert red.ends[0].key != blue.ends[0].key
    assert red.ends[-1] == blue.ends[-1]
    assert 1200 <= red.ends[0].size_bytes - red.ends[1].size_bytes < 1500


def test_a_short_prompt_has_no_keys() -> None:
    assert keys(system("Be brief."), user("Who are you?")) is NO_KEYS
    assert keys(user(LONG), assistant("Hm."), user("So?")).has_system is False
    short = keys(system("Be brief."), user(LONG))
    assert [end.messages for end in short.ends] == [2], "the system prompt is too short"
    assert not short.has_system
    tools = [{"type": "function", "function": {"name": "look_up", "description": LONG}}]
    with_tools = keys(user("Hello"), tools=tools)
    assert with_tools.has_system
    assert [end.messages for end in with_tools.ends] == [1, 0]


def test_a_long_conversation_is_looked_up_by_its_last_ends_and_sent_with_four() -> None:
    turns = [user(f"Question {n}") if n % 2 else assistant(f"Answer {n}") for n in range(1, 200)]
    found = keys(system(), *turns)
    assert len(found.ends) == MAX_PROMPT_ENDS
    assert found.ends[-1] == keys(*CHAT).ends[-1]
    assert found.claimed == (*found.ends[:4], found.ends[-1])
    assert keys(*turns).claimed == keys(*turns).ends[:4]
    assert keys(*CHAT).claimed == keys(*CHAT).ends


def completion_keys(
    prompt: Any, *, caller: Caller = LAB, model: str = "demo", rules: PrefixPolicy = RULES
) -> PrefixKeys:
    profile = RequestProfile(endpoint=Endpoint.COMPLETIONS, model=model, text_chars=1000)
    return HASHER.prefix_keys(Inspected(model, profile, {"prompt": prompt}), caller, rules)


CALLERS = (
    *(Caller(), LAB, Caller(key="1", team="shop"), Caller(key="1"), Caller(key="lab")),
    Caller(key="2"),
)
"""Of six scopes, by teams, by keys without a team, and without a key."""


def test_texts_to_complete_share_no_key_with_another_scope_or_model() -> None:
    found = [completion_keys(LONG, caller=caller) for caller in CALLERS]
    found.append(completion_keys(LONG, model="large"))
    assert len({end.key for one in found for end in one.ends}) == len(found)
    assert completion_keys(LONG, caller=Caller(key="2", team="lab")) == completion_keys(LONG)
    shared = PrefixPolicy(isolation="none")
    assert len({completion_keys(LONG, caller=one, rules=shared) for one in CALLERS}) == 1


def test_each_scope_has_a_salt_of_its_own_and_the_scope_of_all_none() -> None:
    salts = [HASHER.cache_salt(caller, RULES) for caller in CALLERS]
    assert salts[0] == ""
    assert len(set(salts)) == len(CALLERS)
    assert HASHER.cache_salt(Caller(key="2", team="lab"), RULES) == salts[1]
    assert PrefixHasher(b"other").cache_salt(LAB, RULES) != salts[1]
    assert {HASHER.cache_salt(one, PrefixPolicy(isolation="none")) for one in CALLERS} == {""}
    by_key = PrefixPolicy(isolation="key")
    assert len({HASHER.cache_salt(one, by_key) for one in CALLERS}) == 4


def test_texts_to_complete_share_the_blocks_that_they_begin_with() -> None:
    text = LONG * 40
    first, second = completion_keys(text + "One?"), completion_keys(text + "Two?")
    assert first.ends[0].key != second.ends[0].key
    assert first.ends[1:] == second.ends[1:]
    assert len(first.ends) == len(text) // 4096 + 1
    assert not first.has_system
    assert completion_keys([text, text]) is NO_KEYS
    assert completion_keys([1, 2, 3]) is NO_KEYS


TURNS = st.lists(
    st.builds(lambda say, text: say(text), st.sampled_from((user, assistant)), st.text(max_size=9)),
    max_size=9,
)


@given(TURNS, TURNS)
def test_two_chats_have_the_same_key_only_where_they_are_the_same(one, other) -> None:
    first, second = (normalise([system(), *chat]) for chat in (one, other))
    first_ends, second_ends = (
        {end.messages: end.key for end in keys(*chat).ends} for chat in (first, second)
    )
    for length in first_ends.keys() & second_ends.keys():
        same = first[:length] == second[:length]
        assert (first_ends[length] == second_ends[length]) == same


def test_a_system_message_behind_others_keeps_the_keys_of_the_turns_before_it() -> None:
    """Moved to the front, it would change the beginning of the prompt."""
    later = *CHAT, assistant("Here."), system("It is late.")
    before, after = keys(*CHAT, in_place=True), keys(*later, user("Why?"), in_place=True)
    assert set(before.ends) < set(after.ends)
    assert not set(keys(*CHAT).ends) & set(keys(*later).ends)
    following = keys(*later, user("Why?"), assistant("So."), user("O"), in_place=True)
    assert after.ends[0] in following.ends
