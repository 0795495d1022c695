"""Where system messages stand in the request that a worker gets."""

from typing import Any

import pytest

NOTE = {"role": "system", "content": "It is late."}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {**NOTE, "role": "developer"},
    {"role": "user", "content": "And?"},
]


@pytest.mark.parametrize("takes", [True, False])
def test_a_worker_that_tells_gets_a_system_message_in_its_place(gateway, worker, *, takes) -> None:
    """It knows what its template takes there; the beginning of the prompt stays the same."""
    gateway.join(worker, system_inside=takes)
    for path, body in bodies():
        assert gateway.client.post(path, json={"model": "demo", **body}).status_code == 200
        assert worker.requests[-1].body["messages"] == [*CHAT[:3], NOTE, CHAT[4]]


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return the same history in the three formats."""
    first, *turns = CHAT
    message = {"system": first["content"], "max_tokens": 9}
    message["messages"] = [one | NOTE if one["role"] == "developer" else one for one in turns]
    return [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/messages", message),
        ("/v1/responses", {"input": CHAT}),
    ]


def test_an_engine_that_does_not_tell_gets_system_messages_at_the_front(gateway, worker) -> None:
    gateway.join(worker)
    assert gateway.chat(messages=CHAT).status_code == 200
    first = {"role": "system", "content": "Be brief.\n\nIt is late."}
    assert worker.requests[-1].body["messages"] == [first, CHAT[1], CHAT[2], CHAT[4]]
    for path, body in bodies()[1:]:  # there, it is words of the user in its place
        assert gateway.client.post(path, json={"model": "demo", **body}).status_code == 200
        said = {"role": "user", "content": "It is late.\n\nAnd?"}
        assert worker.requests[-1].body["messages"] == [*CHAT[:3], said]
