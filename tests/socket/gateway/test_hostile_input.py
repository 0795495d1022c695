"""Advisories about what a request, or a worker, brings along: each a test that carries its number.

Those about what a request may say are in test_advisories.py.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import inspect
import json
import pkgutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway
import policies
from tests.support.canary_listener import Trap, said
from tests.support.http_server import Link, Request
from tests.support.images import data_url, png_header
from tests.support.policies import Admin
from tests.support.running_gateway import Gateway, chat_body, error_of, serving, settings_for_tests
from tests.support.scripted_worker import FakeWorker, Script, event, stream_events

_BOUND = 1000
"""Of repetitions; `*` and `+` have none."""


def picturing(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_s32_no_redirect_of_a_worker_is_followed(
    line: Gateway, worker: FakeWorker, trap: Trap, status: int, stream: bool
) -> None:
    """vllm-mlx #318: a redirect leads wherever its sender likes, with all that is sent along."""
    location = (b"location", f"{trap.url}/latest/meta-data".encode())
    worker.script = Script(status=status, headers=(location,))
    answer = line.chat(stream=stream)
    assert said(answer) == (502, "worker_failed", None)
    assert "location" not in answer.headers
    assert trap.untouched()


def test_s32_no_redirect_is_followed_where_a_worker_is_asked_how_it_is(
    gateway: Gateway, trap: Trap
) -> None:
    async def elsewhere(link: Link, _request: Request) -> None:
        await link.begin(307, ((b"location", trap.url.encode()),), length=0)

    fake = FakeWorker()
    with serving(elsewhere, sockets=[fake.socket]):
        gateway.join(fake)
        assert gateway.client.get("/metrics").status_code == 200
        assert gateway.status()["workers"]["fake-a"]["state"] == "ready"
    assert trap.untouched()


def test_s32_what_is_unsafe_is_refused_before_a_stream_begins(
    line: Gateway, worker: FakeWorker
) -> None:
    """vllm-mlx PR 490: within a stream an error looks like an answer."""
    answer = line.chat(stream=True, messages=picturing("http://169.254.169.254/latest"))
    assert said(answer)[:2] == (400, "invalid_value")
    assert answer.headers["content-type"] == "application/json"
    assert not worker.heard


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/chat/completions", 400), ("/v1/route/explain", 400), ("/admin/v1/keys", 400)],
)
def test_s35_nothing_that_is_packed_is_unpacked(
    line: Gateway, worker: FakeWorker, path: str, status: int
) -> None:
    """Twenty megabytes fit into twenty kilobytes: here they stay there."""
    packed = gzip.compress(b" " * 20_000_000 + json.dumps(chat_body()).encode())
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answer = line.client.post(path, content=packed, headers=headers)
    assert error_of(answer) == (status, "invalid_json")
    assert not worker.heard


def test_s35_media_without_an_end_are_cut_where_their_bound_is(
    tmp_path: Path, worker: FakeWorker
) -> None:
    """A length that is declared proves nothing, and one that is not may never come."""
    limit_bytes = 100_000
    piece = b"A" * 16_384
    with Gateway(settings_for_tests(tmp_path, body_limit_bytes=limit_bytes)) as small:
        small.join(worker)
        with socket.create_connection(("127.0.0.1", httpx.URL(small.url).port or 0)) as raw:
            raw.settimeout(30)
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
            raw.sendall(b"transfer-encoding: chunked\r\n\r\n")
            begun = b'{"messages": [{"content": [{"image_url": "data:image/png;base64,'
            raw.sendall(b"%x\r\n%b\r\n" % (len(begun), begun))
            for _ in range(limit_bytes // len(piece) + 1):
                raw.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            assert raw.recv(100).startswith(b"HTTP/1.1 413 ")
    assert not worker.heard


OTHER_FORMATS = {
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40),
    "a JPEG 2000 stream": b"\xff\x4f\xff\x51" + bytes(40),
    "TIFF": b"MM\0*" + bytes(40),
    "BMP": b"BM" + bytes(60),
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(40),
    "AVIF": b"\0\0\0\x18ftypavif" + bytes(40),
    "PSD": b"8BPS" + bytes(40),
    "ICO": b"\0\0\1\0" + bytes(40),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n" + bytes(40),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>" + bytes(40),
    "MP4": b"\0\0\0\x18ftypmp42" + bytes(40),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
@pytest.mark.parametrize("kind", ["png", "jpeg", "jp2", "svg+xml"])
def test_s36_only_four_formats_are_pictures_whatever_they_are_called(
    line: Gateway, worker: FakeWorker, name: str, kind: str
) -> None:
    """CVE-2026-22778: decoders that hardly anybody needs are those that break."""
    answer = line.chat(messages=picturing(data_url(OTHER_FORMATS[name], kind)))
    assert said(answer) == (400, "invalid_value", "messages[0].content[1].image_url")
    assert not worker.heard


@pytest.mark.parametrize(("width_px", "height_px"), [(0, 5), (5, 0), (0, 0), (2**31, 1), (1, 201)])
def test_s37_a_picture_of_no_size_or_of_hardly_a_width_reaches_no_engine(
    line: Gateway, worker: FakeWorker, width_px: int, height_px: int
) -> None:
    """CVE-2026-22773; what our own engine does with one pixel is in tests/workers."""
    answer = line.chat(messages=picturing(data_url(png_header(width_px, height_px))))
    assert said(answer) == (400, "invalid_value", "messages[0].content[1].image_url")
    assert not worker.heard


def patterns() -> Iterator[tuple[str, str | bytes]]:
    """List every regular expression that is written in the gateway and the policy."""
    for package in (gateway, policies):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(found.name)
            for call in ast.walk(ast.parse(inspect.getsource(module))):
                if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("re."):
                    written = call.args[0]
                    told = vars(module)[written.id] if isinstance(written, ast.Name) else None
                    yield found.name, told or ast.literal_eval(written)


def test_s45_no_regular_expression_repeats_what_already_repeats() -> None:
    """CVE-2025-48887, CVE-2025-3933: within one that does, a text of a line takes for ever."""
    parser = importlib.import_module("re._parser")
    assert repeats_within(parser.parse("(?:a+)+b"))
    assert repeats_within(parser.parse("x(a|b*)*"))
    found = list(patterns())
    assert len(found) > 10
    for where, pattern in found:
        assert not repeats_within(parser.parse(pattern)), f"{where}: {pattern!r}"


def repeats_within(parsed: Any, repeating: bool = False) -> bool:
    """Say whether a part that repeats without a bound holds another one that does."""
    for operator, argument in parsed:
        endless = str(operator) in {"MAX_REPEAT", "MIN_REPEAT"} and int(argument[1]) > _BOUND
        if endless and repeating:
            return True
        for part in argument if isinstance(argument, tuple) else (argument,):
            for inner in part if isinstance(part, list) else [part]:
                if type(inner).__name__ == "SubPattern" and repeats_within(
                    inner, repeating or endless
                ):
                    return True
    return False


HOSTILE = (
    '"usage" ' * 60_000,
    '"error"' + " " * 500_000,
    '"finish_reason":' * 30_000,
    "\\" * 500_000,
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_s45_a_long_text_of_almost_matches_takes_its_way_like_any_other(
    line: Gateway, worker: FakeWorker, text: str
) -> None:
    worker.script = Script(words=(text, " end"))
    for stream in (False, True):
        answer = line.chat(stream=stream, messages=[{"role": "user", "content": text}])
        assert answer.status_code == 200
        assert " end" in answer.text
    assert worker.heard[0].body["messages"][0]["content"] == text
    worker.script = Script(events=(event({"x": text}), *stream_events(("end",))))
    with line.stream() as streamed:
        assert "data: [DONE]" in list(streamed.iter_lines())


def test_s46_schemas_leave_nothing_behind(
    line: Gateway, worker: FakeWorker, tmp_path: Path
) -> None:
    """GHSA-mgrm-fgjv-mhv8: who sends a schema of its own each time fills no disk."""

    def kept() -> dict[str, int]:
        return {str(file): file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()}

    with Admin(line.url) as admin:
        admin.patch({"limits": {}})
    before = kept()
    for number in range(50):
        schema = {"type": "object", "properties": {f"canary-{number}": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert line.chat(response_format=form).status_code == 200
    assert len(worker.heard) == 50
    assert kept() == before
