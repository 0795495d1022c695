"""`paceline join` as a user runs it, against a real gateway; the worker itself does not start."""

import io
import os
import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gateway.cli import join, main
from gateway.pairing.announcement import FoundGateway
from paceline.settings import InvalidSettings
from tests.support.http_server import Request, ServerConnection
from tests.support.pairing import show_code, wrong
from tests.support.running_gateway import running_server
from tests.support.scripted_worker import JOIN_TOKEN
from workers.heartbeat import NotAdmitted, wait_for_gateway
from workers.server.main import read_settings
from workers.server.start import _identity_of

URL = "http://192.0.2.7:9200"


class Became(Exception):
    """The process became a worker with these arguments."""


@pytest.fixture(autouse=True)
def execv(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(_program: str, arguments: list[str]) -> None:
        raise Became(*arguments[4:])

    monkeypatch.setattr(os, "execv", become)


@pytest.fixture
def enter(monkeypatch):
    """Return a function that enters a line when the command asks."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n"))


def became(*arguments: str) -> tuple[Any, ...]:
    with pytest.raises(Became) as end:
        main(["join", *arguments])
    return end.value.args


def test_a_mac_pairs_once_by_a_code_and_its_worker_needs_no_token(
    gateway, enter, tmp_path, capsys
) -> None:
    code, url = show_code(gateway), gateway.url
    enter(f" {code[:4].lower()}-{code[4:]} ")
    worker = ("--join", url, "--id", "studio", "--model", "x/y")
    assert became(url, "--id", "studio", "--model", "x/y") == worker
    assert f"Paired with {url} as studio." in capsys.readouterr().out
    file = tmp_path / "pairings.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert code not in file.read_text()
    settings = read_settings(["--join", url])
    assert settings.id == "studio"
    wait_for_gateway(url, settings.token, "studio", URL)
    assert len(settings.nodes_key) == 64
    enter(show_code(gateway))
    assert became(url, "--id", "mini") == ("--join", url, "--id", "mini")
    assert [read_settings(["--join", url, "--id", one]).id for one in ("studio", "mini")]
    assert read_settings(["--join", url]).token == settings.token
    file.chmod(0o666)
    with pytest.raises(SystemExit, match="other users may write to it"):
        main(["join", url])
    with pytest.raises(InvalidSettings, match="cannot be used"):
        read_settings(["--join", url])


def test_a_paired_worker_finds_its_certificate_or_does_not_start(
    gateway, enter, monkeypatch, tmp_path
) -> None:
    url = gateway.url
    enter(show_code(gateway))
    became(url, "--id", "studio")
    (file,) = tmp_path.glob("identity-*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    identity = _identity_of(read_settings(["--join", url]))
    assert identity is not None
    assert identity.url(URL) == "https://192.0.2.7:9200"
    assert _identity_of(read_settings(["--join", url, "--token", "of-all"])) is None
    file.write_text("{}")
    with pytest.raises(InvalidSettings, match=r"is damaged\. Pair again: paceline join http"):
        _identity_of(read_settings(["--join", url]))
    real = join.exchange
    older = lambda *given: real(*given).model_copy(update={"certificate": ""})  # noqa: E731
    monkeypatch.setattr(join, "exchange", older)
    enter(show_code(gateway))
    became(url, "--id", "studio")
    identity = _identity_of(read_settings(["--join", url]))
    assert identity is not None
    assert identity.url(URL) == URL, "a gateway of an older version has sent none"


def test_a_worker_whose_pairing_has_ended_says_so_and_pairs_again(gateway, enter) -> None:
    url = gateway.url
    enter(show_code(gateway))
    became(url, "--id", "studio")
    ended = read_settings(["--join", url])
    assert main(["workers", "unpair", "studio", "--url", url]) == 0
    with pytest.raises(
        NotAdmitted, match=f"ended the pairing of this worker. Run `paceline join {url}`"
    ):
        wait_for_gateway(url, ended.token, "studio", URL)
    enter(show_code(gateway))
    assert became(url, "--id", "studio") == ("--join", url, "--id", "studio")
    assert read_settings(["--join", url]).token != ended.token


def test_a_join_token_goes_first_and_asks_no_code(gateway, enter, monkeypatch) -> None:
    enter("")
    given = ("--token", JOIN_TOKEN)
    assert became(gateway.url, *given) == ("--join", gateway.url, *given)
    monkeypatch.setenv("PACELINE_JOIN_TOKEN", JOIN_TOKEN)
    assert became(gateway.url) == ("--join", gateway.url)
    assert read_settings(["--join", gateway.url]).token == SecretStr(JOIN_TOKEN)


def test_each_reason_why_no_pairing_comes_about_is_one_sentence(gateway, enter) -> None:
    code, url = show_code(gateway), gateway.url
    for address, text, problem in (
        (url, "ABC", "a code has eight letters"),
        (url, "ABCDEFGO", "a code has eight letters"),
        ("http://127.0.0.1:1", code, "no gateway answers at http://127.0.0.1:1"),
        ("ftp://x", code, "'ftp://x' is no address"),
        (f"{url}/x", code, "the gateway refused"),
        (url, wrong(code), "the code is wrong, and has ended"),
        (url, code, "Try again in a minute"),
    ):
        enter(text)
        with pytest.raises(SystemExit, match=problem):
            main(["join", address])
    assert not Path("pairings.json").exists()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("studio", "http://studio:8000"),
        ("10.0.0.9:8080", "http://10.0.0.9:8080"),
        ("https://paceline.example.com/", "https://paceline.example.com"),
    ],
)
def test_an_address_may_lack_scheme_and_port(address, url) -> None:
    assert join._url_of(address) == url


def test_without_an_address_it_lists_the_gateways_that_it_finds(
    gateway, enter, monkeypatch, capsys
) -> None:
    found = [FoundGateway(name, gateway.url, "0.1.0", "") for name in ("studio", "mini")]
    for count, problem in ((0, "no gateway announces"), (2, "there are several gateways")):
        monkeypatch.setattr(join, "find_gateways", lambda count=count: found[:count])
        enter("")
        with pytest.raises(SystemExit, match=problem):
            main(["join"])
    assert "mini" in capsys.readouterr().out
    enter("3")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main(["join"]) == 130, "there is no third one, and no other answer"
    elsewhere = found[0]._replace(url="http://127.0.0.1:1")
    monkeypatch.setattr(join, "find_gateways", lambda: [elsewhere, found[1]])
    enter(f"2\n{show_code(gateway)}")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert became("--id", "mini") == ("--join", gateway.url, "--id", "mini")
    monkeypatch.setattr(join, "find_gateways", lambda: found[:1])
    enter(show_code(gateway))
    assert became("--id", "studio", "--rows", "2")[:4] == ("--join", gateway.url, "--id", "studio")


def test_no_program_at_the_address_gets_a_key_of_this_machine(enter, monkeypatch, tmp_path) -> None:
    heads: list[dict[str, str]] = []

    async def answer(connection: ServerConnection, request: Request) -> None:
        heads.append(request.headers)
        await connection.send_head(200, (), length=2)
        await connection.send_body(b"{}")

    monkeypatch.setenv("PACELINE_ADMIN_KEY", "the-admin-key-of-this-machine")
    listener = socket.create_server(("127.0.0.1", 0))
    enter("ABCDEFGH")
    with running_server(answer, sockets=[listener]), pytest.raises(SystemExit, match="is not a"):
        main(["join", f"http://127.0.0.1:{listener.getsockname()[1]}"])
    assert ["authorization" in head for head in heads] == [False]


def test_an_admin_sees_who_is_paired(gateway, enter, capsys) -> None:
    assert main(["workers", "pair", "--url", gateway.url]) == 0
    code = capsys.readouterr().out.split()[0]
    enter(code)
    became(gateway.url, "--id", "studio")
    capsys.readouterr()
    assert main(["workers", "list", "--url", gateway.url]) == 0
    assert "paired since 20" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="No worker with this id has joined"):
        main(["workers", "unpair", "nobody", "--url", gateway.url])
