"""`paceline policy` against a running gateway: output, edits and rejections."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from gateway.cli import main
from gateway.cli import policy as policy_view
from tests.support.policies import PolicyAdmin, single_pool_policy, to_yaml
from tests.support.running_gateway import RunningGateway

Command = Callable[..., str]


@pytest.fixture
def run_policy_command(gateway: RunningGateway, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `paceline policy` and returns its output."""

    def command(name: str, *arguments: str, code: int = 0) -> str:
        assert main(["policy", name, *arguments, "--url", gateway.url]) == code
        return capsys.readouterr().out

    return command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(to_yaml(single_pool_policy("b")))
    return file


def test_show_prints_the_active_policy_with_its_version(run_policy_command, admin) -> None:
    admin.put(single_pool_policy("b"))
    printed = run_policy_command("show")
    assert printed.splitlines()[0] == f"# policy version 2, etag {admin.etag()[1:-1]}"
    assert yaml.safe_load(printed) == single_pool_policy("b")
    assert admin.get().json() == single_pool_policy("b")
    earlier = run_policy_command("show", "--version", "1")
    assert earlier.startswith("# policy version 1\n")
    assert "text-mtp" in yaml.safe_load(earlier)["pools"]


def test_the_output_of_show_can_be_edited_and_applied_and_keeps_its_comments(
    run_policy_command: Command, admin: PolicyAdmin, file: Path
) -> None:
    text = f"# for all\n{to_yaml(single_pool_policy('b', limit=128))}# the end\n"
    admin.put(text)
    file.write_text(run_policy_command("show"))
    note = ("--note", "für alle: 100%")
    for limit in (64, 32):
        file.write_text(file.read_text().replace(f"limit: {limit * 2}", f"limit: {limit}"))
        printed = run_policy_command("apply", str(file), *note)
        assert f"~ pools.b.queue.limit: {limit * 2} -> {limit}\n" in printed
        assert printed.endswith(" is active.\n")
        assert admin.document() == single_pool_policy("b", limit=limit)
    newest = admin.get("/history").json()["versions"][0]
    assert (newest["number"], newest["note"]) == (4, "für alle: 100%")
    mark, _, shown = run_policy_command("show").partition("\n")
    assert mark == f"# policy version 4, etag {newest['etag']}"
    assert shown == text.replace("limit: 128", "limit: 32")
    assert file.read_text() == f"{mark}\n{shown}"


def test_a_conflicting_edit_is_reported_and_changes_nothing(
    run_policy_command: Command, admin: PolicyAdmin, file: Path
) -> None:
    file.write_text(run_policy_command("show").replace("limit: 128", "limit: 64"))
    admin.put(single_pool_policy("c"), x_paceline_author="bob")
    before = file.read_text()
    with pytest.raises(SystemExit) as error:
        run_policy_command("apply", str(file), "--note", "more room")
    message = str(error.value)
    assert "The policy has changed: version 2 by bob is now active." in message
    assert f"{file} is based on version 1." in message
    assert admin.document() == single_pool_policy("c")
    assert file.read_text() == before


def test_a_file_without_a_version_is_applied_to_the_active_policy(
    run_policy_command: Command, admin: PolicyAdmin, file: Path
) -> None:
    printed = run_policy_command("apply", str(file), "--note", "a start")
    assert printed.splitlines()[-1] == "Version 2 is active."
    assert file.read_text() == to_yaml(single_pool_policy("b")), "the file stays as it is"
    printed = run_policy_command("apply", str(file), "--note", "again")
    assert printed.splitlines()[-1] == "No change."
    assert len(admin.get("/history").json()["versions"]) == 2
    json_file = file.with_suffix(".json")
    json_file.write_text(json.dumps(single_pool_policy("c"), indent="\t"))
    run_policy_command("apply", str(json_file), "--note", "as JSON")
    assert admin.document() == single_pool_policy("c")
    newest = admin.get("/history").json()["versions"][0]
    assert "@" in newest["author"], "the user and host of the terminal"
    with pytest.raises(SystemExit, match="An edit requires a note"):
        run_policy_command("apply", str(file), "--note", " ")


def test_an_unwritable_file_is_reported_and_its_policy_is_applied(
    run_policy_command: Command, admin: PolicyAdmin, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(run_policy_command("show").replace("limit: 128", "limit: 64"))
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)

    def fail(*_: object, **__: object) -> int:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fail)
        printed = run_policy_command("apply", str(file), "--note", "less room")
    assert printed.splitlines()[-1] == "Version 2 is active."
    expected = f"paceline: {file} still names the previous version: the disk is full\n"
    assert expected in stderr.getvalue()
    assert admin.document()["pools"]["text-mtp"]["queue"]["limit"] == 64


def test_a_wrong_key_is_reported_and_never_printed(run_policy_command, monkeypatch) -> None:
    for key, problem in (
        ("canary\nkey", "contains characters that an HTTP header cannot carry."),
        ("wrong-canary", "reads it from PACELINE_ADMIN_KEY"),
    ):
        monkeypatch.setenv("PACELINE_ADMIN_KEY", key)
        with pytest.raises(SystemExit, match=problem) as error:
            run_policy_command("show")
        assert "canary" not in str(error.value)


INVALID_POLICY = (
    "version: 1\nroutes:\n- name: all\n  to: [fast]\ncolour: red\npools: {b: {lanes: [vlm]}}\n"
)


def test_an_invalid_policy_is_reported_by_file_line_and_field_and_not_applied(
    run_policy_command: Command, admin: PolicyAdmin, file: Path
) -> None:
    for options in ((), ("--offline",)):
        for text, code, problem in (
            (to_yaml(single_pool_policy("b")), 0, f"{file} is a valid policy.\n"),
            (INVALID_POLICY, 1, f"{file}:5: colour: unknown field\n"),
            (
                INVALID_POLICY.replace("colour: red\n", ""),
                1,
                f"{file}:4: routes.all.to.#1: there is no pool 'fast'\n",
            ),
        ):
            file.write_text(text)
            assert run_policy_command("validate", str(file), *options, code=code) == problem
        file.write_text("a: [")
        assert run_policy_command("validate", str(file), *options, code=1)
    file.write_text(INVALID_POLICY)
    for command in (["diff", str(file)], ["apply", str(file), "--note", "x"]):
        with pytest.raises(SystemExit, match="line 5: colour: unknown field"):
            run_policy_command(*command)
    assert len(admin.get("/history").json()["versions"]) == 1


def test_diff_prints_only_changed_fields(run_policy_command, admin, file) -> None:
    admin.put(single_pool_policy("a"), x_paceline_author="ann")
    assert run_policy_command("diff", str(file)).splitlines() == [
        "Against version 2, by ann: a test",
        '~ routes.all.to: ["a"] -> ["b"]',
        '- pools.a: {"lanes": ["vlm"]}',
        '+ pools.b: {"lanes": ["vlm"]}',
        "The gateway has no requests to replay yet.",
    ]
    assert admin.document() == single_pool_policy("a")


def test_rollback_prints_the_changes_and_applies_them(
    run_policy_command: Command, admin: PolicyAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    admin.put(single_pool_policy("a"))
    admin.put(single_pool_policy("b"))
    printed = run_policy_command("rollback", "2", "--note", "too slow")
    assert printed.splitlines()[1] == '~ routes.all.to: ["b"] -> ["a"]'
    assert printed.endswith("Version 4 is active.\n")
    assert admin.document() == single_pool_policy("a")
    printed = run_policy_command("history")
    lines = printed.splitlines()
    assert lines[0].split() == ["Version", "When", "By", "Reason", "Note"]
    assert [line.split()[0] for line in lines if line[0].isdigit()] == ["4", "3", "2", "1"]
    assert "back to version 2:" in " ".join(printed.split())
    assert run_policy_command("rollback", "2").endswith("No change.\n")
    with pytest.raises(SystemExit, match="no version '9'"):
        run_policy_command("rollback", "9")


def test_a_missing_file_and_a_wrong_url_are_reported_in_one_message() -> None:
    for command, message in (
        (["diff", "nothing.yaml"], "cannot read"),
        (["history", "--url", "http://127.0.0.1:9"], "no gateway answers"),
        (["history", "--url", "http://127.0.0.1:x"], "is not a URL"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(["policy", *command])


def diff_of(*moves: tuple[str, str, int]) -> dict[str, Any]:
    move_entries = [{"from": old, "to": new, "count": count} for old, new, count in moves]
    onto = {"number": 7, "author": "ann", "note": "[red]x"}
    change = {"field": "routes.all.to", "old": ["x" * 100], "new": 1}
    total = sum(count for _, _, count in moves)
    diff = {"onto": onto, "changes": [change], "decisions": total, "moves": move_entries}
    return {**diff, "warnings": []}


def render(diff: dict[str, Any], *, colours: bool) -> str:
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=colours, highlight=False, soft_wrap=True, width=80)
    terminal.print(policy_view.render_difference(diff))
    return out.getvalue()


def test_only_requests_that_would_change_pools_are_counted() -> None:
    lines = render(diff_of(("vlm", "vlm", 7), ("vlm", "mtp", 2), ("a", "none", 1)), colours=False)
    assert lines.splitlines()[0] == "Against version 7, by ann: [red]x"
    assert len(lines.splitlines()[1]) < 100
    assert lines.splitlines()[2:] == [
        "Of the last 10 requests 3 would move:",
        "  vlm -> mtp: 2",
        "  a -> none: 1",
    ]
    unmoved = render(diff_of(("vlm", "vlm", 7)), colours=False)
    assert unmoved.endswith("Of the last 7 requests none would move.\n")


def test_on_a_terminal_old_values_are_red_and_new_ones_green() -> None:
    output = render(diff_of(("vlm", "mtp", 2)), colours=True)
    assert "\x1b[31m" in output
    assert "\x1b[32m1\x1b[0m" in output
