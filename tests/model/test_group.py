"""Two ranks on this machine as one worker of a gateway: answers, clients that leave, a death."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from paceline.protocol import NO_PREFIX, SCOPE_HEADER
from tests.model.test_two_workers import wait_until_joined
from tests.support.openai_requests import TEXT, text_body
from tests.support.paceline_process import TIMEOUT_S
from tests.support.running_gateway import wait_until
from tests.support.scripted_engine import make_worker, serve_worker
from tests.support.scripted_worker import JOIN_TOKEN
from tests.support.served_engine import running_gateway
from tests.support.worker_process import running_worker
from workers.demo import CHECKPOINT
from workers.engine.types import ModelUnusable
from workers.group.checks import choose_split
from workers.group.engine import GroupEngine
from workers.group.hosts import Hosts
from workers.model_source import resolve_model
from workers.server.main import read_settings
from workers.settings import Split

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    client: httpx.Client
    worker_pid: int

    @property
    def ranks(self) -> list[int]:
        found = subprocess.run(
            ["pgrep", "-P", str(self.worker_pid)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    @property
    def status(self) -> dict[str, Any]:
        return self.client.get("/v1/status").json()["workers"]["group"]

    def chat(self, question: str = TEXT, **fields: Any) -> dict[str, Any]:
        body = text_body("demo", question, **{"temperature": 0, **fields})
        return self.client.post(CHAT, json=body).raise_for_status().json()

    @contextlib.contextmanager
    def begun_stream(self, **fields: Any) -> Iterator[Iterator[str]]:
        """Open a stream, and yield the rest of it once it has text."""
        body = text_body("demo", TEXT, stream=True, **fields)
        with self.client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            events = (
                line.removeprefix("data: ")
                for line in response.iter_lines()
                if line.startswith("data: ")
            )
            for event in events:
                if json.loads(event)["choices"][0]["delta"].get("content"):
                    break
            yield events


def write_hosts(folder: Path) -> Path:
    file = folder / "hosts.json"
    file.write_text(json.dumps([{"ssh": "", "ips": ["127.0.0.1"]}] * 2))
    return file


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    hosts = write_hosts(folder)
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(running_gateway(folder))
        flags = ("--group", str(hosts), "--join", gateway.url, "--id", "group")
        environment = {"PACELINE_JOIN_TOKEN": JOIN_TOKEN}
        worker = stack.enter_context(running_worker(*flags, environment=environment))
        wait_until_joined(gateway, {"group"})
        client = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=TIMEOUT_S))
        running = Group(client=client, worker_pid=worker.process.pid)
        wait_until(lambda: running.status["state"] == "ready", within_s=TIMEOUT_S)
        yield running


def test_two_ranks_answer_as_one_worker_of_the_vlm_pool(group: Group) -> None:
    whole = group.chat(max_tokens=12)
    with group.begun_stream(temperature=0, max_tokens=12) as events:
        *_, last, done = events
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["content"].startswith("1, 2, 3")
    assert whole["usage"]["completion_tokens"] == 12
    status = group.status
    assert status["group_size"] == 2
    assert status["memory_bytes"] > 0
    assert list(status["lanes"]) == ["vlm"]
    assert len(group.ranks) == 2


def test_a_completion_of_no_tokens_has_no_text(group: Group) -> None:
    body = {"model": "demo", "prompt": TEXT, "max_tokens": 0}
    answer = group.client.post("/v1/completions", json=body).raise_for_status().json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_that_was_read_before_is_taken_from_the_cache(group: Group) -> None:
    first, second = (group.chat("Say hello.", max_tokens=4) for _ in range(2))
    assert first["choices"] == second["choices"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("seed", [None, 5], ids=["batched", "seeded"])
def test_client_that_leaves_a_stream_leaves_a_group_that_answers(group, seed) -> None:
    ranks = group.ranks
    with group.begun_stream(
        temperature=1.0, max_tokens=20, **({} if seed is None else {"seed": seed})
    ):
        pass
    assert group.chat(max_tokens=4)["choices"][0]["message"]["content"]
    assert group.ranks == ranks


def test_what_the_ranks_cannot_do_is_refused_by_name(group: Group) -> None:
    body = text_body("demo", response_format={"type": "json_object"})
    response = group.client.post(CHAT, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"


def test_death_of_a_rank_ends_the_group_which_starts_again(group: Group) -> None:
    ranks = group.ranks
    with group.begun_stream(temperature=0) as events:
        os.kill(ranks[-1], signal.SIGKILL)
        rest = list(events)
    assert "error" in json.loads(rest[-1])

    def all_are_new() -> bool:
        now = group.ranks
        return len(now) == len(ranks) and not {*now} & {*ranks}

    # The last report of the old ranks says that they are ready, too.
    wait_until(lambda: all_are_new() and group.status["state"] == "ready", within_s=TIMEOUT_S)
    assert group.chat(max_tokens=12)["choices"][0]["message"]["content"].startswith("1, 2, 3")


def write_two_layers(folder: Path) -> None:
    """Write a model with a recurrent layer and one of attention, each of which one rank gets."""
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((CHECKPOINT / "config.json").read_text())
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 2, "layer_types": text["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = mx.load(str(CHECKPOINT / "model.safetensors"))
    kept = {name: one for name, one in weights.items() if not re.search(r"layers\.[23]\.", name)}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


async def test_ranks_with_other_kinds_of_layers_reuse_the_same_beginnings(tmp_path: Path) -> None:
    """A rank of attention could cut a longer sequence, and one of recurrent layers could not."""
    write_two_layers(tmp_path / "demo")
    hosts = write_hosts(tmp_path)
    engine = await asyncio.to_thread(
        GroupEngine.start,
        read_settings(["--group", str(hosts), "--split", Split.PIPELINE]),
        Hosts.read(hosts),
        resolve_model(str(tmp_path / "demo")),
        asyncio.get_running_loop(),
    )
    ranks = engine._ranks
    assert ranks is not None
    questions = ("Count from 1 to 20.", "Count from 1 to 30.", "Count to 20.")
    try:
        async with (
            serve_worker(make_worker(engine)) as url,
            httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client,
        ):

            async def ask(question: str, **headers: str) -> dict[str, Any]:
                body = text_body("demo", question, temperature=0, max_tokens=8)
                response = await client.post(CHAT, json=body, headers=headers)
                return response.raise_for_status().json()

            first = [await ask(one, **{SCOPE_HEADER: NO_PREFIX}) for one in questions]
            again = [await ask(one) for one in questions * 2]
            assert (engine.ready, engine._ranks) == (True, ranks), "no rank has died"
    finally:
        engine.stop()
        await ranks.close()
    answers = [one["choices"][0]["message"]["content"] for one in (*first, *again)]
    assert answers == answers[:3] * 3
    assert again[3]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_split_that_the_model_cannot_have_is_refused() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert choose_split(CHECKPOINT, config, 2, None) is Split.TENSOR
    assert choose_split(CHECKPOINT, config, 4, None) is Split.PIPELINE
    with pytest.raises(ModelUnusable, match="its 2 num_key_value_heads do not divide"):
        choose_split(CHECKPOINT, config, 4, Split.TENSOR)
