"""The services of docker-compose.yml, run without Docker: the same commands and environment."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.support.compose_file import SECRETS
from tests.support.compose_stack import AS_CLIENT, Stack
from tests.support.openai_requests import send_chat, text_body
from tests.support.paceline_process import TIMEOUT_S
from tests.support.running_gateway import wait_until
from workers.protocol import READY_PREFIX


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Yield a stack with the Redis of the file and no other service."""
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    stack_ = Stack(tmp_path)
    with stack_.redis():
        yield stack_


def test_the_stack_answers_a_greedy_request_in_the_speculative_lane(stack: Stack) -> None:
    with stack.gateway("gateway-1"):
        stack.ports["front"] = stack.ports[
            "gateway-1"
        ]  # test_front.py covers the proxy in front of the gateways
        with stack.running("worker") as worker:
            worker.wait_for(f"^{READY_PREFIX}")
            wait_until(lambda: stack.ready("front"), within_s=TIMEOUT_S)
            base, key = f"{stack.url('front')}/v1", SECRETS["PACELINE_API_KEY"]
            with OpenAI(base_url=base, api_key=key, max_retries=0) as client:
                answer = send_chat(client, text_body("demo", temperature=0), stream=True)
    assert answer.headers["x-paceline-pool"] == "text-mtp"
    assert answer.headers["x-paceline-worker"] == "demo"
    assert answer.text == ", ".join(map(str, range(1, 21))) + "."
    assert answer.speculation["draft_acceptance_rate"] > 0.5


def test_both_gateways_of_the_stack_require_its_key_and_share_created_keys(stack: Stack) -> None:
    with stack.gateway("gateway-1"), stack.gateway("gateway-2"):
        for name in ("gateway-1", "gateway-2"):
            assert httpx.get(f"{stack.url(name)}/v1/models").status_code == 401
            models = httpx.get(f"{stack.url(name)}/v1/models", headers=AS_CLIENT)
            assert models.status_code == 200
        as_admin = {"authorization": f"Bearer {SECRETS['PACELINE_ADMIN_KEY']}"}
        created = httpx.post(
            f"{stack.url('gateway-1')}/admin/v1/keys", headers=as_admin, json={"name": "Ann"}
        ).raise_for_status()
        with_created_key = {"authorization": f"Bearer {created.json()['secret']}"}
        second_models_url = f"{stack.url('gateway-2')}/v1/models"
        wait_until(
            lambda: httpx.get(second_models_url, headers=with_created_key).status_code == 200
        )
