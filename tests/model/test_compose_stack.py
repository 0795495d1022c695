"""The services of docker-compose.yml, run without Docker: the same commands and environment."""

import shutil
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from paceline.protocol import READY_PREFIX
from tests.support.compose_file import SECRETS
from tests.support.compose_stack import AS_CLIENT, Stack, gateway_addresses
from tests.support.openai_requests import send_chat, text_body
from tests.support.paceline_process import TIMEOUT_S
from tests.support.running_gateway import wait_until


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    stack_ = Stack(tmp_path_factory.mktemp("stack"))
    with stack_.redis(), stack_.gateways("127.0.0.1", *gateway_addresses(1)):
        yield stack_


def test_the_stack_answers_a_greedy_request_in_the_speculative_lane(stack: Stack) -> None:
    with stack.running("worker") as worker:
        worker.wait_for(f"^{READY_PREFIX}")
        wait_until(lambda: stack.ready("gateway"), within_s=TIMEOUT_S)
        base, key = f"{stack.url('gateway')}/v1", SECRETS["PACELINE_API_KEY"]
        with OpenAI(base_url=base, api_key=key, max_retries=0) as client:
            answer = send_chat(client, text_body("demo", temperature=0), stream=True)
    assert answer.headers["x-paceline-pool"] == "text-mtp"
    assert answer.headers["x-paceline-worker"] == "demo"
    assert answer.text == ", ".join(map(str, range(1, 21))) + "."
    assert answer.speculation["draft_acceptance_rate"] > 0.5


def test_all_gateways_of_the_stack_require_its_key_and_share_created_keys(stack: Stack) -> None:
    first, second = (
        f"{stack.url('gateway', host)}" for host in ("127.0.0.1", *gateway_addresses(1))
    )
    for url in (first, second):
        assert httpx.get(f"{url}/v1/models", timeout=60).status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=AS_CLIENT, timeout=60).status_code == 200
    as_admin = {"authorization": f"Bearer {SECRETS['PACELINE_ADMIN_KEY']}"}
    created = httpx.post(
        f"{first}/admin/v1/keys", headers=as_admin, json={"name": "Ann"}, timeout=60
    ).raise_for_status()
    key = {"authorization": f"Bearer {created.json()['secret']}"}
    wait_until(lambda: httpx.get(f"{second}/v1/models", headers=key, timeout=60).status_code == 200)
