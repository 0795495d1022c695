"""A history is sent again with each turn, so no part of it may be refused for good."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.protocols.documents import Document, Readable, words_for_pdf
from gateway.protocols.history import readable, words_for
from policies.request.fields import FieldError
from tests.support.images import data_url, png_header

UNKNOWN = {"type": "new, kind", "x": 1}
LINK = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png_header(8, 8))}}
BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PDF = "JVBERi0x"
FILE = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}}


def test_f64_words_stand_for_what_no_model_reads_but_for_what_the_user_says_now() -> None:
    said = {"role": "user", "content": [UNKNOWN, LINK, PICTURE]}
    result = {"role": "tool", "tool_call_id": "c", "content": [UNKNOWN]}
    messages = [said, {"role": "assistant", "content": "Hm"}, result, said]
    body, replaced = readable({"model": "m", "messages": messages}, Readable())
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
        assert readable(body, Readable()) == (body, ())


def test_a_pdf_is_its_text_and_its_pages_follow_the_other_parts() -> None:
    page = data_url(png_header(9, 9))
    reading = Readable(documents={PDF: Document("One", 1, (page,))})
    said = {"role": "user", "content": [FILE, PICTURE]}
    result = {"role": "tool", "tool_call_id": "c", "content": [FILE]}
    body, replaced = readable({"messages": [said, {"role": "assistant"}, result]}, reading)
    first, _, told = (one.get("content") for one in body["messages"])
    text = {"type": "text", "text": "[The text of the PDF document, 1 pages:]\nOne"}
    assert first == [text, PICTURE, {"type": "image_url", "image_url": {"url": page}}]
    assert (told, replaced) == ([text], ()), "templates take pictures from users alone"


def test_a_pdf_that_cannot_be_read_is_refused_only_where_the_user_sends_it_now() -> None:
    reading = Readable(documents={PDF: Document(problem="it is encrypted")})
    said = {"role": "user", "content": [FILE]}
    result = {"role": "tool", "tool_call_id": "c", "content": [FILE]}
    body, replaced = readable({"messages": [said, {"role": "assistant"}, result]}, reading)
    words = [{"type": "text", "text": words_for_pdf("it is encrypted")}]
    assert [one.get("content") for one in body["messages"]] == [words, None, words]
    assert replaced == ("messages[0].content[0]:file", "messages[2].content[0]:file")
    with pytest.raises(FieldError, match="encrypted") as refused:
        readable({"messages": [said]}, reading)
    assert refused.value.param == "messages[0].content[0].file.file_data"


def test_words_stand_for_media_that_no_worker_takes_and_for_broken_pictures() -> None:
    said = {"role": "user", "content": [PICTURE, BROKEN]}
    turn = [said, {"role": "assistant", "content": "Hm"}]
    words = {"type": "text", "text": words_for("image_url")}
    for media, parts in ((frozenset({"image"}), [PICTURE, words]), (frozenset(), [words] * 2)):
        body, _ = readable({"messages": turn}, Readable(media))
        assert body["messages"][0]["content"] == parts


@pytest.mark.parametrize(("count", "left"), [(32, 32), (33, 25), (40, 32), (41, 25)])
def test_the_oldest_pictures_of_a_history_make_room_for_new_ones(count: int, left: int) -> None:
    """Eight at a time: else each new picture would change the beginning of the prompt."""
    said = {"role": "user", "content": [PICTURE] * (count - 1)}
    turn = [said, {"role": "assistant", "content": "Hm"}, {"role": "user", "content": [PICTURE]}]
    body, replaced = readable({"messages": turn}, Readable())
    kinds = [part["type"] for part in body["messages"][0]["content"]]
    assert kinds == ["text"] * (count - left) + ["image_url"] * (left - 1)
    assert len(replaced) == count - left
    assert body["messages"][2]["content"] == [PICTURE]


@pytest.mark.parametrize("behind", [True, False])
def test_the_oldest_pictures_of_new_results_of_tools_make_room_too(behind: bool) -> None:
    """A refusal would end the conversation: an agent sends the same results again."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "" if behind else [PICTURE] * 33}
    shown = [{"role": "user", "content": [PICTURE] * 33}] if behind else []
    body, replaced = readable({"messages": [*asked, result, *shown]}, Readable())
    kinds = [part["type"] for part in body["messages"][-1]["content"]]
    assert kinds == ["text"] * 8 + ["image_url"] * 25
    assert len(replaced) == 8
    said = {"role": "user", "content": [PICTURE] * 33}
    assert readable({"messages": [said]}, Readable())[0]["messages"] == [said]


def test_large_pictures_make_room_too_and_those_of_this_turn_stay() -> None:
    large = {"type": "image_url", "image_url": {"url": data_url(png_header(4000, 4000))}}
    turn = [{"role": "user", "content": [large] * 4}, {"role": "assistant", "content": "Hm"}]
    new = {"role": "user", "content": [large] * 5}
    body, replaced = readable({"messages": [*turn, new]}, Readable())
    assert [one.rpartition(":")[0] for one in replaced] == [
        f"messages[0].content[{place}]" for place in range(4)
    ]
    assert body["messages"][2] == new, "it is refused, by its field"
