"""PDFs of all wires, through a gateway, to what a worker gets."""

import subprocess
import sys
from typing import Any

import pytest

from gateway.documents.reader import DocumentReader
from tests.support.gateway_fixtures import Served
from tests.support.heartbeats import repeated
from tests.support.images import data_url, png_header
from tests.support.pdfs import base64_pdf, encrypted_pdf, pdf
from tests.support.running_gateway import RunningGateway, bearer_headers, said
from tests.support.scripted_worker import ScriptedWorker

TEXT = "[The text of the PDF document, 1 pages:]\n[Page 1]\nHello"


def bodies(content: bytes) -> dict[str, dict[str, Any]]:
    """Return a request of each wire with a PDF of the user."""
    data = base64_pdf(content)
    url = f"data:application/pdf;base64,{data}"
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    parts = {
        "chat/completions": {"type": "file", "file": {"file_data": url}},
        "messages": {"type": "document", "source": source},
        "responses": {"type": "input_file", "file_data": url},
    }
    return {
        wire: {
            "model": "demo",
            "max_tokens" if wire != "responses" else "max_output_tokens": 9,
            "input" if wire == "responses" else "messages": [{"role": "user", "content": [part]}],
        }
        for wire, part in parts.items()
    }


@pytest.mark.parametrize("wire", bodies(b""))
def test_a_worker_gets_the_text_of_a_pdf_and_its_pages_if_the_model_sees_pictures(
    gateway: RunningGateway, worker: ScriptedWorker, wire: str
) -> None:
    body, path = bodies(pdf("Hello"))[wire], f"/v1/{wire}"
    for sees in (True, False):
        gateway.join(worker, sees_pictures=sees)
        answer = gateway.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (message,) = worker.requests[-1].body["messages"]
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        assert content[0]["text"] == TEXT
        assert [one["type"] for one in content[1:]] == ["image_url"] * sees
    refused = gateway.client.post(path, json=bodies(encrypted_pdf("x", "y"))[wire])
    assert refused.status_code == 400
    assert "it is encrypted" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"file_url": "http://10.0.0.1/a.pdf"}, "file_url"),
        ({"file_id": "file-1"}, "file_id"),
        ({"file_id": "file-1", "file_data": "AA"}, "file_id"),
        ({"filename": "a.pdf"}, "file_data"),
        ({"file_data": 7}, "file_data"),
    ],
)
def test_a_file_without_its_data_is_refused_by_the_field_and_a_word_in_the_history(
    served: Served, fields: Any, field: str
) -> None:
    """No engine gets a link to follow."""
    parts = {
        "chat/completions": ({"type": "file", "file": fields}, "messages[0].content[0].file"),
        "responses": ({"type": "input_file", **fields}, "input[0].content[0]"),
    }
    for wire, (part, place) in parts.items():
        name = "input" if wire == "responses" else "messages"
        turns = [{"role": "user", "content": [part]}]
        refused = served.gateway.client.post(f"/v1/{wire}", json={"model": "demo", name: turns})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"{place}.{field}"
        turns += [{"role": role, "content": "Hi"} for role in ("assistant", "user")]
        later = served.gateway.client.post(f"/v1/{wire}", json={"model": "demo", name: turns})
        assert later.status_code == 200, later.text
        assert "cannot read" in str(served.worker.requests[-1].body["messages"][0]["content"])


def test_the_pages_of_a_pdf_leave_room_for_the_pictures_of_the_user(served: Served) -> None:
    """A request takes 32 pictures, and its user has sent as many."""
    body = bodies(pdf("Hello"))["chat/completions"]
    picture = {"type": "image_url", "image_url": {"url": data_url(png_header(8, 8))}}
    body["messages"][0]["content"] += [picture] * 32
    answer = served.gateway.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text, *pictures = served.worker.requests[-1].body["messages"][0]["content"]
    assert (text["text"], pictures) == (TEXT, [picture] * 32)


def test_a_pdf_that_nobody_can_read_ends_no_session_of_claude_code(served: Served) -> None:
    """It reads files by a tool, and sends the result again with each turn."""
    body = bodies(encrypted_pdf("x", "y"))["messages"]
    (sent,) = body["messages"]
    call = {"type": "tool_use", "id": "call00001", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": sent["content"]}
    called = {"role": "assistant", "content": [call]}
    asked = said("Read it.")["messages"]
    body["messages"] = [*asked, called, {"role": "user", "content": [result]}]
    answer = served.gateway.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    replaced = "messages.2.content.0.content.0:document"
    assert answer.headers["x-paceline-replaced"] == replaced
    told = served.worker.requests[-1].body["messages"][2]["content"]
    assert told == "[A PDF document, which cannot be read: it is encrypted.]"


def test_a_kept_response_goes_on_from_its_pdf(served: Served) -> None:
    client = served.gateway.client
    first = client.post("/v1/responses", json=bodies(pdf("Hello"))["responses"]).json()
    then = {"model": "demo", "input": "And?", "previous_response_id": first["id"]}
    counted = client.post("/v1/responses/input_tokens", json=then)
    assert counted.status_code == 200, counted.text
    assert client.post("/v1/responses", json=then).status_code == 200
    begun, again = (one.body["messages"][0] for one in served.worker.requests[-2:])
    assert begun == again


def test_no_pdf_is_read_without_a_key_or_at_its_limit_and_one_for_nothing_costs_a_request(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, monkeypatch
) -> None:
    headers = bearer_headers(gateway_with_worker.create_key(requests_a_minute=2))
    client, path = gateway_with_worker.client, "/v1/messages"
    read, refused = (bodies(one)["messages"] for one in (pdf("Hello"), encrypted_pdf("x", "y")))
    with repeated(lambda: gateway_with_worker.send_heartbeat(worker)):
        assert client.post(path, json=refused, headers=headers).status_code == 400
        assert client.post(path, json=read, headers=headers).status_code == 200
    monkeypatch.delattr(DocumentReader, "read")
    assert client.post(path, json=read, headers=headers).status_code == 429
    for wire, body in bodies(pdf("Hello")).items():
        assert client.post(f"/v1/{wire}", json=body).status_code == 401


def test_a_gateway_starts_without_the_libraries_that_read_pdfs() -> None:
    """They take memory, and a stranger's file is for another process alone."""
    code = (
        "import sys, gateway.server, gateway.app, gateway.documents.pdf_process\n"
        "sys.exit(bool({'pypdf', 'pypdfium2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
