"""Run only the gateway; workers join it, or paceline.yaml lists them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

from gateway import event_loop
from gateway.config.settings import Settings
from gateway.config.startup_checks import local_url, secret_source
from gateway.server import Listening, restart_if_requested, serve, settle_interpreter
from paceline.lifecycle import Shutdown

_UNKEYED = (
    "No API key exists yet, so the gateway serves only this machine. Create the first "
    "one with `paceline keys create NAME` before you put a proxy in front of the gateway.\n"
)


def run(*, settings: Settings) -> int:
    """Serve until Ctrl-C or SIGTERM, then let running requests finish."""
    settle_interpreter()
    event_loop.run(_serve(settings))
    restart_if_requested()
    return 0


async def _serve(settings: Settings) -> None:
    shutdown = Shutdown()
    notices: list[asyncio.Task[None]] = []

    def started(listening: Listening) -> None:
        if not listening.keyed:
            sys.stdout.write(_UNKEYED)
        if listening.admin_url:
            sys.stdout.write(f"The admin port listens on {listening.admin_url}\n")
        sys.stdout.write(f"Admin page: {admin_page(settings, listening)}\n")
        _print(f"Paceline listens on {listening.url}")
        notice = announce_shutdown(shutdown, listening.running_requests, _print)
        notices.append(asyncio.create_task(notice))

    with shutdown.on_signals(restarts=True):
        try:
            await serve(settings, shutdown=shutdown, started=started)
        finally:
            for notice in notices:
                notice.cancel()
    _print("Ended.")


async def announce_shutdown(
    shutdown: Shutdown, running_requests: Callable[[], int], print_line: Callable[[str], None]
) -> None:
    """Print how many requests a requested shutdown waits for."""
    await shutdown.requested.wait()
    count = running_requests()
    if count:
        answers = "1 answer is" if count == 1 else f"{count} answers are"
        print_line(f"Shutting down: {answers} still running. Ctrl-C again stops at once.")
    else:
        print_line("Ending ...")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def admin_page(given: Settings, listening: Listening) -> str:
    """Return the address of the page for admins and the place of the admin key.

    On a terminal this is a link with a stored key in its fragment, which browsers never send. The
    readers of a pipe or a log need not be admins.
    """
    settings = listening.settings
    separate = bool(listening.admin_url)
    host = settings.admin_host if separate else settings.host
    port = urlsplit(listening.admin_url or listening.url).port or 0
    page = f"{local_url(host, port)}/admin"
    if given.admin_key is None and settings.admin_key is not None and sys.stdout.isatty():
        return f"{page}#admin-key={settings.admin_key.get_secret_value()}"
    return f"{page} (admin key: {secret_source(given, 'admin_key')})"
