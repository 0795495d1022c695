"""`paceline ask`, `explain` and `errors` as a user runs them, against a real gateway."""

import base64
import io
import json
import os
import signal
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.cli.explain import BECAUSE, KEPT_OUT
from gateway.routing.select import BY_POLICY, ELIGIBLE, SPILLED
from paceline.request.profile import Bypass
from tests.support.images import png_header
from tests.support.paceline_forks import PIPES, PacelineFork
from tests.support.paceline_process import PacelineProcess, process_environment, start_paceline
from tests.support.running_gateway import RunningGateway, chat_body
from tests.support.scripted_worker import DONE, USAGE, Script, ScriptedWorker, chunk, event

ROOT = Path(__file__).parents[3]


def test_the_answer_is_printed_as_it_arrives_and_ctrl_c_frees_the_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.script = Script(hang_after=2)
    arguments = ("ask", "Say a word.", "--url", gateway_with_worker.url)
    with start_paceline(*arguments, environment={}, folder=tmp_path, terminal=True) as process:
        # Without an end of line, which the reader of lines would wait for.
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 3) == b"one"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert worker.client_disconnected.wait(60)


def lines_on_a_terminal(url: str, folder: Path, **environment: str) -> list[str]:
    """Return the lines that a question prints on a terminal."""
    arguments = ("ask", "Say a word.", "--url", url)
    with start_paceline(
        *arguments, environment=environment, folder=folder, terminal=True
    ) as process:
        printed = PacelineProcess(process)
        assert printed.wait_for_end() == 0
    return printed.lines


def test_a_terminal_alone_shows_reasoning_where_an_answer_ran_how_fast_and_its_drafts(
    gateway_with_worker, worker, tmp_path, capsys
) -> None:
    url = gateway_with_worker.url
    answer, facts = lines_on_a_terminal(url, tmp_path)[:2]
    assert answer == "one two three"
    where = "text-mtp on fake-a, because the request is greedy text; first token after "
    assert facts.startswith(where)
    assert facts.endswith("; too short to measure the speed; 50% of 2 drafted tokens accepted")
    thoughts = [chunk({"reasoning_content": one, "reasoning": one}) for one in ("Hm", "m.\x1b[2J")]
    usage = USAGE | {"completion_tokens": 21}
    timed = {"choices": [], "usage": usage, "metrics": {"mean_itl_ms": 2}}
    end = (chunk({"content": "Yes"}), chunk({}, "stop"), event(timed), DONE)
    worker.script = Script(events=(*thoughts, *end))
    assert main(["ask", "Say a word.", "--url", url]) == 0
    assert capsys.readouterr().out == "Yes\n"
    *printed, facts = lines_on_a_terminal(url, tmp_path)[:4]
    assert printed == ["Hmm.\ufffd[2J", "", "Yes"]
    assert facts.endswith(" s; 500 tokens/s"), "by the time of the worker"


def test_a_terminal_alone_shows_how_far_a_worker_has_read_a_long_prompt(
    gateway_with_worker, worker, tmp_path, capsys
) -> None:
    comment = b": read 2048 of 9000 tokens of the prompt\n\n"
    worker.script = Script(events=(comment, chunk({"content": "Yes"}), chunk({}, "stop"), DONE))
    lines = lines_on_a_terminal(gateway_with_worker.url, tmp_path, TERM="xterm-256color")
    printed = "\n".join(lines)
    assert "Read 2048 of 9000 tokens of the prompt ..." in printed
    assert main(["ask", "Say a word.", "--url", gateway_with_worker.url]) == 0
    assert tuple(capsys.readouterr()) == ("Yes\n", "")


def test_a_pipe_asks_and_gets_the_answer_alone(gateway_with_worker, worker, tmp_path) -> None:
    with PacelineFork(
        ["ask", "--url", gateway_with_worker.url], **PIPES, env=process_environment(tmp_path)
    ) as process:
        assert process.communicate("Say a word.\n") == ("one two three\n", "")
    assert process.returncode == 0
    assert worker.requests[0].body["messages"][-1]["content"] == "Say a word.\n"


def test_options_and_pictures_are_sent_and_the_content_of_a_file_is_its_type(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, tmp_path: Path
) -> None:
    picture = tmp_path / "circle.jpg"
    picture.write_bytes(png_header(8, 8))
    options = ("--image", str(picture), "--temperature", "0.5", "--model", "demo")
    assert main(["ask", "What is it?", *options, "--url", gateway_with_worker.url]) == 0
    body = worker.requests[0].body
    shown, text = body["messages"][0]["content"]
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    assert shown["image_url"]["url"] == url
    assert text == {"type": "text", "text": "What is it?"}
    assert (body["temperature"], body["stream"]) == (0.5, True)


def test_control_characters_of_an_answer_never_reach_a_terminal(
    shared_gateway, module_worker, capsys
) -> None:
    module_worker.script = Script(tokens=("\x1b[2J", "a\tb\r\nc", "\x9b\u202e"))
    assert main(["ask", "Hi", "--url", shared_gateway.url]) == 0
    assert capsys.readouterr().out == "\ufffd[2Ja\tb\nc\ufffd\ufffd\n"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(events=(chunk({"content": "one"}), event({"error": {"message": "x"}}))), "one\n"),
        (Script(events=(chunk({"content": "one"}), DONE)), "one\n"),
        (Script(cut_after=2), "one\n"),
        (Script(status=400, body=b'{"error": {"message": "No."}}'), ""),
    ],
    ids=["error", "no end", "cut", "refused"],
)
def test_an_answer_that_fails_ends_with_a_sentence(
    shared_gateway, module_worker, capsys, script, message
) -> None:
    module_worker.script = script
    failure = "is incomplete: " if message else "the gateway refused: "
    with pytest.raises(SystemExit, match=failure):
        main(["ask", "Hi", "--url", shared_gateway.url])
    assert capsys.readouterr().out == message


def test_what_cannot_be_sent_is_one_sentence(tmp_path, monkeypatch) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with (tmp_path / "large.png").open("wb") as large:
        large.truncate(32 * 1024**2 + 1)
    for arguments, message in (
        (["Hi", "--image", "none.png"], "cannot read none.png: there is no such file."),
        (["Hi", "--image", str(tmp_path)], "it is a folder."),
        (["Hi", "--image", "text.png"], "text.png: The picture is not a PNG, JPEG, WebP or GIF"),
        (["Hi", "--image", "large.png"], "large.png: it is larger than 32 MiB."),
        (["\udcff"], "the question is not text in UTF-8."),
        (["  "], "the question is empty."),
        (["Hi", "--url", "http://127.0.0.1:1"], "no gateway answers at http://127.0.0.1:1;"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["ask", *arguments])
        assert message in str(ended.value.code)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match="the question is empty"):
        main(["ask", "-"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": 0}, "text-mtp on fake-a, because the request is greedy text."),
        ({}, "vlm on fake-a, because temperature is 1.0."),
        ({"temperature": 0.5, "n": 2}, "vlm on fake-a, because temperature is 0.5, and n is 2."),
    ],
)
def test_the_first_line_is_a_sentence_with_the_reason(
    module_gateway, tmp_path, capsys, fields, sentence
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(chat_body(**fields)))
    command = ["explain", str(file), "--url", module_gateway.url]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == sentence
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["worker"] == "fake-a"


def test_every_reason_of_a_decision_has_its_words_in_a_terminal_and_on_the_pages() -> None:
    source = (ROOT / "gateway/pages/shared/bypass_reasons.js").read_text()
    bypass = {reason.value for reason in Bypass}
    assert bypass | {ELIGIBLE, BY_POLICY, SPILLED} == BECAUSE.keys()
    assert bypass == KEPT_OUT.keys()
    assert all(source.count(f"\n  {reason}: ") == 2 for reason in bypass)
    assert all(f"\n  {reason}: " in source for reason in BECAUSE)


def test_a_file_may_hold_the_request_of_any_wire(module_gateway, tmp_path, capsys) -> None:
    plain = {"model": "demo", "temperature": 0}
    said = [{"role": "user", "content": "Hi"}]
    file = tmp_path / "request.json"
    for fields in ({"messages": said, "system": "Be brief."}, {"input": "Hi"}, {"prompt": "Hi"}):
        file.write_text(json.dumps(plain | fields))
        assert main(["explain", str(file), "--url", module_gateway.url]) == 0
        sentence = capsys.readouterr().out.splitlines()[0]
        assert sentence == "text-mtp on fake-a, because the request is greedy text."


def test_without_a_worker_or_a_body_in_json_a_sentence_says_so(
    gateway: RunningGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["explain", "-", "--url", gateway.url]
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(chat_body(model="default"))))
    assert main(command) == 0
    assert capsys.readouterr().out == "No worker can take this request now.\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("{"))
    with pytest.raises(SystemExit, match="standard input is not JSON: line 1"):
        main(command)


def test_an_admin_sees_all_errors_and_a_client_those_of_its_key(
    gateway_with_worker, worker, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gateway = gateway_with_worker
    command = ["errors", "--url", gateway.url]
    assert main(command) == 0
    assert capsys.readouterr().out == "No recent request has failed.\n"

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
        assert main(command) == 0
        assert capsys.readouterr().out.count("worker_failed") == count
