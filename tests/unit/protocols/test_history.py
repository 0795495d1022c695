"""A history is sent again with each turn, so no part of it may be refused for good."""

from __future__ import annotations

from typing import Any

from gateway.protocols.history import readable, words_for

UNKNOWN = {"type": "new, kind", "x": 1}
LINK = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def test_words_stand_for_what_no_model_reads_but_for_what_the_user_says_now() -> None:
    said = {"role": "user", "content": [UNKNOWN, LINK, PICTURE]}
    result = {"role": "tool", "tool_call_id": "c", "content": [UNKNOWN]}
    messages = [said, {"role": "assistant", "content": "Hm"}, result, said]
    body, replaced = readable({"model": "m", "messages": messages})
    words = [{"type": "text", "text": words_for(kind)} for kind in ("new, kind", "image_url")]
    contents = [one["content"] for one in body["messages"]]
    assert contents == [[*words, PICTURE], "Hm", words[:1], said["content"]]
    assert replaced == (
        "messages[0].content[0]:new%2C%20kind",
        "messages[0].content[1]:image_url",
        "messages[2].content[0]:new%2C%20kind",
    )
    assert messages[0] is said
    assert said["content"] == [UNKNOWN, LINK, PICTURE]


def test_a_history_that_a_model_reads_stays_as_it_is() -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [PICTURE]}, {"role": "assistant"}]},
        {"messages": [{"role": "user", "content": "Hi"}, 7]},
        {"messages": 7},
        {},
    ]
    for body in bodies:
        assert readable(body) == (body, ())
