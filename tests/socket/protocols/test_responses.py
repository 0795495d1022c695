"""OpenAI's Responses of a gateway, read by the `openai` package's own types."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
from openai.types.conversations import Conversation, ConversationItemList
from openai.types.responses import InputTokenCountResponse, ResponseItemList

from tests.support.gateway_fixtures import MakeGateway, Served
from tests.support.maker_types import read_event, read_response, read_strictly
from tests.support.open_responses import check_stream
from tests.support.running_gateway import (
    RunningGateway,
    bearer_headers,
    said,
    status_and_code,
    wait_until,
)
from tests.support.scripted_worker import ScriptedWorker

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "demo", "input": "Hi"}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": {}, "strict": None}


def post(gateway: RunningGateway, path: str = PATH, **fields: Any) -> httpx.Response:
    """Ask for a response, or send what else has its fields, with these changes."""
    return gateway.client.post(path, json={**BODY, **fields})


def status_and_param(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["param"]


def texts_of(worker: ScriptedWorker) -> list[str]:
    return [message["content"] for message in worker.requests[-1].body["messages"]]


def types_of(events: Sequence[dict[str, Any]]) -> list[str]:
    return [one["type"] for one in events]


def events_of(response: httpx.Response, first: int = 0) -> list[dict[str, Any]]:
    """Return the events of a stream, each valid and numbered from here on."""
    found = check_stream(response.text)
    for one in found:
        read_event(one)
    assert found[0]["sequence_number"] == first
    return found


def test_a_stream_of_a_response_ends_with_its_last_event(served: Served) -> None:
    events = events_of(post(served.gateway, stream=True))
    pieces = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(pieces) == "one two three"
    assert events[-1]["type"] == "response.completed"

    served.worker.script.cut_after = 3
    events = events_of(post(served.gateway, stream=True))
    assert types_of(events[-2:]) == ["error", "response.failed"]
    (message,) = events[-1]["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "one two")


def test_errors_have_openais_shape_and_name_the_field(shared_gateway: RunningGateway) -> None:
    assert status_and_param(post(shared_gateway, top_z=1)) == (400, "top_z")
    unknown = post(shared_gateway, model="gpt")
    assert status_and_code(unknown) == (404, "model_not_found")
    hosted = post(shared_gateway, tools=[{"type": "web_search"}])
    assert hosted.headers["x-paceline-ignored"] == "tools[0]:web_search"


def test_the_words_of_an_error_name_the_tool_that_the_client_sent(shared_gateway) -> None:
    """A tool that is left out, and a namespace, change the places of the others."""
    namespace = {"type": "namespace", "name": "mail", "tools": [{**LOOK, "strict": "yes"}]}
    tools = [{"type": "web_search"}, namespace, LOOK]
    place = "tools[1].tools[0].strict"
    for path in (PATH, f"{PATH}/input_tokens", "/v1/route/explain"):
        refused = post(shared_gateway, path, instructions="Be brief.", tools=tools)
        assert status_and_param(refused) == (400, place), path
        assert place in refused.json()["error"]["message"]


def test_what_a_worker_refuses_is_named_as_the_client_sent_it(shared: Served) -> None:
    error = {"message": "It is unknown.", "param": "tools[1].function.parameters.a"}
    shared.worker.script.status = 400
    shared.worker.script.body = json.dumps({"error": error}).encode()
    tools = [{"type": "web_search"}, LOOK, {**LOOK, "name": "see"}]
    for path in (PATH, f"{PATH}/input_tokens"):
        refused = post(shared.gateway, path, tools=tools)
        assert status_and_param(refused) == (400, "tools[2].parameters.a")


def test_a_response_goes_on_from_an_earlier_one_until_that_is_deleted(shared: Served) -> None:
    client = shared.gateway.client

    def go_on(response: dict[str, Any]) -> httpx.Response:
        return post(shared.gateway, input="And?", previous_response_id=response["id"])

    first = post(shared.gateway, instructions="Be brief.").json()
    second = go_on(first).json()
    assert texts_of(shared.worker) == ["Hi", "one two three", "And?"]
    third = go_on(second).json()
    assert texts_of(shared.worker) == ["Hi", "one two three", "And?", "one two three", "And?"]

    shown = read_response(client.get(f"{PATH}/{second['id']}").json())
    assert (shown.id, shown.output_text) == (second["id"], "one two three")
    items = client.get(f"{PATH}/{second['id']}/input_items").json()
    assert [one.content[0].text for one in read_strictly(ResponseItemList, items).data] == ["And?"]
    assert client.delete(f"{PATH}/{first['id']}").json()["deleted"] is True
    assert client.get(f"{PATH}/{first['id']}").status_code == 404
    assert status_and_code(go_on(third)) == (400, "previous_response_not_found")


def test_a_reference_stands_for_the_item_that_is_kept(shared: Served) -> None:
    first = post(shared.gateway).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert post(shared.gateway, input=[*said("Hi")["messages"], reference]).status_code == 200
    assert texts_of(shared.worker) == ["Hi", "one two three"]
    twice = post(shared.gateway, input=[reference, reference])
    assert status_and_param(twice) == (400, "input[1].id"), "few bytes would stand for many"
    unknown = post(shared.gateway, input=[{**reference, "id": "msg_1"}])
    assert status_and_param(unknown) == (400, "input[0].id")


def test_a_reference_stands_for_an_item_of_a_conversation(shared: Served) -> None:
    """With the conversation or without; of items that a client or a response has added."""
    client, path = shared.gateway.client, "/v1/conversations"
    first = said("My name is Ann.")["messages"]
    name = client.post(path, json={"items": first}).json()["id"]
    other = client.post(path, json={"items": first}).json()["id"]
    added = client.post(f"{path}/{name}/items", json={"items": said("Bye.")["messages"]}).json()
    post(shared.gateway, conversation=name)
    listed = client.get(f"{path}/{name}/items", params={"order": "asc"}).json()["data"]
    assert listed[1]["id"] == added["data"][0]["id"]
    assert len({one["id"] for one in listed}) == 4
    assert max(len(one["id"]) for one in listed) <= 64, "OpenAI's longest"
    texts = ["My name is Ann.", "Bye.", "Hi", "one two three"]
    references = [{"type": "item_reference", "id": one["id"]} for one in listed]
    for conversation in ({}, {"conversation": other}):
        answered = post(shared.gateway, input=references, **conversation)
        assert answered.status_code == 200
        assert texts_of(shared.worker)[-2:] == [
            "\n\n".join([*texts[:1] * len(conversation), *texts[:3]]),
            texts[3],
        ]
    for one, text in zip(references, texts, strict=True):
        assert post(shared.gateway, input=[one], conversation=name).status_code == 200
        assert texts_of(shared.worker)[-1].endswith(text)
    client.delete(f"{path}/{name}/items/{listed[0]['id']}")
    gone = post(shared.gateway, input=references[:1])
    assert status_and_param(gone) == (400, "input[0].id")


def test_a_response_that_is_not_to_be_stored_is_not_kept(shared_gateway: RunningGateway) -> None:
    client = shared_gateway.client
    response = post(shared_gateway, store=False).json()
    assert response["store"] is False
    assert client.get(f"{PATH}/{response['id']}").status_code == 404
    refused = client.post(f"{PATH}/{response['id']}/cancel")
    assert refused.json()["error"]["code"] == "response_not_found"


def test_a_conversation_keeps_its_items_in_their_order(shared: Served) -> None:
    client, path = shared.gateway.client, "/v1/conversations"
    first = said("My name is Ann.")["messages"]
    made = client.post(path, json={"items": first, "metadata": {"a": "b"}, "odd": None}).json()
    assert read_strictly(Conversation, made).metadata == {"a": "b"}
    name = made["id"]
    answer = post(shared.gateway, conversation=name).json()
    assert read_response(answer).conversation is not None
    assert texts_of(shared.worker) == ["My name is Ann.\n\nHi"]
    path = f"{path}/{name}"
    client.post(f"{path}/items", json={"items": said("Bye.")["messages"]})
    items = client.get(f"{path}/items", params={"order": "asc", "limit": 3}).json()
    listed = read_strictly(ConversationItemList, items)
    texts = [one.content[0].text for one in listed.data]
    assert texts == ["My name is Ann.", "Hi", "one two three"]
    assert listed.has_more
    rest = client.get(f"{path}/items", params={"order": "asc", "after": listed.last_id}).json()
    assert [one["content"][0]["text"] for one in rest["data"]] == ["Bye."]
    first_path = f"{path}/items/{listed.first_id}"
    assert client.get(first_path).json() == items["data"][0]
    assert client.delete(first_path).json()["id"] == name
    post(shared.gateway, conversation={"id": name})
    assert texts_of(shared.worker) == ["Hi", "one two three", "Bye.\n\nHi"]
    updated = client.post(path, json={"metadata": {"c": "d"}}).json()
    assert updated == client.get(path).json()
    assert client.delete(path).json()["object"] == "conversation.deleted"
    gone = post(shared.gateway, conversation=name)
    assert status_and_param(gone) == (400, "conversation")


def test_a_conversation_has_at_most_10000_items(shared_gateway, monkeypatch) -> None:
    monkeypatch.setattr("gateway.responses.kept_items.ITEMS_LIMIT", 2)
    client, item = shared_gateway.client, {"items": said("Hi")["messages"]}
    made = client.post("/v1/conversations", json=item).json()
    path = f"/v1/conversations/{made['id']}/items"
    assert client.post(path, json=item).status_code == 200
    assert status_and_param(client.post(path, json=item)) == (400, "items")
    assert len(client.get(path).json()["data"]) == 2


def test_a_background_response_is_polled_and_followed_again(shared: Served) -> None:
    client = shared.gateway.client
    shared.worker.script.hang_after = 2
    queued = read_response(post(shared.gateway, background=True).json())
    assert (queued.status, queued.background) == ("queued", True)
    url = f"{PATH}/{queued.id}"
    wait_until(lambda: bool(client.get(url).json()["output"]))
    assert read_response(client.get(url).json()).status == "in_progress"
    shared.worker.resume.set()
    wait_until(lambda: client.get(url).json()["status"] == "completed")
    assert read_response(client.get(url).json()).output_text == "one two three"

    events = events_of(client.get(url, params={"stream": True}))
    begin = [f"response.{name}" for name in ("created", "queued", "in_progress")]
    assert types_of(events)[:3] == begin
    assert events[-1]["type"] == "response.completed"
    again = client.get(url, params={"stream": True, "starting_after": 4})
    assert events_of(again, first=5) == events[5:]


def test_a_background_stream_goes_on_without_its_client(shared: Served) -> None:
    client = shared.gateway.client
    shared.worker.script.hang_after = 2
    body = {**BODY, "background": True, "stream": True}
    with client.stream("POST", PATH, json=body) as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
        name = json.loads(line.removeprefix("data: "))["response"]["id"]
    shared.worker.resume.set()
    wait_until(lambda: client.get(f"{PATH}/{name}").json()["status"] == "completed")


def test_an_overloaded_gateway_says_so_before_the_stream_of_a_response(
    make_gateway: MakeGateway, worker: ScriptedWorker
) -> None:
    worker.script.hang_after = 2
    gateway = make_gateway(worker, requests_limit=1)
    queued = post(gateway, background=True).json()
    shed = gateway.client.get(f"{PATH}/{queued['id']}", params={"stream": True})
    assert status_and_code(shed) == (503, "gateway_overloaded")


def test_a_background_response_is_cancelled_at_its_worker(shared: Served) -> None:
    client = shared.gateway.client
    shared.worker.script.hang_after = 2
    name = post(shared.gateway, background=True).json()["id"]
    assert shared.worker.request_received.wait(60)
    cancelled = read_response(client.post(f"{PATH}/{name}/cancel").json())
    assert cancelled.status == "cancelled"
    assert shared.worker.client_disconnected.wait(60)
    assert client.get(f"{PATH}/{name}").json()["status"] == "cancelled"
    whole = post(shared.gateway).json()["id"]
    assert client.post(f"{PATH}/{whole}/cancel").status_code == 400


def test_input_tokens_and_routes_that_are_refused_by_name(shared_gateway: RunningGateway) -> None:
    counted = post(shared_gateway, f"{PATH}/input_tokens")
    assert read_strictly(InputTokenCountResponse, counted.json()).input_tokens > 0
    compact = post(shared_gateway, f"{PATH}/compact")
    assert status_and_code(compact) == (400, "endpoint_not_served")


def test_a_key_sees_and_continues_only_its_own_responses(gateway_with_worker) -> None:
    ann, bob = (bearer_headers(gateway_with_worker.create_key(name=one)) for one in ("ann", "bob"))
    client = gateway_with_worker.client
    name = client.post(PATH, json={**BODY, "background": True}, headers=ann).json()["id"]
    wait_until(lambda: client.get(f"{PATH}/{name}", headers=ann).json()["status"] == "completed")
    then = {**BODY, "previous_response_id": name}
    assert client.post(PATH, json=then, headers=bob).status_code == 400
    for url in (f"{PATH}/{name}", f"{PATH}/{name}?stream=true", f"{PATH}/{name}/input_items"):
        assert client.get(url, headers=bob).status_code == 404
    assert client.post(f"{PATH}/{name}/cancel", headers=bob).status_code == 404
    assert client.delete(f"{PATH}/{name}", headers=bob).status_code == 404
    assert client.post(PATH, json=then, headers=ann).status_code == 200


def test_limits_and_accounting_hold_for_responses(served: Served) -> None:
    served.gateway.use_key(served.gateway.create_key(requests_a_minute=1)["secret"])
    first = post(served.gateway, stream=True)
    assert first.headers["x-ratelimit-limit-requests"] == "1"
    limited = post(served.gateway, background=True)
    assert status_and_code(limited) == (429, "requests_a_minute_exceeded")
    assert int(limited.headers["retry-after"]) > 0
    assert len(served.worker.requests) == 1
    usage = served.gateway.admin.get("/admin/v1/usage").json()
    assert "10" in json.dumps(usage), "the tokens of the answer are the key's"


def test_a_request_is_explained_as_the_chat_that_it_becomes(shared_gateway: RunningGateway) -> None:
    body: dict[str, Any] = {"temperature": 0, "instructions": "Be brief."}
    explained = post(shared_gateway, "/v1/route/explain", **body).json()
    assert (explained["servable"], explained["profile"]["messages"]) == (True, 2)
    answered = post(shared_gateway, **body)
    assert explained["worker"] == answered.headers["x-paceline-worker"]
