"""What docker-compose.yml starts, started without Docker: the same commands and environment."""

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
    """Redis as the file starts it, and nothing else yet."""
    if not shutil.which("redis-server"):
        pytest.skip("redis-server is not installed")
    whole = Stack(tmp_path)
    with whole.redis():
        yield whole


def test_the_stack_answers_a_greedy_question_on_the_lane_that_speculates(stack: Stack) -> None:
    with stack.gateway("gateway-1"):
        stack.ports["front"] = stack.ports["gateway-1"]  # what stands in front: test_front.py
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


def test_both_gateways_of_the_stack_want_its_key_and_share_what_admins_make(stack: Stack) -> None:
    with stack.gateway("gateway-1"), stack.gateway("gateway-2"):
        for name in ("gateway-1", "gateway-2"):
            assert httpx.get(f"{stack.url(name)}/v1/models").status_code == 401
            shown = httpx.get(f"{stack.url(name)}/v1/models", headers=AS_CLIENT)
            assert shown.status_code == 200
        as_admin = {"authorization": f"Bearer {SECRETS['PACELINE_ADMIN_KEY']}"}
        made = httpx.post(
            f"{stack.url('gateway-1')}/admin/v1/keys", headers=as_admin, json={"name": "Ann"}
        ).raise_for_status()
        with_it = {"authorization": f"Bearer {made.json()['secret']}"}
        other = f"{stack.url('gateway-2')}/v1/models"
        wait_until(lambda: httpx.get(other, headers=with_it).status_code == 200)
