"""Fields that change no answer: the header that lists them, and what workers get."""

from __future__ import annotations

from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import ScriptedWorker


def test_the_header_lists_ignored_fields_and_a_worker_gets_no_neutral_one(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """Strict workers reject fields that they do not know; a hint such as verbosity is theirs."""
    client, path = gateway_with_worker.client, "/v1/chat/completions"
    ignored = {"verbosity": "low", "best_of": 1, "modalities": ["text"], "store": None}
    for stream in (False, True):
        answer = client.post(path, json=chat_body(stream=stream, **ignored))
        assert answer.headers["x-paceline-ignored"] == "verbosity, best_of, modalities"
        sent = worker.requests[-1].body
        assert sent["verbosity"] == "low"
        assert not {"best_of", "modalities", "store"} & sent.keys()
    assert "x-paceline-ignored" not in client.post(path, json=chat_body()).headers
