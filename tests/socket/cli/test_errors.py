"""`paceline errors` against a real gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli import main
from tests.support.running_gateway import RunningGateway
from tests.support.scripted_worker import Script, ScriptedWorker


def test_an_admin_sees_all_errors_and_a_client_those_of_its_key(
    gateway_with_worker: RunningGateway,
    worker: ScriptedWorker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gateway = gateway_with_worker
    command = ["errors", "--url", gateway.url]
    assert main(command) == 0
    assert capsys.readouterr().out == "No request has failed lately.\n"

    ann, bob = (gateway.create_key(name=name)["secret"] for name in ("Ann", "Bob"))
    gateway.use_key(ann)
    worker.script = Script(status=500)
    request_id = gateway.chat().headers["x-request-id"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    for text in (request_id, "Ann", "demo", "fake-a", "502 worker_failed"):
        assert text in printed

    monkeypatch.setenv("PACELINE_STATE_DIR", str(tmp_path / "without-an-admin-key"))
    for secret, count in ((ann, 1), (bob, 0)):
        monkeypatch.setenv("PACELINE_API_KEY", secret)
        assert main([*command, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["errors"]) == count
