"""Find a gateway, pair with it by a code, and become its worker."""

from __future__ import annotations

import hmac
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from pydantic import TypeAdapter, ValidationError
from zeroconf import Error

from gateway.cli import CommandError
from gateway.cli.client import Gateway, plain_table, print_output
from gateway.pairing.announcement import SERVICE, find_gateways
from paceline.addresses import BaseUrl
from paceline.certificates import Identity, identity_file
from paceline.installation import missing_worker
from paceline.names import name_of_host
from paceline.pairing import (
    PAIRING_PATH,
    PAIRINGS,
    Pairing,
    PairingAnswer,
    PairingSide,
    PairingWrong,
    pairings_file,
    read_code,
    seal,
    stored_pairings,
    unseal,
)
from paceline.private_files import make_private, replace_file

_JOIN_TOKEN = "PACELINE_JOIN_TOKEN"  # noqa: S105  # a variable
_DEFAULT_PORT = 8000


def run(*, arguments: Sequence[str], worker_id: str | None) -> int:
    """Join a gateway; this process becomes the worker."""
    if lack := missing_worker():
        raise CommandError(lack)
    named = bool(arguments) and not arguments[0].startswith("-")
    url = _url_of(arguments[0]) if named else _choose()
    flags = tuple(arguments[1:] if named else arguments)
    if not (os.environ.get(_JOIN_TOKEN) or any(flag.startswith("--token") for flag in flags)):
        name = worker_id or name_of_host(socket.gethostname()) or "worker"
        worker_id = _pair(Gateway(url, ""), name)
        print_output(f"Paired with {url} as {worker_id}.")
    sys.stdout.flush()
    given = ("--join", url, *(("--id", worker_id) if worker_id else ()), *flags)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "workers", *given])  # noqa: S606


def _url_of(address: str) -> str:
    """Return the base URL of an address, which may lack its scheme and port."""
    url = address.rstrip("/")
    if "://" not in url:
        port = "" if url.rpartition(":")[2].isdecimal() else f":{_DEFAULT_PORT}"
        url = f"http://{url}{port}"
    try:
        return TypeAdapter(BaseUrl).validate_python(url)
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
    if len(found) > 1 and not sys.stdin.isatty():
        raise CommandError("there are several gateways; name one: paceline join ADDRESS")
    last = len(found)
    number = click.prompt("Which one", type=click.IntRange(1, last)) if last > 1 else 1
    return found[number - 1].url


def _pair(gateway: Gateway, name: str) -> str:
    """Pair with a gateway by the code that a person enters, and keep that; return the id."""
    state_dir = Path(os.environ.get("PACELINE_STATE_DIR") or "~/.paceline")
    file = pairings_file(state_dir)
    try:
        make_private(file.parent)
        kept = stored_pairings(state_dir)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise CommandError(f"{file} cannot be used: {reason}") from None
    try:
        side = PairingSide(read_code(click.prompt(f"Code of {gateway.url}")))
        identity = Identity.new()
        pairing = exchange(gateway, name, side, identity.public_key)
    except ValidationError:
        raise gateway.unknown_server() from None
    except (ValueError, click.Abort):
        raise CommandError("a code has eight letters, such as ABCD-EFGH.") from None
    except PairingWrong:
        raise CommandError(
            "the code is wrong, and has ended; let an admin show a new one"
        ) from None
    place = pairing.gateway_url, pairing.worker_id
    own = identity_file(state_dir, *place)
    if pairing.certificate:
        identity = identity.renewed(pairing.certificate, pairing.authority)
        replace_file(own, identity.model_dump_json())
    else:  # the gateway is of an older version
        own.unlink(missing_ok=True)
    pairing = pairing.model_copy(update={"certificate": "", "authority": ""})
    others = (one for one in kept if (one.gateway_url, one.worker_id) != place)
    replace_file(file, PAIRINGS.dump_json((*others, pairing), indent=1).decode())
    return pairing.worker_id


def exchange(gateway: Gateway, name: str, side: PairingSide, public_key: str) -> Pairing:
    """Pair with a gateway, and return its result; raise `PairingWrong` unless it knows the code."""
    path = f"{PAIRING_PATH}/exchange"
    request = {"name": name, "message": side.message}
    answer = PairingAnswer.model_validate(gateway.read("POST", path, json=request))
    keys = side.keys(answer.message, name)
    if not hmac.compare_digest(answer.proof, keys.gateway_proof):
        raise PairingWrong
    own = {"sealed": seal(public_key, keys.worker_sealing)}
    sealed = gateway.read("PUT", f"{path}/{keys.worker_proof}", json=own).get("sealed")
    pairing = Pairing.model_validate_json(unseal(str(sealed), keys.sealing))
    return pairing.model_copy(update={"gateway_url": gateway.url})
