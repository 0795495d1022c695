"""Find a gateway, pair with it by a code, and become its worker."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import click
import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json
from zeroconf import Error

from gateway.cli import CommandError
from gateway.cli.client import plain_table, print_output
from gateway.pairing.announcement import SERVICE, find_gateways
from paceline.addresses import BaseUrl
from paceline.http import certificate_authorities
from paceline.installation import missing_worker
from paceline.names import name_of_host
from paceline.pairing import (
    PAIRING_PATH,
    Pairing,
    PairingAnswer,
    PairingProof,
    PairingWrong,
    SealedMembership,
    WorkerSide,
    read_code,
    store_pairing,
    stored_pairing,
)
from paceline.terminal import printable

Answer = TypeVar("Answer", bound=BaseModel)

_JOIN_TOKEN = "PACELINE_JOIN_TOKEN"  # noqa: S105  # a variable
_DEFAULT_PORT = 8000
_ANSWER_LIMIT_BYTES = 64 * 1024
_TIMEOUT = httpx.Timeout(10.0, connect=3.0)
_WRONG = "The code is wrong and no longer valid. Ask an admin for a new one."


def run(*, arguments: Sequence[str], worker_id: str | None) -> int:
    """Join a gateway; this process becomes the worker."""
    if lack := missing_worker():
        raise CommandError(lack)
    named = bool(arguments) and not arguments[0].startswith("-")
    url = _url_of(arguments[0]) if named else _choose()
    flags = tuple(arguments[1:] if named else arguments)
    if os.environ.get(_JOIN_TOKEN) or any(flag.partition("=")[0] == "--token" for flag in flags):
        return _become_worker(url, worker_id, flags)
    state_dir = Path(os.environ.get("PACELINE_STATE_DIR") or "~/.paceline")
    try:
        pairing = stored_pairing(state_dir, url, worker_id or "")
        if pairing is None or not _goes_on(pairing):
            wanted = worker_id or (pairing.worker_id if pairing else "")
            pairing = _pair(url, wanted or name_of_host(socket.gethostname()) or "worker")
            store_pairing(state_dir, pairing)
            print_output(f"Paired with {url} as {pairing.worker_id}.")
    except (OSError, ValueError) as error:
        raise CommandError(f"the pairings in {state_dir} cannot be used: {error}") from None
    return _become_worker(url, pairing.worker_id, flags)


def _url_of(address: str) -> str:
    """Return the base URL of an address, which may lack its scheme and port."""
    url = address if "://" in address else f"http://{address}"
    if url == f"http://{address}" and not address.rpartition(":")[2].isdecimal():
        url = f"{url}:{_DEFAULT_PORT}"
    try:
        return TypeAdapter(BaseUrl).validate_python(url.rstrip("/"))
    except ValidationError:
        raise CommandError(f"'{address}' is no address like http://192.168.1.10:8000.") from None


def _choose() -> str:
    """Return the address of a gateway on the local network; ask which if there are several."""
    print_output("Looking for gateways on the local network ...")
    try:
        found = find_gateways()
    except (OSError, Error, RuntimeError) as error:
        raise CommandError(f"the local network cannot be searched: {error}") from None
    if not found:
        raise CommandError(
            f"no gateway announces {SERVICE.removesuffix('.local.')} here. It must listen on the "
            "network (`paceline up --host 0.0.0.0`); or name it: paceline join "
            "http://192.168.1.10:8000"
        )
    table = plain_table("", "Gateway", "Address", "Version")
    for number, one in enumerate(found, 1):
        table.add_row(str(number), one.name, one.url, one.version)
    print_output(table)
    if len(found) == 1:
        return found[0].url
    if not sys.stdin.isatty():
        raise CommandError("there are several gateways; name one: paceline join ADDRESS")
    number = click.prompt("Which one", type=click.IntRange(1, len(found)))
    return found[number - 1].url


def _goes_on(pairing: Pairing) -> bool:
    """Return whether the gateway still accepts a pairing; if it does not answer, it does."""
    headers = {"authorization": f"Bearer {pairing.token}"}
    path = f"/admin/v1/workers/{pairing.worker_id}/protocol"
    try:
        status, _ = _send("GET", pairing.gateway_url + path, headers=headers)
    except httpx.HTTPError:
        return True
    return status != httpx.codes.UNAUTHORIZED


def _pair(url: str, name: str) -> Pairing:
    """Pair with a gateway by the code that a person enters."""
    try:
        code = read_code(click.prompt(f"Code of {url}"))
    except ValueError:
        raise CommandError("a code has eight letters, such as ABCD-EFGH.") from None
    except click.Abort:
        raise CommandError("no code was entered.") from None
    try:
        side = WorkerSide(code, name)
        place = f"{url}{PAIRING_PATH}/exchanges"
        answer = _exchange("POST", place, side.request, PairingAnswer)
        keys = side.keys(answer)
        proof = PairingProof(proof=keys.worker_proof.hex())
        sealed = _exchange("PUT", f"{place}/{answer.exchange}", proof, SealedMembership)
        return Pairing(**keys.open(sealed).model_dump(), gateway_url=url)
    except PairingWrong:
        raise CommandError(_WRONG) from None
    except httpx.HTTPError:
        raise CommandError(f"no gateway answers at {url}.") from None
    except ValidationError:
        raise CommandError(f"'{name}' cannot be the id of a worker.") from None


def _exchange(method: str, url: str, message: BaseModel, kind: type[Answer]) -> Answer:
    """Return the answer of a gateway to a message; raise `CommandError` with its reason."""
    status, body = _send(method, url, content=message.model_dump_json())
    try:
        if status == httpx.codes.OK:
            return kind.model_validate_json(body)
        reason = from_json(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        raise CommandError(f"the server at {url} is not a Paceline gateway.") from None
    raise CommandError(f"the gateway refused: {printable(str(reason))[:500]}")


def _send(
    method: str, url: str, *, content: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """Return status and body of a response; raise `httpx.HTTPError`."""
    body = bytearray()
    with (
        httpx.Client(timeout=_TIMEOUT, verify=certificate_authorities(), trust_env=False) as client,
        client.stream(method, url, content=content, headers=headers) as response,
    ):
        for piece in response.iter_raw():
            body += piece
            if len(body) > _ANSWER_LIMIT_BYTES:
                break
    return response.status_code, bytes(body)


def _become_worker(url: str, worker_id: str | None, flags: Sequence[str]) -> int:
    sys.stdout.flush()
    given = ("--join", url, *(("--id", worker_id) if worker_id else ()), *flags)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers", *given])  # noqa: S606
