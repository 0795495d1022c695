"""Pairing: codes, guesses, listeners, replays, and the token of a paired worker."""

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from zeroconf import ServiceInfo

from gateway.errors import WriteUnconfirmed
from gateway.pairing import announcement as announcements
from gateway.pairing.announcement import (
    SERVICE,
    announcement,
    find_gateways,
    read_announcement,
    register,
)
from gateway.state.records import FileRecords
from paceline.pairing import CODE_VALID_S, PAIRING_PATH, Pairing, PairingSide, PairingWrong, unseal
from tests.support.pairing import EXCHANGE, begin, begun, finish, pair, show_code, wrong
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
    guess = begun(gateway, wrong(code))
    assert guess.answer.proof != guess.keys.gateway_proof
    refused = finish(gateway, guess.keys.worker_proof)
    assert status_and_code(refused) == (403, "pairing_refused")
    assert "is wrong" in refused.json()["error"]["message"]
    new = show_code(gateway)
    assert "in a minute" in begin(gateway, PairingSide(new).message).json()["error"]["message"]
    gateway.clock.advance(60)
    assert pair(gateway, new).token, "a refused address costs the code nothing"
    assert begin(gateway, PairingSide(code).message).status_code == 403


def test_a_code_is_good_for_one_exchange_within_two_minutes(gateway) -> None:
    def refusal(response: httpx.Response) -> bool:
        return "No pairing code is valid" in response.json()["error"]["message"]

    code = show_code(gateway)
    pair(gateway, code)
    assert refusal(begin(gateway, PairingSide(code).message)), "once"
    first, last = show_code(gateway), show_code(gateway)
    left = begun(gateway, last)
    gateway.clock.advance(31)
    assert refusal(finish(gateway, left.keys.worker_proof)), "an exchange takes half a minute"
    gateway.clock.advance(30)
    assert refusal(begin(gateway, PairingSide(first).message)), "a new one replaces it"
    code = show_code(gateway)
    gateway.clock.advance(CODE_VALID_S)
    assert refusal(begin(gateway, PairingSide(code).message)), "expired"


def test_l18_a_replay_and_a_listener_who_learns_the_code_later_gain_nothing(gateway) -> None:
    code = show_code(gateway)
    exchange = begun(gateway, code)
    proof = exchange.keys.worker_proof
    sealed = finish(gateway, proof).json()["sealed"]
    token = Pairing.model_validate_json(unseal(sealed, exchange.keys.sealing)).token
    assert finish(gateway, proof).status_code == 403
    show_code(gateway)
    again = begin(gateway, exchange.side.message)
    assert again.json()["message"] != exchange.answer.message
    assert finish(gateway, proof).status_code == 403, "a replayed exchange lacks its proof"
    listener = PairingSide(code)
    keys = listener.keys(exchange.answer.message, "fake-a")
    with pytest.raises(PairingWrong):
        unseal(sealed, keys.sealing)
    told = f"{exchange.side.message} {exchange.answer} {proof} {sealed}"
    assert code not in told
    assert token not in told
    assert token.encode().hex() not in told


def test_a_join_token_may_begin_as_those_of_paired_workers_do(make_gateway, worker) -> None:
    gateway = make_gateway(join_token=SecretStr("paired-macs"))
    assert heartbeat(gateway, worker, "paired-macs", "fake-b").status_code == 422, "it is let in"
    assert heartbeat(gateway, worker, "paired-others").status_code == 401


def test_a_live_worker_keeps_its_id_when_another_pairs_under_it(gateway, worker) -> None:
    assert heartbeat(gateway, worker, JOIN_TOKEN).status_code == 200
    assert pair(gateway, show_code(gateway)).worker_id == "fake-a-2"
    assert heartbeat(gateway, worker, JOIN_TOKEN).status_code == 200


def test_a_full_disk_at_the_end_of_an_exchange_names_no_path(gateway, monkeypatch) -> None:
    exchange = begun(gateway, show_code(gateway))

    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("gateway.state.records.replace_file", write)
    refused = finish(gateway, exchange.keys.worker_proof)
    assert status_and_code(refused) == (503, "state_unavailable")
    assert "/" not in refused.json()["error"]["message"]


def test_a_message_of_another_form_is_refused_by_its_field_and_costs_no_code(gateway) -> None:
    code = show_code(gateway)
    good = {"name": "fake-a", "message": PairingSide(code).message}
    for change, param in (
        ({"name": "../x"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"message": "00"}, "message"),
        ({"message": "x" * 66}, "message"),
        ({"message": "0" * 68}, "message"),
        ({"more": 1}, "more"),
    ):
        response = gateway.client.post(EXCHANGE, json={**good, **change})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert gateway.client.post(EXCHANGE, content=b" " * 5000).status_code == 413
    page = gateway.client.post(EXCHANGE, json=good, headers={"sec-fetch-site": "cross-site"})
    assert page.status_code == 403
    assert [finish(gateway, proof).status_code for proof in ("x", "0" * 65)] == [400, 400]
    assert gateway.client.post(f"{PAIRING_PATH}/code").status_code == 401
    assert gateway.client.delete(f"{PAIRING_PATH}/workers/fake-a").status_code == 401
    assert pair(gateway, code).worker_id == "fake-a"


@pytest.mark.parametrize("message", ["41" + "00" * 32, "42" + "ff" * 32, ORDER_2, "41" + "02" * 32])
def test_a_message_that_is_no_point_of_the_group_is_refused(gateway, message) -> None:
    show_code(gateway)
    assert status_and_code(begin(gateway, message)) == (403, "pairing_refused")


def test_each_gateway_of_a_fleet_answers_each_message(make_cluster_gateway, redis, worker) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    code = show_code(first)
    stored = [redis.client.get(key) for key in redis.client.keys("*:kept:*:*")]
    assert stored
    assert code not in str(stored), "it is sealed"
    token = pair(second, code, at=first).token
    assert begin(first, PairingSide(code).message).status_code == 403
    assert heartbeat(first, worker, token).status_code == 200
    wait_until(lambda: heartbeat(second, worker, token).status_code == 200)
    assert second.admin.delete(f"{PAIRING_PATH}/workers/fake-a").status_code == 204
    wait_until(lambda: heartbeat(first, worker, token).status_code == 401)
    begun(second, wrong(show_code(first)))
    refused = begin(first, PairingSide(show_code(second)).message)
    assert "in a minute" in refused.json()["error"]["message"], "all know who has guessed"


def test_of_many_who_try_one_code_at_once_one_has_it(make_cluster_gateway) -> None:
    gateways = [make_cluster_gateway(), make_cluster_gateway()]
    message = PairingSide(show_code(gateways[0])).message
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(begin, gateways[number % 2], message) for number in range(8)]
    assert sorted(one.result().status_code for one in asked) == [200] + [403] * 7


def test_a_gateway_announces_its_address_version_and_fleet_and_no_secret(
    make_gateway, monkeypatch
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr("gateway.server.is_loopback", lambda _: False)
    monkeypatch.setattr(announcements, "register", lambda *given: made.append(given))
    gateway = make_gateway()
    make_gateway(announce=False)
    wait_until(lambda: bool(made))
    ((host, port, fingerprint),) = made
    assert (host, f":{port}" in gateway.url) == ("127.0.0.1", True)
    info = announcement(host, port, fingerprint)
    found = read_announcement(info)
    assert found is not None
    assert (found.url, found.fleet) == (gateway.url, fingerprint[:16])
    assert len(fingerprint) == 64
    assert set(info.properties) == {b"version", b"fleet", b"fingerprint"}
    secrets = gateway.admin_key, JOIN_TOKEN
    assert not any(secret.encode() in info.text for secret in secrets)


def test_a_gateway_on_loopback_announces_nothing(make_gateway, monkeypatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(announcements, "register", lambda *given: made.append(given))
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
    announced = register("127.0.0.1", port, fleet)
    assert announced is not None
    try:
        found = find_gateways(only, lambda one: one.fleet == fleet)
    finally:
        announced.close()
    assert [one.url for one in found if one.fleet == fleet] == [f"http://127.0.0.1:{port}"]


def test_a_network_that_permits_no_announcement_costs_one_line(
    make_gateway, monkeypatch, log_capture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no multicast")

    monkeypatch.setattr("gateway.server.is_loopback", lambda _: False)
    monkeypatch.setattr(announcements, "Zeroconf", fail)
    gateway = make_gateway()
    wait_until(lambda: "gateway.unannounced" in "".join(log_capture.texts))
    assert gateway.client.get("/livez").status_code == 200


def test_one_heartbeat_an_hour_waits_for_a_store_that_fails(gateway, worker, monkeypatch) -> None:
    token = pair(gateway, show_code(gateway)).token
    tried = []

    async def fail(_records: object, _kind: str, name: str, _text: str) -> None:
        tried.append(name)
        raise WriteUnconfirmed

    monkeypatch.setattr(FileRecords, "replace", fail)
    for _ in range(3):
        assert heartbeat(gateway, worker, token).status_code == 200
    assert tried == ["fake-a/seen"]
