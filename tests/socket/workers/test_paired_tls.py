"""TLS between gateways and paired workers: who is admitted, who is refused, and what is renewed."""

import hmac
import json
import ssl
import time
from typing import Any

import httpx
import pytest
from cryptography import x509

from paceline.certificates import Authority, Identity
from paceline.http import paired_tls
from paceline.pairing import CERTIFICATE_LIFE_S as LIFE_S
from paceline.pairing import PAIRING_PATH
from tests.support.paired_worker import PairedWorker, paired_worker, running
from tests.support.pairing import Paired, pair, show_code
from tests.support.running_gateway import RunningGateway, wait_until
from tests.support.scripted_engine import ScriptedEngine, make_worker
from tests.support.scripted_worker import JOIN_TOKEN

DAY_S = 86_400.0


def shown(gateway: RunningGateway, worker_id: str = "mini") -> dict[str, Any]:
    workers: list[dict[str, Any]] = gateway.admin.get("/admin/v1/workers").json()["workers"]
    return next((one for one in workers if one["worker_id"] == worker_id), {})


def serves(gateway: RunningGateway, scheme: str, worker_id: str = "mini") -> bool:
    worker = shown(gateway, worker_id)
    return worker.get("state") == "ready" and worker["url"].startswith(f"{scheme}://")


def name_of(identity: Identity) -> str:
    found = x509.load_pem_x509_certificate(identity.certificate.encode())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return str(names.get_values_for_type(x509.DNSName)[0])


def authority_of(gateway: RunningGateway) -> Authority:
    """Return the authority, as a gateway with the same join token and records derives it."""
    records = json.loads((gateway.state_dir / "state.json").read_text())["pairings"]
    number = records["/authority"]["number"]
    text = f"paceline authority {number}".encode()
    return Authority(hmac.digest(JOIN_TOKEN.encode(), text, "sha256"))


def refused(worker: PairedWorker, identity: Identity | None) -> bool:
    try:
        return worker.asked(identity) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def test_l20_a_paired_worker_is_called_over_tls_and_admits_nobody_else(gateway, tmp_path) -> None:
    with paired_worker(gateway, tmp_path) as worker:
        wait_until(lambda: serves(gateway, "https"))
        answer = gateway.chat(model="scripted")
        assert answer.json()["choices"][0]["message"]["content"] == "one two"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{worker.port}/livez", trust_env=False)
        real = authority_of(gateway)
        now_s = time.time()
        assert worker.asked(real.new_identity("gateway", now_s)) == b"HTTP/1.1 200 OK", (
            "as the gateway"
        )
        assert refused(worker, None), "no certificate"
        other = Authority(b"x" * 32).new_identity("gateway", now_s)
        assert refused(worker, other.model_copy(update={"authority": real.certificate})), "wrong"
        assert refused(worker, real.new_identity("gateway", now_s - LIFE_S - DAY_S)), "expired"
        assert refused(worker, real.new_identity("gateway", now_s + 9 * DAY_S)), "not valid yet"
        context = paired_tls()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"https://127.0.0.1:{worker.port}/livez", verify=context, trust_env=False)


def test_l20_the_certificate_of_another_worker_at_its_address_is_refused(gateway, tmp_path) -> None:
    with paired_worker(gateway, tmp_path) as first:
        wait_until(lambda: serves(gateway, "https"))
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            first.asked(
                authority_of(gateway).new_identity("gateway", time.time()), "0" * 32 + ".worker"
            )
        identity = Identity.new()
        second = pair(gateway, show_code(gateway), "studio", public_key=identity.public_key)
        with running(
            gateway, Paired(second, first.paired.file)
        ):  # it has stolen the files of the first one
            wait_until(lambda: shown(gateway, "studio").get("state") == "unreachable")
            assert "certificate that this gateway trusts" in shown(gateway, "studio")["problem"]
            assert serves(gateway, "https")


def test_a_worker_that_was_paired_without_a_key_changes_to_tls_while_it_serves(
    gateway, tmp_path
) -> None:
    with paired_worker(gateway, tmp_path, with_key=False) as worker:
        wait_until(lambda: serves(gateway, "https"))
        assert gateway.chat(model="scripted").status_code == 200
        assert worker.paired.identity.certificate
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{worker.port}/livez", trust_env=False)
        body = make_worker(ScriptedEngine()).report().model_dump(mode="json")
        body |= {"url": f"http://127.0.0.1:{worker.port}", "worker_id": "mini"}
        body["boot_id"] = "boot-mini"
        headers = {"authorization": f"Bearer {worker.paired.pairing.token}"}
        response = gateway.client.put("/admin/v1/workers/mini", json=body, headers=headers)
        assert "speaks plain HTTP" in response.json()["error"]["message"], "nobody can lower it"
        assert serves(gateway, "https")


def test_a_certificate_is_renewed_in_its_last_third_and_only_for_the_key_of_the_pairing(
    gateway, tmp_path, worker
) -> None:
    identity = Identity.new()
    pairing = pair(gateway, show_code(gateway), public_key=identity.public_key)
    headers = {"authorization": f"Bearer {pairing.token}"}

    def answer(days_left: float, key: str = identity.public_key) -> dict[str, Any]:
        until_s = int(time.time() + days_left * DAY_S)
        fields = {"public_key": key, "certificate_until_s": until_s, "ready": False}
        report = worker.report().model_copy(update=fields).model_dump(mode="json")
        response = gateway.client.put("/admin/v1/workers/fake-a", json=report, headers=headers)
        assert response.status_code == 200
        return response.json()

    third = LIFE_S / 3 / DAY_S
    assert "certificate" not in answer(third + 1)
    assert "certificate" not in answer(third - 1, Identity.new().public_key)
    assert "certificate" not in answer(third - 1, "")
    assert "certificate" in answer(LIFE_S / DAY_S + 3), "dated by a clock that was ahead"
    new = answer(third - 1)
    renewed = identity.renewed(pairing.certificate, pairing.authority)
    renewed = renewed.renewed(new["certificate"], new["authority"])
    assert renewed.until_s == pytest.approx(time.time() + LIFE_S, abs=600)
    other = Authority(b"x" * 32)
    forged = other.issue(identity.public_key, "x.worker", time.time())
    with pytest.raises(ValueError, match="another authority"):
        renewed.renewed(forged, other.certificate)
    with pytest.raises(ValueError, match="another key"):
        Identity.new().renewed(new["certificate"], new["authority"])


def test_l20_no_worker_admits_one_whose_pairing_has_ended(gateway, tmp_path) -> None:
    with (
        paired_worker(gateway, tmp_path) as first,
        paired_worker(gateway, tmp_path, "studio") as second,
    ):
        wait_until(lambda: serves(gateway, "https") and serves(gateway, "https", "studio"))
        name = name_of(first.paired.identity)
        assert first.asked(second.paired.identity, name) == b"HTTP/1.1 200 OK", "to move nodes"
        stolen = second.paired.identity
        unpaired = f"{PAIRING_PATH}/workers/studio"
        assert gateway.admin.delete(unpaired).status_code == 204
        wait_until(lambda: refused(first, stolen))
        assert serves(gateway, "https"), "the gateway is admitted as before"
        again = pair(gateway, show_code(gateway), "studio", public_key=stolen.public_key)
        assert name_of(stolen.renewed(again.certificate, again.authority)) != name_of(stolen)


def test_each_gateway_of_a_fleet_has_a_certificate_of_its_authority(
    make_cluster_gateway, redis, tmp_path
) -> None:
    first, second = make_cluster_gateway(), make_cluster_gateway()
    with paired_worker(first, tmp_path):
        wait_until(lambda: second.chat(model="scripted").status_code == 200)
        assert serves(second, "https")
    stored = redis.client.hgetall("paceline:{pairings}:records")
    assert {"/authority", "mini", "mini/key"} <= set(stored)
    assert "PRIVATE" not in str(stored)
