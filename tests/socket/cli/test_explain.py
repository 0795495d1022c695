"""`paceline explain` as a user runs it, against a real gateway."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from tests.support.running_gateway import RunningGateway, chat_body


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": 0}, "text-mtp on fake-a, because the request can use drafts."),
        ({}, "vlm on fake-a, because temperature is 1.0."),
        (
            {"temperature": 0.5, "n": 2},
            "vlm on fake-a, because temperature is 0.5, and n is 2.",
        ),
    ],
)
def test_the_first_line_is_a_sentence_with_the_reason(
    gateway_with_worker: RunningGateway,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    sentence: str,
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(chat_body(**fields)))
    command = ["explain", str(file), "--url", gateway_with_worker.url]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == sentence
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker"] == "fake-a"


def test_a_file_may_hold_the_request_of_any_wire(
    gateway_with_worker: RunningGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = {"model": "demo", "temperature": 0}
    said = [{"role": "user", "content": "Hi"}]
    for fields in ({"messages": said, "system": "Be brief."}, {"input": "Hi"}, {"prompt": "Hi"}):
        file = tmp_path / "request.json"
        file.write_text(json.dumps(plain | fields))
        assert main(["explain", str(file), "--url", gateway_with_worker.url]) == 0
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
