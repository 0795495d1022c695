"""A real nginx for tests, which skip without one."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compose_stack import answers
from tests.support.running_gateway import wait_until


def require_nginx() -> None:
    """Skip the test if nginx is not installed."""
    if not shutil.which("nginx"):
        pytest.skip("nginx is not installed")


@contextlib.contextmanager
def nginx_process(configuration: str, folder: Path, port: int) -> Iterator[None]:
    """Run nginx with this configuration as this user, and wait until it listens on the port."""
    file = folder / "nginx.conf"
    file.write_text(configuration)
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    with subprocess.Popen(["nginx", "-c", file, "-g", f"user {user} {group};"]) as process:
        try:
            wait_until(lambda: answers(port))
            yield
        finally:
            process.terminate()
