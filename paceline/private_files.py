"""Files and folders that no other user of the machine may write, for secrets."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path


class NotPrivate(PermissionError):
    """Another user may write a file or a folder, and may have left secrets of theirs there."""


def make_private(folder: Path) -> None:
    """Create a folder that nobody else may write; raise `NotPrivate` if others may."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(path: Path) -> None:
    """Raise `NotPrivate` for a file or a folder that users besides root may write."""
    if {path.lstat().st_uid, path.stat().st_uid} - {0, os.geteuid()}:  # a link, and its target
        raise NotPrivate(errno.EPERM, "it belongs to another user")
    if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivate(errno.EPERM, "other users may write to it")


def replace_file(path: Path, text: str) -> None:
    """Write a new file and move it into place, so that the file is always complete."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        # The folder too: a power cut must not bring back a revoked key.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        draft.unlink(missing_ok=True)
