"""What most tests need: one real worker, and one real engine in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.worker_process import RunningWorker, running_worker
from workers.demo import CHECKPOINT

if TYPE_CHECKING:
    from workers.engine.engine import Engine

# A machine that does other things beside the tests is slow, not wrong.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")

LONGEST_FIRST = ("e2e", "demo", "engine", "workers", "faults", "pages", "gateway")


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start: a shell's background jobs ignore it for good."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run one process more than there are cores: the end of a gateway alone waits for 0.15 s."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the folders of long tests, so that no process ends with one all alone."""
    places = {folder: place for place, folder in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


@pytest.fixture(scope="session", autouse=True)
def no_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No client here meets a certificate; reading the world's takes each of them 40 ms."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SSL_CERT_FILE", raising=False)
        patched.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no_authorities")))
        yield


@pytest.fixture(scope="session")
def worker() -> Iterator[RunningWorker]:
    """One real worker process on the demo checkpoint, both lanes, for the whole session.

    Whoever stops, kills or floods a worker starts its own with `running_worker`.
    """
    with running_worker("--id", "session") as running:
        yield running


@pytest.fixture(scope="session")
def worker_url(worker: RunningWorker) -> str:
    """Where the session's worker listens."""
    return worker.url


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """One real engine on the demo checkpoint, in this process."""
    from workers.engine.engine import Engine  # noqa: PLC0415 - MLX only where it is used
    from workers.engine.types import EngineSettings  # noqa: PLC0415

    running = Engine.start(EngineSettings(model=CHECKPOINT, served_name="demo"))
    try:
        yield running
    finally:
        running.stop()
