"""The last errors: what an admin and a client see of them."""

from typing import Any

from gateway.http.downstream import RESEND
from tests.support.running_gateway import RunningGateway, bearer_headers, wait_until
from tests.support.scripted_worker import Script, ScriptedWorker

SENTENCE = "words of a person"


def last_errors(gateway: RunningGateway) -> list[dict[str, Any]]:
    return gateway.admin.get("/admin/v1/errors").json()["errors"]


def test_each_error_names_time_key_model_worker_code_reason_and_request(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    gateway = gateway_with_worker
    key = gateway.use_new_key(name="Ann")
    worker.script = Script(status=500)
    failed = gateway.chat(temperature=0)
    invalid, unknown = gateway.chat(temperature=9), gateway.chat(model="gpt-7")
    gateway.use_key("wrong")
    refused = gateway.chat()
    rows = last_errors(gateway)
    ann = (key["id"], "Ann")
    named = ("key", "key_name", "model", "worker", "status", "code", "reason", "request_id")
    assert [tuple(row[name] for name in named) for row in rows] == [
        (*fields, response.json()["error"]["message"], response.headers["x-request-id"])
        for fields, response in (
            (("", "", "", "", 401, "invalid_api_key"), refused),
            ((*ann, "", "", 404, "model_not_found"), unknown),
            ((*ann, "", "", 400, "invalid_value"), invalid),
            ((*ann, "demo", "fake-a", 502, "worker_failed"), failed),
        )
    ]
    assert rows[-1]["reason"] == "The worker failed to process this request."
    assert all(row["time"].endswith("+00:00") for row in rows)


def test_a_client_sees_the_errors_of_its_own_key_alone(gateway_with_worker: RunningGateway) -> None:
    gateway = gateway_with_worker
    gateway.chat(temperature=8)
    before = gateway.client.get("/v1/errors").json()["errors"]
    assert [row["code"] for row in before] == ["invalid_value"], "no key is needed yet"
    ann, bob = (gateway.create_key(name=name) for name in ("Ann", "Bob"))
    limited = gateway.create_key(name="Eve", models=["demo"])
    for key, temperature in ((ann, 7), (bob, 9), (limited, 9)):
        response = gateway.chat(temperature=temperature, headers=bearer_headers(key))
        assert response.status_code == 400
    for key in (ann, bob, limited):
        own = gateway.client.get("/v1/errors", headers=bearer_headers(key)).json()
        assert [row["key_name"] for row in own["errors"]] == [key["name"]]
    assert len(last_errors(gateway)) == 4


def test_answers_and_requests_that_a_proxy_sends_elsewhere_are_no_errors(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    assert gateway_with_worker.chat().status_code == 200
    gateway_with_worker.remove_worker(worker)
    for headers in ({RESEND.decode(): "1"}, {}):
        assert gateway_with_worker.chat(headers=headers).status_code == 503
    assert [row["code"] for row in last_errors(gateway_with_worker)] == ["no_worker"]


def test_an_error_within_a_stream_has_its_worker_and_a_rejection_by_it_no_message(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    worker.script = Script(cut_after=1)
    with gateway_with_worker.stream(temperature=0) as response:
        assert response.status_code == 200
        response.read()
    wait_until(lambda: bool(last_errors(gateway_with_worker)))
    (row,) = last_errors(gateway_with_worker)
    assert (row["status"], row["code"], row["worker"]) == (502, "worker_lost", "fake-a")
    body = b'{"error": {"message": "words of a person", "code": "context_length_exceeded"}}'
    worker.script = Script(status=400, body=body)
    assert gateway_with_worker.chat(temperature=0).status_code == 400
    reason = last_errors(gateway_with_worker)[0]["reason"]
    assert reason == "The worker rejects the request (context_length_exceeded)."


def test_names_that_may_be_text_of_a_prompt_are_left_out(gateway, worker) -> None:
    """Before any worker has joined, the model of a request may be any text."""
    assert gateway.chat(model=SENTENCE).status_code == 503
    assert gateway.chat(model="demo-7b").status_code == 503
    assert [row["model"] for row in last_errors(gateway)] == ["demo-7b", ""]
    gateway.join(worker)
    names: tuple[dict[str, Any], ...] = ({"model": SENTENCE}, {SENTENCE: 1})
    assert {gateway.chat(**fields).status_code for fields in names} == {400, 404}
    gateway.remove_worker(worker)
    assert all(gateway.chat(**fields).is_error for fields in names)
    rows = last_errors(gateway)
    assert sum(row["count"] for row in rows) == 6
    assert SENTENCE not in str(rows)


def test_gateways_of_one_redis_list_the_errors_of_all(make_cluster_gateway, worker) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    assert first.chat(temperature=9).status_code == 400
    wait_until(lambda: bool(last_errors(second)), within_s=60)
    (here,), (there,) = last_errors(first), last_errors(second)
    assert {**here, "time": ""} == {**there, "time": ""}
