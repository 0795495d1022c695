"""Secrets that can be guessed do not face a network."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import SecretStr

from gateway.assembly import TIMING
from gateway.errors import StartupError
from gateway.proxy import handler
from gateway.server import serve
from paceline.lifecycle import Shutdown
from tests.support.fake_clock import FakeClock, MovedClock
from tests.support.running_gateway import RunningGateway, chat_body, make_settings, wait_until

LONG = SecretStr("twenty characters is")


@pytest.mark.parametrize("name", ["api_key", "admin_key", "join_token"])
@pytest.mark.parametrize("listens", [{"host": "0.0.0.0"}, {"admin_host": "0.0.0.0"}], ids=str)
async def test_c24_a_short_key_does_not_listen_beyond_loopback(tmp_path, name, listens) -> None:
    keys = {"api_key": LONG, "admin_key": SecretStr(LONG.get_secret_value()[::-1])}
    keys[name] = SecretStr("nineteen characters")
    settings = make_settings(tmp_path, admin_port=0, **keys).model_copy(update=listens)
    named = f"PACELINE_{name.upper()} has fewer than 20 characters"
    with pytest.raises(StartupError, match=named):
        await serve(settings, shutdown=Shutdown())


def test_c24_a_short_key_is_accepted_on_loopback(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, api_key=SecretStr("a"), admin_key=SecretStr("b"))
    with RunningGateway(settings) as gateway:
        gateway.use_key("a")
        assert gateway.client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/admin/v1/keys"])
def test_c25_wrong_secrets_of_an_address_wait_ever_longer_and_right_ones_never(
    tmp_path, monkeypatch, share_of_wrong_secrets, path
) -> None:
    monkeypatch.setattr(handler, "_WRONG_SECRETS_SHARE", share_of_wrong_secrets)
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    monkeypatch.setattr(handler, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    settings = make_settings(tmp_path, api_key=LONG)
    with RunningGateway(settings, replace(TIMING, clock=MovedClock(FakeClock()))) as gateway:
        method = "POST" if "chat" in path else "GET"
        for number in range(40):
            wrong = {"authorization": f"Bearer guess-{number}"}
            assert gateway.client.request(method, path, headers=wrong).status_code == 401
        gateway.client.request(method, path)
        right = gateway.admin_key if "admin" in path else LONG.get_secret_value()
        gateway.use_key(right)
        assert gateway.client.request(method, path, json=chat_body()).status_code != 401
    assert waits[:10] == [0.0] * 10
    assert waits == sorted(waits)
    assert waits[-1] == 1.0
    assert len(waits) == 40, "neither a request without a secret nor a right one waits"


def test_c25_wrong_secrets_that_wait_take_no_place_of_a_request(tmp_path, monkeypatch) -> None:
    """Many at a time, from the address of a team with a right key."""
    released, guesses = threading.Event(), 6
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)
        while not released.is_set():
            await asyncio.sleep(0.01)

    monkeypatch.setattr(handler, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    settings = make_settings(tmp_path, api_key=LONG, requests_limit=2)
    with RunningGateway(settings) as gateway, ThreadPoolExecutor(guesses) as executor:
        post = partial(gateway.client.post, headers={"authorization": "Bearer guess"})
        answers = [executor.submit(post, "/v1/chat/completions") for _ in range(guesses)]
        wait_until(lambda: len(waits) == guesses)
        right = {"authorization": f"Bearer {LONG.get_secret_value()}"}
        counted = gateway.client.post("/v1/messages/count_tokens", json=chat_body(), headers=right)
        released.set()
        assert {one.result().status_code for one in answers} == {401}
    assert counted.status_code == 200
