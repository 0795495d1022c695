"""Prompts of another `cache_salt` share nothing at the real engine; deletion finds them all."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from tests.support.engine_lane import run_until_idle
from tests.support.openai_requests import picture_body, text_and_cached_tokens, turns_body
from tests.support.running_gateway import RunningGateway, bearer_headers, make_settings, wait_until
from tests.support.served_engine import served
from workers.demo import CHECKPOINT
from workers.engine.engine import Engine
from workers.engine.model.target import PictureFeatures
from workers.engine.prefix.cache import PrefixCache
from workers.engine.types import EngineSettings, Prompt

STORY = "The red fox sees the old tree and the blue boat finds the warm stone. " * 9
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
SALTS = ("tenant 1", "tenant 2", None)


class Client:
    """Asks a model twice about a story that is new at each path, the second time in a next turn."""

    def __init__(self, url: str, model: str = "demo", story: str = STORY, **headers: str) -> None:
        self._url = url
        self._headers = headers
        self._model = model
        self._story = story
        self._answers: dict[str, str] = {}
        """By path, the same with every salt."""

    def cached_tokens(self, path: str, salt: Any, *, again: bool = False) -> int:
        """Send a request; return how much of its prompt was cached."""
        question = f"At {path}: {self._story}"
        turns = [question, self._answers[path], question] if again else [question]
        fields = turns_body(path, turns, max_tokens=4)
        answer = self.post(path, temperature=0, cache_salt=salt, **fields)
        found, cached = text_and_cached_tokens(answer.json())
        if not again:
            assert self._answers.setdefault(path, found) == found, "a salt changes no answer"
        return cached

    def post(self, path: str, **fields: Any) -> httpx.Response:
        body = {"model": self._model, **fields}
        response = httpx.post(self._url + path, json=body, headers=self._headers, timeout=60)
        assert response.status_code == 200, response.text
        return response


def check_salts(client: Client, path: str) -> None:
    """Check that a salt finds what was asked with it, and nothing else."""
    assert [client.cached_tokens(path, salt) for salt in SALTS] == [0, 0, 0]
    assert client.cached_tokens(path, "tenant 3", again=True) == 0
    cached = [client.cached_tokens(path, salt, again=True) for salt in SALTS]
    assert min(cached) > 100, cached


@pytest.mark.parametrize("path", PATHS)
def test_c8_a_second_salt_finds_no_token_of_a_prompt_and_the_same_finds_them(demo, path) -> None:
    check_salts(Client(demo.url, demo.model), path)


@pytest.mark.parametrize("path", PATHS[:2])
def test_c8_a_worker_without_a_gateway_isolates_by_the_salt(real_worker, path) -> None:
    check_salts(Client(real_worker.url, real_worker.model, f"No gateway. {STORY}"), path)
    for salt in ("", "x" * 257, 7):
        body: dict[str, Any] = {"model": "demo", "messages": [], "prompt": "x", "cache_salt": salt}
        del body["messages" if path == "/v1/completions" else "prompt"]
        refused = httpx.post(f"{real_worker.url}{path}", json=body, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


@contextlib.contextmanager
def worker_with_files(folder: Path, gateway: RunningGateway) -> Iterator[Engine]:
    """Run an engine with a folder for its prefix cache, as a worker of a gateway."""
    settings = EngineSettings(
        model=CHECKPOINT, served_name="demo", prefix_cache_dir=folder, prefix_cache_secret=b"secret"
    )
    engine = Engine.start(settings)
    try:
        with served(engine, "salted", join=gateway.url):
            wait_until(lambda: gateway.client.get("/readyz").status_code == 200)
            yield engine
    finally:
        engine.stop()


def test_c8_salted_prompts_survive_a_restart_and_are_deleted_with_the_last_key_of_their_team(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.assembly._DELETION_S", 0.05)
    folder = tmp_path / "prefix-cache"
    folder.mkdir()

    def files() -> int:
        return len(list(folder.glob("*.safetensors")))

    with RunningGateway(make_settings(tmp_path / "state")) as gateway:
        keys = {team: gateway.create_key(team=team) for team in ("red", "blue")}
        red, blue = [Client(gateway.url, **bearer_headers(key)) for key in keys.values()]

        def revoke(team: str) -> None:
            gateway.admin.delete(f"/admin/v1/keys/{keys[team]['id']}").raise_for_status()

        def ask_about_a_picture(engine: Engine) -> None:
            body = picture_body("demo", "red", size=64, cache_salt="tenant 1")
            red.post("/v1/chat/completions", **body)
            assert engine.checkpoint.target.picture_features.size_bytes

        with worker_with_files(folder, gateway) as engine:
            for path in PATHS:
                assert [red.cached_tokens(path, salt) for salt in SALTS] == [0, 0, 0]
                assert blue.cached_tokens(path, "tenant 1") == 0
        with worker_with_files(folder, gateway) as engine:
            for path in PATHS:
                assert red.cached_tokens(path, "tenant 3", again=True) == 0
                assert red.cached_tokens(path, "tenant 1", again=True) > 100
            ask_about_a_picture(engine)
            before = files()
            revoke("red")
            wait_until(lambda: not engine.prefix_cache.size_bytes and files() < before)
            assert engine.checkpoint.target.picture_features.size_bytes == 0
            for path in PATHS:
                assert blue.cached_tokens(path, "tenant 1", again=True) > 100
        assert files()
        with worker_with_files(folder, gateway):
            revoke("blue")
            wait_until(lambda: not files())


def test_c8_features_of_pictures_are_deleted_with_all_parts_of_their_scope() -> None:
    features = PictureFeatures()
    for scope in ("red", "red.1", "red.2", "reddish.1", "blue.1", ".1"):
        features.put((scope, b"picture"), mx.zeros(4))
    features.drop("red")
    assert features.size_bytes == 3 * mx.zeros(4).nbytes
    assert features.get(("reddish.1", b"picture")) is not None
    assert features.get(("red.1", b"picture")) is None


def test_c8_a_running_row_with_a_salt_stores_nothing_once_its_scope_is_deleted(
    make_lane, submit, prompt_renderer
) -> None:
    prompt = prompt_renderer.prepare(Prompt(text=STORY, scope="red.1"))
    for deleted in ("red", "blue"):
        cache = PrefixCache(1 << 30)
        lane = make_lane(prefix_cache=cache)
        submit(lane, prompt, max_tokens=4)
        lane.stop_caching(deleted)
        run_until_idle(lane)
        assert bool(cache.size_bytes) == (deleted == "blue")
