"""The files of the gateway that one request runs, as documented in `docs/architecture.md`."""

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pydantic import SecretStr

import gateway as package
from tests.support.running_gateway import RunningGateway, bearer_headers, chat_body, make_settings
from tests.support.scripted_worker import DONE, ScriptedWorker

ROOT = Path(package.__file__).parent
FILES_LIMIT = 37


def run_on_loop(gateway: RunningGateway, function: Callable[[], object]) -> None:
    """Run a function in the gateway's thread and wait for it."""
    done = threading.Event()

    def run() -> None:
        function()
        done.set()

    gateway.loop.call_soon_threadsafe(run)
    assert done.wait(60)


def traced_chat(gateway: RunningGateway, headers: dict[str, str]) -> list[str]:
    """Stream a chat; return the files whose functions ran, in the order of their first calls."""
    files: dict[str, None] = {}

    def record(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/"):
            files.setdefault(str(Path(path).relative_to(ROOT)))

    run_on_loop(gateway, lambda: sys.setprofile(record))
    response = gateway.client.post(
        "/v1/chat/completions", json=chat_body(stream=True), headers=headers
    )
    # The client has the last byte before the gateway accounts for the request.
    run_on_loop(gateway, lambda: None)
    run_on_loop(gateway, lambda: sys.setprofile(None))
    assert response.content.endswith(DONE)
    return list(files)


def files_of_the_page() -> set[str]:
    """Return the files that `docs/architecture.md` names for one request."""
    page = (ROOT.parent / "docs/architecture.md").read_text()
    section = page[page.index("A streamed chat with") : page.index("At the worker,")]
    return set(re.findall(r"`([\w/]+\.py)`", section))


def test_a_streamed_chat_with_a_key_runs_few_files(tmp_path: Path, worker: ScriptedWorker) -> None:
    with RunningGateway(make_settings(tmp_path, admin_key=SecretStr("a" * 32))) as gateway:
        gateway.join(worker)
        headers = bearer_headers(gateway.create_key(requests_a_minute=1000))
        runs = [traced_chat(gateway, headers) for _ in range(5)]
    # A periodic job may run beside one request, but not beside all of them.
    files = [path for path in runs[-1] if all(path in run for run in runs)]
    assert len(files) <= FILES_LIMIT, files
    assert set(files) == files_of_the_page()
    assert files[0] == "http/downstream.py"
    steps = ["http/downstream.py", "app.py", "proxy/handler.py", "proxy/forward.py"]
    assert [path for path in files if path in steps] == steps
    assert {"http/upstream.py", "fleet/scheduler.py", "routing/select.py"} < set(files)
    assert "telemetry/accounting.py" in files
