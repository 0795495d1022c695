"""Pairing: codes, guesses, listeners, replays, and the token of a paired worker."""

import json
from typing import Any

import httpx
import pytest
from zeroconf import ServiceInfo

from gateway.pairing import announcement
from gateway.pairing.announcement import SERVICE, Announcement, find_gateways, read_announcement
from paceline.pairing import (
    CODE_VALID_S,
    PAIRING_PATH,
    PairingAnswer,
    PairingWrong,
    SealedMembership,
    WorkerSide,
)
from tests.support.pairing import EXCHANGES, begin, finish, pair, show_code, wrong
from tests.support.redis_server import free_port
from tests.support.running_gateway import RunningGateway, status_and_code, wait_until
from tests.support.scripted_worker import JOIN_TOKEN, ScriptedWorker

ORDER_2 = "42" + (2**255 - 20).to_bytes(32, "little").hex()
"""A point that makes a shared secret of two values."""


def heartbeat(
    gateway: RunningGateway, worker: ScriptedWorker, token: str, worker_id: str = ""
) -> httpx.Response:
    report: dict[str, Any] = worker.report().model_dump(mode="json")
    name = worker_id or report["worker_id"]
    return gateway.client.put(
        f"/admin/v1/workers/{name}",
        headers={"authorization": f"Bearer {token}"},
        json={**report, "worker_id": name},
    )


def test_l19_a_paired_worker_has_its_own_token_until_an_admin_ends_that(gateway, worker) -> None:
    token = pair(gateway, show_code(gateway)).token
    assert heartbeat(gateway, worker, token).status_code == 200
    assert set(worker.authorizations) == {f"Bearer {token}"}, "the gateway calls back with it"
    assert gateway.chat().status_code == 200
    assert JOIN_TOKEN not in "".join(worker.authorizations)
    refused = heartbeat(gateway, worker, token, "fake-b")
    assert status_and_code(refused) == (401, "pairing_ended"), "it is of this id only"
    assert status_and_code(heartbeat(gateway, worker, JOIN_TOKEN)) == (409, "worker_id_taken")
    (shown,) = gateway.admin.get("/admin/v1/workers").json()["workers"]
    assert {"paired_since", "last_seen"} < set(shown)
    unpaired = f"{PAIRING_PATH}/workers/fake-a"
    assert gateway.admin.delete(unpaired).status_code == 204
    assert gateway.admin.delete(unpaired).status_code == 404
    assert status_and_code(heartbeat(gateway, worker, token)) == (401, "pairing_ended")
    assert gateway.status()["workers"]["fake-a"]["state"] == "gone"
    assert heartbeat(gateway, worker, JOIN_TOKEN).status_code == 200, "the join token goes on"


def test_a_pairing_outlives_the_gateway_and_stores_no_token(make_gateway, worker, tmp_path) -> None:
    first = make_gateway()
    token = pair(first, show_code(first)).token
    first.__exit__(None, None, None)
    assert token not in (tmp_path / "state.json").read_text()
    assert heartbeat(make_gateway(), worker, token).status_code == 200


def test_l17_a_wrong_code_ends_the_code_and_its_address_waits_a_minute(gateway) -> None:
    code = show_code(gateway)
    guess = WorkerSide(wrong(code), "fake-a")
    answer = PairingAnswer.model_validate_json(begin(gateway, guess).content)
    with pytest.raises(PairingWrong):
        guess.keys(answer)
    assert status_and_code(finish(gateway, answer, bytes(32))) == (403, "pairing_refused")
    right = WorkerSide(code, "fake-a")
    assert status_and_code(begin(gateway, right)) == (429, "pairing_too_soon")
    new = show_code(gateway)
    assert begin(gateway, WorkerSide(new, "fake-a")).headers["retry-after"] == "60"
    gateway.clock.advance(60)
    assert pair(gateway, new).token, "a refused address costs the code nothing"
    assert status_and_code(begin(gateway, right)) == (409, "pairing_closed")


def test_a_code_is_good_for_one_exchange_within_two_minutes(gateway) -> None:
    code = show_code(gateway)
    pair(gateway, code)
    assert begin(gateway, WorkerSide(code, "fake-b")).status_code == 409, "once"
    first, last = show_code(gateway), show_code(gateway)
    left = WorkerSide(last, "fake-a")
    answer = PairingAnswer.model_validate_json(begin(gateway, left).content)
    gateway.clock.advance(31)
    late = finish(gateway, answer, left.keys(answer).worker_proof)
    assert status_and_code(late) == (409, "pairing_closed"), "an exchange takes half a minute"
    gateway.clock.advance(30)
    assert begin(gateway, WorkerSide(first, "fake-a")).status_code == 409, "a new one replaces it"
    code = show_code(gateway)
    gateway.clock.advance(CODE_VALID_S)
    assert begin(gateway, WorkerSide(code, "fake-a")).status_code == 409, "expired"


def test_l18_a_replay_and_a_listener_who_learns_the_code_later_gain_nothing(
    gateway,
) -> None:
    code = show_code(gateway)
    side = WorkerSide(code, "fake-a")
    answer = PairingAnswer.model_validate_json(begin(gateway, side).content)
    proof = side.keys(answer).worker_proof
    sealed = SealedMembership.model_validate_json(finish(gateway, answer, proof).content)
    assert status_and_code(finish(gateway, answer, proof)) == (409, "pairing_closed")
    show_code(gateway)
    again = PairingAnswer.model_validate_json(begin(gateway, side).content)
    assert status_and_code(finish(gateway, again, proof)) == (403, "pairing_refused")
    listener = WorkerSide(code, "fake-a")
    with pytest.raises(PairingWrong):
        listener.keys(answer)
    told = json.dumps([one.model_dump() for one in (side.request, answer, sealed)])
    assert code not in told
    assert "token" not in told


def test_a_live_worker_keeps_its_id_when_another_pairs_under_it(gateway, worker) -> None:
    assert heartbeat(gateway, worker, JOIN_TOKEN).status_code == 200
    assert pair(gateway, show_code(gateway)).worker_id == "fake-a-2"
    assert heartbeat(gateway, worker, JOIN_TOKEN).status_code == 200


def test_a_message_of_another_form_is_refused_by_its_field_and_costs_no_code(gateway) -> None:
    code = show_code(gateway)
    good = WorkerSide(code, "fake-a").request.model_dump()
    for change, param in (
        ({"name": "../x"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"message": "00"}, "message"),
        ({"message": "x" * 66}, "message"),
        ({"message": "0" * 68}, "message"),
        ({"more": 1}, "more"),
    ):
        response = gateway.client.post(EXCHANGES, json={**good, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    large = gateway.client.post(EXCHANGES, content=b" " * 5000)
    assert large.status_code == 413
    page = gateway.client.post(EXCHANGES, json=good, headers={"sec-fetch-site": "cross-site"})
    assert page.status_code == 403
    for number in ("x", "0" * 33):
        assert gateway.client.put(f"{EXCHANGES}/{number}", json={"proof": "0" * 64}).is_error
    assert gateway.client.post(f"{PAIRING_PATH}/code").status_code == 401
    assert gateway.client.delete(f"{PAIRING_PATH}/workers/fake-a").status_code == 401
    assert pair(gateway, code).worker_id == "fake-a"


@pytest.mark.parametrize("message", ["41" + "00" * 32, "42" + "ff" * 32, ORDER_2, "41" + "02" * 32])
def test_a_message_that_is_no_point_of_the_group_is_refused(gateway, message) -> None:
    show_code(gateway)
    response = gateway.client.post(EXCHANGES, json={"name": "fake-a", "message": message})
    assert status_and_code(response) == (403, "pairing_refused")


def test_each_gateway_of_a_fleet_answers_each_message(make_cluster_gateway, redis, worker) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    code = show_code(first)
    stored = [redis.client.get(key) for key in redis.client.keys("paceline:{pairing}:*")]
    assert stored
    assert code not in str(stored), "it is sealed"
    token = pair(second, code, at=first).token
    assert begin(first, WorkerSide(code, "fake-b")).status_code == 409
    assert heartbeat(first, worker, token).status_code == 200
    wait_until(lambda: heartbeat(second, worker, token).status_code == 200)
    assert second.admin.delete(f"{PAIRING_PATH}/workers/fake-a").status_code == 204
    wait_until(lambda: heartbeat(first, worker, token).status_code == 401)
    guess = WorkerSide(wrong(show_code(first)), "fake-a")
    assert begin(second, guess).status_code == 200
    assert begin(first, guess).status_code == 429, "all gateways know who has guessed"


def test_a_gateway_announces_its_address_version_and_fleet_and_no_secret(
    make_gateway, monkeypatch
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr("gateway.server.is_loopback", lambda _: False)
    monkeypatch.setattr(announcement, "_register", lambda *given: made.append(given))
    gateway = make_gateway()
    make_gateway(announce=False)
    wait_until(lambda: bool(made))
    ((host, port, fleet),) = made
    assert (host, f":{port}" in gateway.url) == ("127.0.0.1", True)
    info = Announcement.of(host, port, fleet).info
    found = read_announcement(info)
    assert found is not None
    assert (found.url, found.fleet) == (gateway.url, fleet)
    assert len(fleet) == 16
    assert set(info.properties) == {b"version", b"fleet", b"fingerprint"}
    secrets = gateway.admin_key, JOIN_TOKEN
    assert not any(secret.encode() in info.text for secret in secrets)


def test_a_gateway_on_loopback_announces_nothing(make_gateway, monkeypatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(announcement, "_register", lambda *given: made.append(given))
    make_gateway()
    assert made == []


def test_an_announcement_of_anybody_reaches_the_terminal_in_printable_bounded_text() -> None:
    hostile = {"version": b"\x1b[2J" + b"1" * 200, "fleet": b"\xff"}
    name = f"\x9b31mx.{SERVICE}"
    info = ServiceInfo(SERVICE, name, port=80, parsed_addresses=["10.0.0.9"], properties=hostile)
    found = read_announcement(info)
    assert found is not None
    assert found.url == "http://10.0.0.9:80"
    assert not {"\x1b", "\x9b"} & {*"".join(found)}
    assert max(map(len, found)) <= 64
    assert read_announcement(ServiceInfo(SERVICE, name, port=80)) is None


def test_a_search_finds_a_gateway_that_is_announced_on_its_interfaces() -> None:
    """On loopback, which needs no network; other gateways of this machine may answer there."""
    only, port = ["127.0.0.1"], free_port()
    fleet = f"fleet of {port}"
    announced = Announcement.of("127.0.0.1", port, fleet)._replace(interfaces=only).register()
    try:
        found = find_gateways(only, lambda one: one.fleet == fleet)
    finally:
        announced.close()
    assert [one.url for one in found if one.fleet == fleet] == [f"http://127.0.0.1:{port}"]


def test_a_network_that_permits_no_announcement_costs_one_line(
    make_gateway, monkeypatch, log_capture
) -> None:
    def fail(_: Announcement) -> None:
        raise OSError("no multicast")

    monkeypatch.setattr("gateway.server.is_loopback", lambda _: False)
    monkeypatch.setattr(Announcement, "register", fail)
    gateway = make_gateway()
    wait_until(lambda: "gateway.unannounced" in "".join(log_capture.texts))
    assert gateway.client.get("/livez").status_code == 200
