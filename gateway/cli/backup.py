"""`paceline backup` and `paceline restore`: the state folder of a gateway as one encrypted file.

The file is encrypted by AES-256-GCM with a key that scrypt (RFC 7914) derives from a passphrase.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from gateway.cli import CommandError
from gateway.config.settings import Settings, load_settings
from gateway.config.startup_checks import check_state
from paceline.installation import describe_version
from paceline.private_files import replace_file

PASSPHRASE = "PACELINE_BACKUP_PASSPHRASE"  # noqa: S105  # the name of a variable
LIMIT_BYTES = 256 * 1024 * 1024
_BEGIN = b"paceline backup 1\n"
_SALT_BYTES, _NONCE_BYTES = 16, 12
_LEAST_CHARS = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def run(file: Path) -> int:
    """Write keys, policies, usage and secrets to a new file."""
    folder = load_settings().state_dir.expanduser()
    files = _read(folder)
    if not files:
        raise CommandError(f"{folder} has no state yet; a gateway creates it when it starts.")
    secret = _passphrase(confirm=True)
    content = json.dumps(
        {"created": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "version": describe_version()}
        | {"files": files}
    )
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    sealed = _cipher(secret, salt).encrypt(nonce, content.encode(), _BEGIN)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as writer:
            writer.write(_BEGIN + salt + nonce + sealed)
    except FileExistsError:
        raise CommandError(f"{file} cannot be written: File exists.") from None
    except OSError as error:
        with contextlib.suppress(OSError):
            file.unlink()  # a part of a backup is none
        raise CommandError(f"{file} cannot be written: {error.strerror}.") from None
    click.echo(f"{file} has {len(files)} files of {folder}: {', '.join(files)}.")
    click.echo("Nobody can read it without the passphrase, and nobody can recover that.")
    return 0


def restore(file: Path) -> int:
    """Put the files of a backup into the state folder, and keep the old ones beside them."""
    settings = load_settings()
    folder = settings.state_dir.expanduser()
    content = _open(file)
    _check_stopped(settings)
    check_state(settings)
    old, kept = _read(folder), folder / f"before-restore-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    try:
        if old:
            kept.mkdir(mode=0o700)
        for name in old:
            (folder / name).rename(kept / name)
        for name, text in content["files"].items():
            replace_file(folder / name, text)
    except OSError as error:
        raise CommandError(
            f"{folder} cannot be written: {error.strerror}. Its old files are there, or in {kept}."
        ) from None
    click.echo(f"{folder} is as it was on {content['created']}, with {content['version']}.")
    if old:
        click.echo(f"Its old files are in {kept}.")
    click.echo(
        "Keys that were revoked since then are valid again, and keys that were created since then "
        "are gone: check `paceline keys list` once the gateway runs. Workers join with the join "
        "token of that time."
    )
    return 0


def _read(folder: Path) -> dict[str, str]:
    """Return the texts at the top of the state folder; caches and logs are in folders."""
    files, left_bytes = {}, LIMIT_BYTES
    try:
        for path in sorted(folder.glob("[!.]*")):
            if path.is_file() and _NAME.fullmatch(path.name):
                with contextlib.suppress(UnicodeDecodeError):  # no file of ours
                    files[path.name] = path.read_text()
                    left_bytes -= path.stat().st_size
                if left_bytes < 0:
                    raise CommandError(f"{folder} has more than {LIMIT_BYTES >> 20} MB.")
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be read: {error.strerror}.") from None
    return files


def _open(file: Path) -> dict[str, Any]:
    """Return the content of a backup; raise `CommandError` without its passphrase."""
    try:
        with file.open("rb") as reader:
            data = reader.read(2 * LIMIT_BYTES)
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}.") from None
    salt_end = len(_BEGIN) + _SALT_BYTES
    salt, nonce = data[len(_BEGIN) : salt_end], data[salt_end : salt_end + _NONCE_BYTES]
    sealed = data[salt_end + _NONCE_BYTES :]
    if not data.startswith(_BEGIN) or not sealed:
        raise CommandError(f"{file} is not a backup of Paceline.")
    try:
        text = _cipher(_passphrase(), salt).decrypt(nonce, sealed, _BEGIN)
    except InvalidTag:
        raise CommandError("The passphrase is wrong, or the file is damaged.") from None
    content: dict[str, Any] = json.loads(text)
    if not all(map(_NAME.fullmatch, content["files"])):
        raise CommandError(f"{file} has a file whose name no state folder has.")
    return content


def _passphrase(*, confirm: bool = False) -> str:
    given = os.environ.get(PASSPHRASE)
    if given is None and not sys.stdin.isatty():
        raise CommandError(f"Without a terminal, the passphrase comes from {PASSPHRASE}.")
    if given is None:
        given = str(click.prompt("Passphrase", hide_input=True, confirmation_prompt=confirm))
    if confirm and len(given) < _LEAST_CHARS:
        raise CommandError(f"The passphrase must have at least {_LEAST_CHARS} characters.")
    return given


def _cipher(passphrase: str, salt: bytes) -> AESGCM:
    return AESGCM(Scrypt(salt=salt, length=32, n=1 << 16, r=8, p=1).derive(passphrase.encode()))


def _check_stopped(settings: Settings) -> None:
    address = (settings.host, settings.port)
    with contextlib.suppress(OSError):  # nothing listens
        socket.create_connection(address, timeout=1).close()
        raise CommandError(
            f"A gateway runs at port {settings.port}, with the state of that folder. Stop it, such "
            "as by `paceline service stop`, and try again."
        )
