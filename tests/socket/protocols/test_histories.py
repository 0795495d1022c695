"""Histories that a model cannot read in full, through a gateway, in each wire format."""

from typing import Any

import pytest

from gateway.protocols.history import words_for
from tests.support.images import data_url, png_header
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import ScriptedWorker

PICTURE = data_url(png_header(8, 8))
SOURCE = {"type": "base64", "media_type": "image/png", "data": PICTURE.partition(",")[2]}
PARTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"type": "image_url", "image_url": {"url": PICTURE}},
    "messages": {"type": "image", "source": SOURCE},
    "responses": {"type": "input_image", "image_url": PICTURE},
}
NAMES = {
    "chat/completions": "messages[0].content[0]:image_url",
    "messages": "messages.0.content.0:image",
    "responses": "input[0].content[0]:input_image",
}


def test_a_picture_of_a_history_stays_if_one_worker_of_the_model_sees_it(
    gateway: RunningGateway, worker: ScriptedWorker, second_worker: ScriptedWorker
) -> None:
    gateway.join(second_worker, sees_pictures=False)
    gateway.join(worker)
    said = {"role": "user", "content": [PARTS["chat/completions"]]}
    turn = [said, {"role": "assistant", "content": "Hm"}, {"role": "user", "content": "And?"}]
    for _ in range(4):
        assert gateway.chat(messages=turn).headers["x-paceline-worker"] == worker.worker_id
    assert worker.requests[-1].body["messages"][0] == said


@pytest.mark.parametrize("wire", PARTS)
def test_f64_a_conversation_goes_on_at_a_model_that_sees_no_pictures(gateway, worker, wire) -> None:
    """Its user has changed the model; a new picture is an error, and no worker gets one."""
    part = PARTS[wire]
    said = {"role": "user", "content": [part]}
    turn = [said, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And?"}]
    list_name, limit = ("messages", "max_tokens")
    if wire == "responses":
        list_name, limit = ("input", "max_output_tokens")
    body = {"model": "demo", limit: 9}
    for sees in (True, False):
        gateway.join(worker, sees_pictures=sees)
        answer = gateway.client.post(f"/v1/{wire}", json={**body, list_name: turn})
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-paceline-replaced") == (None if sees else NAMES[wire])
        first = worker.requests[-1].body["messages"][0]["content"]
        assert (words_for(part["type"]) in str(first)) != sees
    refused = gateway.client.post(f"/v1/{wire}", json={**body, list_name: [*turn[:2], said]})
    assert refused.status_code == 400
    assert "pictures" in refused.json()["error"]["message"]
