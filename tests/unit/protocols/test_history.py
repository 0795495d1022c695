"""A history is sent again with each turn, so no part of it may be refused for good."""

from typing import Any

import pytest

from gateway.protocols.documents import Document, Readable
from gateway.protocols.history import readable, words_for, words_for_pdf
from paceline.request.fields import FieldError
from tests.support.images import data_url, png_header

UNKNOWN = {"type": "new, kind", "x": 1}
LINK = {"type": "image_url", "image_url": {"url": "https://x/a.png"}}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png_header(8, 8))}}
BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PDF = "JVBERi0x"
FILE = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def result(*parts: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": list(parts)}


def read(*messages: Any, **can: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Return the contents of a readable history, and what was replaced."""
    body, replaced = readable({"messages": list(messages)}, Readable(**can))
    return [one.get("content") for one in body["messages"]], replaced


ANSWER = {"role": "assistant", "content": "Hm"}


def test_f64_words_stand_for_what_no_model_reads_but_for_what_the_user_says_now() -> None:
    said = user(UNKNOWN, LINK, PICTURE)
    contents, replaced = read(said, ANSWER, result(UNKNOWN), said)
    words = [{"type": "text", "text": words_for(kind)} for kind in ("new, kind", "image_url")]
    assert contents == [[*words, PICTURE], "Hm", words[:1], said["content"]]
    assert replaced == (
        "messages[0].content[0]:new%2C%20kind",
        "messages[0].content[1]:image_url",
        "messages[2].content[0]:new%2C%20kind",
    )
    assert said == user(UNKNOWN, LINK, PICTURE)


def test_a_history_that_a_model_reads_stays_as_it_is() -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [PICTURE]}, {"role": "assistant"}]},
        {"messages": [{"role": "user", "content": "Hi"}, 7]},
    ]
    for body in bodies:
        assert readable(body, Readable()) == (body, ())


def test_a_pdf_is_its_text_and_its_pages_follow_the_other_parts() -> None:
    page = data_url(png_header(9, 9))
    documents = {PDF: Document("One", 1, (page,))}
    turn = user(FILE, PICTURE), ANSWER, result(FILE)
    (first, _, told), replaced = read(*turn, documents=documents)
    text = {"type": "text", "text": "[The text of the PDF document, 1 pages:]\nOne"}
    assert first == [text, PICTURE, {"type": "image_url", "image_url": {"url": page}}]
    assert (told, replaced) == ([text], ()), "templates take pictures from users alone"


def test_a_pdf_that_cannot_be_read_is_refused_only_where_the_user_sends_it_now() -> None:
    documents = {PDF: Document(problem="it is encrypted")}
    contents, replaced = read(user(FILE), ANSWER, result(FILE), documents=documents)
    words = [{"type": "text", "text": words_for_pdf("it is encrypted")}]
    assert contents == [words, "Hm", words]
    assert replaced == ("messages[0].content[0]:file", "messages[2].content[0]:file")
    with pytest.raises(FieldError, match="encrypted") as refused:
        read(user(FILE), documents=documents)
    assert refused.value.param == "messages[0].content[0].file.file_data"


def test_words_stand_for_media_that_no_worker_takes_and_for_broken_pictures() -> None:
    words = {"type": "text", "text": words_for("image_url")}
    for media, parts in (({"image"}, [PICTURE, words]), ((), [words] * 2)):
        assert read(user(PICTURE, BROKEN), ANSWER, media=frozenset(media))[0][0] == parts


@pytest.mark.parametrize(("count", "left"), [(32, 32), (33, 25), (40, 32), (41, 25)])
def test_the_oldest_pictures_of_a_history_make_room_for_new_ones(count: int, left: int) -> None:
    """Eight at a time: else each new picture would change the beginning of the prompt."""
    contents, replaced = read(user(*[PICTURE] * (count - 1)), ANSWER, user(PICTURE))
    kinds = [part["type"] for part in contents[0]]
    assert kinds == ["text"] * (count - left) + ["image_url"] * (left - 1)
    assert len(replaced) == count - left
    assert contents[2] == [PICTURE]


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
    contents, replaced = read(user(*[large] * 4), ANSWER, user(*[large] * 5))
    places = [one.rpartition(":")[0] for one in replaced]
    assert places == [f"messages[0].content[{place}]" for place in range(4)]
    assert contents[2] == [large] * 5, "it is refused, by its field"
