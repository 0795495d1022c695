"""`paceline explain` and `paceline errors` as a user runs them, against a real gateway."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import Script, ScriptedWorker


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": 0}, "text-mtp on fake-a, because the request can use drafts."),
        ({}, "vlm on fake-a, because temperature is 1.0."),
        ({"temperature": 0.5, "n": 2}, "vlm on fake-a, because temperature is 0.5, and n is 2."),
    ],
)
def test_the_first_line_is_a_sentence_with_the_reason(
    module_gateway: RunningGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    sentence: str,
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(chat_body(**fields)))
    command = ["explain", str(file), "--url", module_gateway.url]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == sentence
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker"] == "fake-a"


def test_a_file_may_hold_the_request_of_any_wire(
    module_gateway: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"model": "demo", "temperature": 0}
    said = [{"role": "user", "content": "Hi"}]
    file = tmp_path / "request.json"
    for fields in ({"messages": said, "system": "Be brief."}, {"input": "Hi"}, {"prompt": "Hi"}):
        file.write_text(json.dumps(plain | fields))
        assert main(["explain", str(file), "--url", module_gateway.url]) == 0
        sentence = capsys.readouterr().out.splitlines()[0]
        assert sentence == "text-mtp on fake-a, because the request can use drafts."


def test_without_a_worker_the_sentence_says_so(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(chat_body(model="default"))))
    assert main(["explain", "-", "--url", gateway.url]) == 0
    assert capsys.readouterr().out == "No worker can take this request now.\n"


def test_a_body_that_is_not_json_is_reported_with_its_place(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("{"))
    with pytest.raises(SystemExit, match="standard input is not JSON: line 1"):
        main(["explain", "-", "--url", gateway.url])


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
