"""`paceline policy` against a running gateway: what it prints, what it changes, when it refuses."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr
from rich.console import Console

from gateway.cli import main
from gateway.cli import policy as policy_view
from tests.support.policies import Admin, as_yaml, document
from tests.support.running_gateway import RunningGateway, settings_for_tests

KEY = "canary-admin-key"
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningGateway]:
    """A gateway with an admin key, which the command finds in its environment."""
    monkeypatch.setenv("PACELINE_ADMIN_KEY", KEY)
    with RunningGateway(settings_for_tests(tmp_path, admin_key=SecretStr(KEY))) as running:
        yield running


@pytest.fixture
def admin(gateway: RunningGateway) -> Iterator[Admin]:
    with Admin(gateway.url, KEY) as one:
        yield one


@pytest.fixture
def policy(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `paceline policy`, and return its exit code and what it printed."""

    def command(name: str, *arguments: str) -> tuple[int, str]:
        code = main(["policy", name, *arguments, "--url", gateway.url])
        return code, capsys.readouterr().out

    return command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(as_yaml(document("b")))
    return file


def test_what_is_in_force_is_printed_with_its_version(policy: Command, admin: Admin) -> None:
    admin.put(document("b"))
    code, shown = policy("show")
    assert code == 0
    assert shown.splitlines()[0] == f"# policy version 2, etag {admin.etag()[1:-1]}"
    assert yaml.safe_load(shown) == document("b")
    assert json.loads(policy("show", "--json")[1]) == document("b")
    earlier = policy("show", "--version", "1")[1]
    assert earlier.startswith("# policy version 1, as it was\n")
    assert "text-mtp" in yaml.safe_load(earlier)["pools"]


def test_what_is_shown_is_edited_and_applied(policy: Command, admin: Admin, tmp_path: Path) -> None:
    admin.put(document("b", limit=128))
    file = tmp_path / "edited.yaml"
    file.write_text(policy("show")[1])
    for limit in (64, 32):
        before = file.read_text()
        file.write_text(before.replace(f"limit: {limit * 2}", f"limit: {limit}"))
        code, printed = policy("apply", str(file), "--note", "für alle: 100%", "--author", "ann")
        assert code == 0
        assert f"~ pools.b.queue.limit: {limit * 2} -> {limit}\n" in printed
        assert printed.endswith(" is in force.\n")
        assert admin.document() == document("b", limit=limit)
    newest = admin.get("/history").json()["versions"][0]
    assert (newest["number"], newest["author"], newest["note"]) == (4, "ann", "für alle: 100%")
    assert file.read_text().startswith(f"# policy version 4, etag {newest['etag']}\n")


def test_an_edit_that_was_overtaken_is_told_clearly_and_changes_nothing(
    policy: Command, admin: Admin, tmp_path: Path
) -> None:
    file = tmp_path / "edited.yaml"
    file.write_text(policy("show")[1].replace("limit: 128", "limit: 64"))
    admin.put(document("c"), x_paceline_author="bob")
    before = file.read_text()
    with pytest.raises(SystemExit) as ended:
        policy("apply", str(file), "--note", "more room")
    said = str(ended.value)
    assert "Somebody was faster: version 2 of the policy, by bob, is in force now." in said
    assert f"{file} was made from version 1, and nothing was changed." in said
    assert admin.document() == document("c")
    assert file.read_text() == before


def test_a_file_of_ones_own_is_applied_onto_what_is_in_force(
    policy: Command, admin: Admin, file: Path
) -> None:
    code, printed = policy("apply", str(file), "--note", "a start")
    assert (code, printed.splitlines()[-1]) == (0, "Version 2 is in force.")
    assert file.read_text() == as_yaml(document("b")), "it is its owner's"
    code, printed = policy("apply", str(file), "--note", "again")
    assert (code, printed.splitlines()[-1]) == (0, "Nothing would change.")
    assert len(admin.get("/history").json()["versions"]) == 2
    written = file.with_suffix(".json")
    written.write_text(json.dumps(document("c"), indent="\t"))
    assert policy("apply", str(written), "--note", "as JSON")[0] == 0
    assert admin.document() == document("c")
    newest = admin.get("/history").json()["versions"][0]
    assert "@" in newest["author"], "who is at the terminal"


def test_a_file_that_cannot_be_marked_is_told_of_and_what_it_says_is_in_force(
    policy: Command, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited.yaml"
    file.write_text(policy("show")[1].replace("limit: 128", "limit: 64"))
    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)

    def refuse(*_: object, **__: object) -> int:
        raise OSError("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", refuse)
        code, printed = policy("apply", str(file), "--note", "less room")
    assert (code, printed.splitlines()[-1]) == (0, "Version 2 is in force.")
    told = f"paceline: {file} still names the version before: the disk is full\n"
    assert told in said.getvalue()
    assert admin.document()["pools"]["text-mtp"]["queue"]["limit"] == 64


def test_a_key_that_no_header_can_hold_is_refused_before_it_is_sent(
    policy: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "canary\nkey")
    with pytest.raises(SystemExit) as ended:
        policy("show")
    assert ended.value.code == "paceline: PACELINE_ADMIN_KEY holds what no HTTP header can."


def test_an_edit_needs_a_note(policy: Command, file: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        policy("apply", str(file))
    assert ended.value.code == 2
    with pytest.raises(SystemExit, match="An edit needs a note"):
        policy("apply", str(file), "--note", "")


BAD = "version: 1\nroutes:\n- name: all\n  to: [fast]\ncolour: red\npools: {b: {lanes: [vlm]}}\n"


@pytest.mark.parametrize("where", [(), ("--offline",)])
def test_a_bad_policy_is_told_by_file_line_and_field(
    policy: Command, file: Path, where: tuple[str, ...]
) -> None:
    assert policy("validate", str(file), *where) == (0, f"{file} is a good policy.\n")
    file.write_text(BAD)
    code, printed = policy("validate", str(file), *where)
    assert (code, printed) == (1, f"{file}:5: colour: there is no such field\n")
    file.write_text(BAD.replace("colour: red\n", ""))
    code, printed = policy("validate", str(file), *where)
    assert (code, printed) == (1, f"{file}:4: routes.0.to.0: there is no pool 'fast'\n")
    file.write_text("a: [")
    assert policy("validate", str(file), *where)[0] == 1


@pytest.mark.parametrize("command", ["diff", "apply"])
def test_a_bad_policy_is_neither_compared_nor_applied(
    policy: Command, admin: Admin, file: Path, command: str
) -> None:
    file.write_text(BAD)
    note = ("--note", "x") if command == "apply" else ()
    with pytest.raises(SystemExit, match="line 5: colour: there is no such field"):
        policy(command, str(file), *note)
    assert len(admin.get("/history").json()["versions"]) == 1


def test_a_difference_is_short(policy: Command, admin: Admin, file: Path) -> None:
    admin.put(document("a"), x_paceline_author="ann")
    code, printed = policy("diff", str(file))
    assert code == 0
    assert printed.splitlines() == [
        "Against version 2, by ann: a test",
        '~ routes.all.to: ["a"] -> ["b"]',
        '- pools.a: {"lanes": ["vlm"]}',
        '+ pools.b: {"lanes": ["vlm"]}',
        "No request has come yet to say what would move.",
    ]
    assert admin.document() == document("a")


def test_the_way_back_is_shown_and_taken(
    policy: Command, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    admin.put(document("a"))
    admin.put(document("b"))
    code, printed = policy("rollback", "2", "--note", "too slow")
    assert code == 0
    assert printed.splitlines()[1] == '~ routes.all.to: ["b"] -> ["a"]'
    assert printed.endswith("Version 4 is in force.\n")
    assert admin.document() == document("a")
    code, printed = policy("history")
    lines = printed.splitlines()
    assert lines[0].split() == ["Version", "When", "By", "Reason", "Note"]
    assert [line.split()[0] for line in lines if line[0].isdigit()] == ["4", "3", "2", "1"]
    assert "back to version 2:" in " ".join(printed.split())
    assert policy("rollback", "2")[1].endswith("Nothing would change.\n")
    with pytest.raises(SystemExit, match="no version '9'"):
        policy("rollback", "9")


def test_the_key_is_asked_for_and_never_printed(
    policy: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "wrong-canary")
    with pytest.raises(SystemExit, match="takes it from PACELINE_ADMIN_KEY") as ended:
        policy("show")
    assert "canary" not in str(ended.value)


def test_what_cannot_be_asked_is_one_sentence(
    policy: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="cannot read"):
        policy("diff", str(tmp_path / "nothing.yaml"))
    for url, sentence in (
        ("http://127.0.0.1:9", "no gateway answers"),
        ("http://127.0.0.1:x", "is not a URL"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            main(["policy", "history", "--url", url])


def moved(*moves: tuple[str, str, int]) -> dict[str, Any]:
    listed = [{"from": old, "to": new, "count": count} for old, new, count in moves]
    onto = {"number": 7, "author": "ann", "note": "[red]x"}
    change = {"field": "routes.all.to", "old": ["x" * 100], "new": 1}
    total = sum(count for _, _, count in moves)
    told = {"onto": onto, "changes": [change], "decisions": total, "moves": listed}
    return {**told, "warnings": []}


def drawn(told: dict[str, Any], *, colours: bool) -> str:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=colours, highlight=False, soft_wrap=True, width=80)
    terminal.print(policy_view.render_difference(told))
    return out.getvalue()


def test_what_would_move_is_counted_and_what_stays_is_not() -> None:
    lines = drawn(moved(("vlm", "vlm", 7), ("vlm", "mtp", 2), ("a", "none", 1)), colours=False)
    assert lines.splitlines()[0] == "Against version 7, by ann: [red]x"
    assert len(lines.splitlines()[1]) < 100
    assert lines.splitlines()[2:] == [
        "Of the last 10 requests 3 would go elsewhere:",
        "  vlm -> mtp: 2",
        "  a -> none: 1",
    ]
    stays = drawn(moved(("vlm", "vlm", 7)), colours=False)
    assert stays.endswith("Of the last 7 requests none would go elsewhere.\n")


def test_on_a_terminal_old_is_red_and_new_is_green() -> None:
    drawing = drawn(moved(("vlm", "mtp", 2)), colours=True)
    assert "\x1b[31m" in drawing
    assert "\x1b[32m1\x1b[0m" in drawing
