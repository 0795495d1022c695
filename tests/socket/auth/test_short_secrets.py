"""Secrets that can be guessed do not face a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.errors import StartupError
from gateway.server import serve
from tests.support.running_gateway import RunningGateway, make_settings
from workers.lifecycle import Shutdown

LONG = SecretStr("twenty characters is")


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("listens", [{"host": "0.0.0.0"}, {"admin_host": "0.0.0.0"}], ids=str)
async def test_c21_a_short_key_does_not_listen_beyond_loopback(
    tmp_path: Path, name: str, listens: dict[str, Any]
) -> None:
    keys = {"api_key": LONG, "admin_key": SecretStr(LONG.get_secret_value()[::-1])}
    keys[name] = SecretStr("nineteen characters")
    settings = make_settings(tmp_path, admin_port=0, **keys).model_copy(update=listens)
    named = f"PACELINE_{name.upper()} has fewer than 20 characters"
    with pytest.raises(StartupError, match=named):
        await serve(settings, shutdown=Shutdown())


def test_c21_a_short_key_is_accepted_on_loopback(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, api_key=SecretStr("a"), admin_key=SecretStr("b"))
    with RunningGateway(settings) as gateway:
        gateway.use_key("a")
        assert gateway.client.get("/v1/models").status_code == 200
