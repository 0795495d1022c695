"""Hooks for all tests: marks by folder, order, and the hypothesis profile."""

import ctypes
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal import charmap

# A slow test on a busy machine is no failure.
settings.register_profile("no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")
# The slowest folders first, so that their files run in parallel until the end.
FOLDERS = ("model", "browser", "socket", "unit")
# `M_ARENA_MAX` and `M_MMAP_THRESHOLD` of glibc's malloc.h.
_HEAPS, _LARGE_BLOCKS = -8, -3


def pytest_configure() -> None:
    """Let Ctrl-C reach processes that tests start: background jobs of a shell ignore SIGINT.

    Let glibc return what is freed: by default each thread has a heap of its own, where blocks of up
    to 32 MB lie among those that stay.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("TMPDIR", tempfile.gettempdir())  # for the kernels of all workers
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_HEAPS, 2)
        ctypes.CDLL(None).mallopt(_LARGE_BLOCKS, 256 * 1024)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Let Hypothesis make its tables of characters, which takes 200 MB, while a process is small.

    The first process of a new checkout writes them into a folder, where the others read them.
    """
    charmap.charmap()
    charmap.intervals_from_codec("utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run one process more than there are cores: tests wait for other processes."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Exempt what is imported and collected from garbage collection.

    The collector runs when garbage is a share of all objects; now it runs soon, and is quick.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Print at the end of a failing run how to run it in the same order."""
    if exitstatus and hasattr(config.option, "randomly_seed"):
        terminalreporter.write_line(
            f"Seed: --randomly-seed={config.getoption('randomly_seed', None)}"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark each test with its folder, so that `-m unit` selects it, and run slow folders first.

    Unit tests stay in the random order of pytest-randomly. The others run in the order of their
    files: they share processes that take seconds to start. Proofs run only if `-m` names them.
    """
    if "proof" not in config.option.markexpr:
        proofs = [item for item in items if item.get_closest_marker("proof")]
        items[:] = [item for item in items if not item.get_closest_marker("proof")]
        config.hook.pytest_deselected(items=proofs)
    positions = {item: position for position, item in enumerate(items)}
    for item in items:
        item.add_marker(_folder(item))
    yield
    items.sort(
        key=lambda item: (
            FOLDERS.index(_folder(item)),
            0 if _folder(item) == "unit" else positions[item],
        )
    )


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(scope="module", autouse=True)
def returned_memory() -> Iterator[None]:
    """Return the memory that a module has freed: MLX and glibc keep it."""
    yield
    gc.collect()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Give each test the levels of the first one: a command sets them for its whole process."""
    loggers = [logging.getLogger(name) for name in ("gateway", "paceline", "workers")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def no_ca_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust no authority: no test needs one, and each client takes 40 ms to load the system's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("SSL_CERT_FILE", raising=False)
        patched.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("no_authorities")))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_disk_sync() -> Iterator[None]:
    """Let no start of a gateway and no other write wait for the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_kernel_compiler() -> Iterator[None]:
    """Let MLX compile nothing in the processes that tests start on Linux.

    Each kernel takes a C++ compiler half a second there, and a worker has fifty.
    """
    with pytest.MonkeyPatch.context() as patched:
        if sys.platform == "linux":
            patched.setenv("MLX_DISABLE_COMPILE", "1")
        yield
