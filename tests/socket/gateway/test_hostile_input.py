"""Published advisories about gateways and inference engines, one test per advisory number.

Tests of api, auth and the worker, and test_secret_leaks.py, cover further ones.
"""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import socket
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import gateway
import policies
from tests.support.canary_listener import CanaryListener, error_fields
from tests.support.http_server import Request, ServerConnection
from tests.support.images import data_url, png_header
from tests.support.paceline_forks import PIPES, PacelineFork
from tests.support.policies import PolicyAdmin, single_pool_policy
from tests.support.raw_client import open_socket
from tests.support.running_gateway import RunningGateway, chat_body, running_server
from tests.support.scripted_worker import DONE, Script, ScriptedWorker, event, stream_events

_BOUND = 1000
"""Repetitions with at most this maximum are bounded; `*` and `+` are not."""
IMAGE_FIELD = "messages[0].content[1].image_url"


def messages_with_image(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def test_s32_the_gateway_follows_no_redirect_of_a_worker(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, canary_listener: CanaryListener
) -> None:
    """vllm-mlx #318: a followed redirect would send the request, with its headers, to any
    address."""
    location = (b"location", f"{canary_listener.url}/latest/meta-data".encode())
    for status, stream in itertools.product((301, 302, 303, 307, 308), (False, True)):
        worker.script = Script(status=status, headers=(location,))
        response = gateway_with_worker.chat(stream=stream)
        assert error_fields(response) == (502, "worker_failed", None)
        assert "location" not in response.headers
    assert canary_listener.has_no_connections()


def test_s32_health_checks_follow_no_redirect(gateway, canary_listener) -> None:
    worker, joined = ScriptedWorker(), threading.Event()

    async def redirect(link: ServerConnection, request: Request) -> None:
        if not joined.is_set():
            return await worker(link, request)
        return await link.send_head(307, ((b"location", canary_listener.url.encode()),), length=0)

    with running_server(redirect, sockets=[worker.socket]):
        gateway.join(worker)
        joined.set()
        assert gateway.client.get("/metrics").status_code == 200
        assert gateway.status()["workers"]["fake-a"]["state"] == "ready"
    assert canary_listener.has_no_connections()


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
def test_s36_unsupported_image_formats_are_rejected_under_any_media_type(
    module_gateway: RunningGateway, module_worker: ScriptedWorker, name: str, kind: str
) -> None:
    """CVE-2026-22778: rarely used decoders have the most vulnerabilities."""
    messages = messages_with_image(data_url(OTHER_FORMATS[name], kind))
    response = module_gateway.chat(messages=messages)
    assert error_fields(response) == (400, "invalid_value", IMAGE_FIELD)
    assert not module_worker.requests


def patterns() -> Iterator[tuple[str, str | bytes]]:
    """Yield every regular expression in the source of the gateway and the policies."""
    for package in (gateway, policies):
        for package_module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(package_module.name)
            for call in ast.walk(ast.parse(inspect.getsource(module))):
                function = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
                if isinstance(call, ast.Call) and (
                    function.startswith("re.") or function == "Phrase"
                ):
                    argument = call.args[0]
                    if isinstance(argument, ast.BinOp):  # names are filled in, or come first
                        named = isinstance(argument.left, ast.Subscript)
                        argument = argument.right if named else argument.left
                    if ast.unparse(argument) == "self.words":
                        continue  # of the class `Phrase`, whose calls have the expressions
                    constant = vars(module)[argument.id] if isinstance(argument, ast.Name) else None
                    yield package_module.name, constant or ast.literal_eval(argument)


def test_s45_no_regular_expression_has_nested_unbounded_repetition() -> None:
    """CVE-2025-48887, CVE-2025-3933: nested repetition backtracks for exponential time."""
    parser = importlib.import_module("re._parser")
    assert has_nested_repetition(parser.parse("(?:a+)+b"))
    assert has_nested_repetition(parser.parse("x(a|b*)*"))
    found_patterns = list(patterns())
    assert len(found_patterns) > 10
    for module_name, pattern in found_patterns:
        assert not has_nested_repetition(parser.parse(pattern)), f"{module_name}: {pattern!r}"


def has_nested_repetition(parsed: Any, repeating: bool = False) -> bool:
    """Return whether an unbounded repetition contains another unbounded repetition."""
    for operator, argument in parsed:
        unbounded = str(operator) in {"MAX_REPEAT", "MIN_REPEAT"} and int(argument[1]) > _BOUND
        if unbounded and repeating:
            return True
        for part in argument if isinstance(argument, tuple) else (argument,):
            for inner in part if isinstance(part, list) else [part]:
                if type(inner).__name__ == "SubPattern" and has_nested_repetition(
                    inner, repeating or unbounded
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
def test_s45_long_texts_of_near_matches_are_relayed(shared_gateway, module_worker, text) -> None:
    module_worker.script = Script(tokens=(text, " end"))
    messages = [{"role": "user", "content": text}]
    for stream in (False, True):
        response = shared_gateway.chat(stream=stream, messages=messages)
        assert response.status_code == 200
        assert " end" in response.text
    assert module_worker.requests[0].body["messages"] == messages
    module_worker.script = Script(events=(event({"x": text}), *stream_events(("end",))))
    with shared_gateway.stream() as streamed:
        assert streamed.read().endswith(DONE)
    module_worker.reset()


def test_s46_schemas_of_requests_are_not_stored(gateway_with_worker, worker, tmp_path) -> None:
    """GHSA-mgrm-fgjv-mhv8: requests with ever new schemas do not fill the disk."""

    def file_sizes() -> dict[str, int]:
        """Return those of all files but the list of workers, which a gateway writes by itself."""
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        return {str(one): one.stat().st_size for one in files if "workers.json" not in one.name}

    with PolicyAdmin(gateway_with_worker.url, gateway_with_worker.admin_key) as admin:
        admin.patch({"limits": {}})
    before = file_sizes()
    for number in range(50):
        schema = {"type": "object", "properties": {f"canary-{number}": {"type": "string"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert gateway_with_worker.chat(response_format=form).status_code == 200
    assert len(worker.requests) == 50
    assert file_sizes() == before


ROOT = Path(__file__).parents[3]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/route/explain")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field",
    [
        *("api_base", "base_url", "api_key", "headers", "extra_headers", "extra_body", "url"),
        *("adapters", "draft_model", "model_file", "trust_remote_code", "model_path", "lora"),
        *("best_of", "chat_template", "documents", "add_generation_prompt", "prompt_embeds"),
    ],
)
def test_s07_s43_s48_fields_that_select_servers_or_model_files_are_rejected(
    module_gateway, module_worker, canary_listener, path, field
) -> None:
    """CVE-2024-6587, GHSA-h7x2-h6g9-p789, CVE-2025-62426, CVE-2025-61620."""
    body = {"model": "demo", "prompt": "x"} if path == "/v1/completions" else chat_body()
    response = module_gateway.client.post(path, json={**body, field: canary_listener.url})
    assert error_fields(response) == (400, "invalid_value", field)
    assert canary_listener.has_no_connections()
    assert not module_worker.requests


TEMPLATES = ("{{7*7}}", "${7*7}", "{% for x in range(9) %}x{% endfor %}", "%(x)s", "{0.__class__}")


def test_s09_s47_templates_in_text_and_arguments_are_relayed_verbatim(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker, admin: PolicyAdmin
) -> None:
    """CVE-2026-42203, CVE-2024-2952, CVE-2025-9141: the gateway evaluates no text."""
    for text in TEMPLATES:
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": text}}
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": text},
        ]
        assert gateway_with_worker.chat(messages=messages, tools=[TOOL]).status_code == 200
        sent = worker.requests[-1].body["messages"]
        assert [message.get("content") for message in sent] == [text, text, None, text]
        assert sent[2]["tool_calls"] == [call]
        assert admin.put(single_pool_policy(), x_paceline_note=quote(text)).status_code == 200
        assert admin.get("/history").json()["versions"][0]["note"] == text


def test_s09_s16_s21_s49_the_gateway_imports_no_template_engine_and_evaluates_no_input() -> None:
    """CVE-2026-42203, CVE-2024-8984, CVE-2024-47874, CVE-2024-4264, CVE-2025-32444."""
    script = "import sys; print(*sys.modules)"
    with PacelineFork(["-c", script], **PIPES, env={}) as process:
        loaded = process.communicate()[0].split()
    assert "gateway.app" in loaded
    assert "jinja2" not in loaded
    installed = (ROOT / "locks/gateway.txt").read_text()
    assert not re.search(
        r"^(jinja2==|python-multipart==|h11==0\.1[0-5]\.)", installed, re.MULTILINE
    )
    evaluation = re.compile(
        r"(?<![\w.])(?:eval|exec|compile|__import__)\(|pickle|literal_eval|yaml\.load\("
    )
    for file in (
        file for name in ("gateway", "paceline", "policies") for file in (ROOT / name).rglob("*.py")
    ):
        assert not evaluation.search(file.read_text()), file
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in rules["select"]
    for glob, ignored in rules["per-file-ignores"].items():
        ours = glob.startswith(("gateway", "paceline", "polic"))
        assert not (ours and any(rule.startswith("S") for rule in ignored)), glob


def test_s15_oversized_headers_are_rejected_before_they_are_read_completely(
    gateway_with_worker: RunningGateway, worker: ScriptedWorker
) -> None:
    """CVE-2025-48956."""
    with open_socket(gateway_with_worker) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx: ")
        try:
            for _ in range(64):
                raw.sendall(b"a" * 16_384)
        except ConnectionError:
            pass  # the gateway closed the connection
        else:
            assert raw.recv(100).startswith(b"HTTP/1.1 431 ")
    assert gateway_with_worker.chat().status_code == 200
    assert len(worker.requests) == 1


@pytest.mark.parametrize("path", [*PATHS, "/admin/v1/keys", "/admin/v1/policy/validate"])
@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=x", "text/plain"])
def test_s16_a_form_is_rejected_and_not_parsed(
    module_gateway: RunningGateway, module_worker: ScriptedWorker, path: str, content_type: str
) -> None:
    """CVE-2024-8984, CVE-2025-54121."""
    form = (
        b"--x" + b"-" * 100_000 + b'\r\ncontent-disposition: form-data; name="a"\r\n\r\n1\r\n--x--'
    )
    response = module_gateway.admin.post(path, content=form, headers={"content-type": content_type})
    assert response.status_code in {400, 413, 415}
    assert not module_worker.requests


@pytest.mark.parametrize(
    "body",
    [
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}XX0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n",
        b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"content-length: +2\r\n\r\n{}",
        b"content-length: 2, 2\r\n\r\n{}",
    ],
)
def test_s18_ambiguous_body_framing_smuggles_no_second_request(
    module_gateway: RunningGateway, module_worker: ScriptedWorker, body: bytes
) -> None:
    """CVE-2025-43859."""
    smuggled = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with open_socket(module_gateway) as raw:
        raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + body + smuggled)
        raw.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: raw.recv(65_536), b""))
    assert b"alive" not in received
    assert not received or received.startswith(b"HTTP/1.1 400 ")
    assert not module_worker.requests


REMOTE_SOURCES = (
    *("http://127.0.0.1:{port}/", "http://localhost.:{port}/", "http://[::1]:{port}/"),
    *("http://2130706433:{port}/", "http://0x7f000001:{port}/", "http://[::ffff:7f00:1]:{port}/"),
    *("http://169.254.169.254/latest", "http://100.64.0.1/", "http://[64:ff9b::7f00:1]/"),
    *("http://good.example\\@127.0.0.1:{port}/", "https://good.example@127.0.0.1:{port}/"),
    *("https://good.example.evil.example/", "//127.0.0.1:{port}/", "ftp://127.0.0.1:{port}/"),
    *("/etc/passwd", "file:///etc/passwd", "../x.png", "~/.ssh/id_rsa", "\\\\host\\share\\x.png"),
    "DATA:",
)
NON_IMAGE_SOURCES = ("data:text/html;base64,PGI+", "data:video/jpeg;base64,AA==,AA==", "data:,x")
IMAGE_KINDS = ("image_url", "input_image", "image")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *itertools.product((*IMAGE_KINDS, "video_url", "audio_url"), REMOTE_SOURCES),
        *itertools.product(IMAGE_KINDS, NON_IMAGE_SOURCES),
    ],
)
def test_s30_to_s34_the_gateway_fetches_no_url_of_a_request(
    module_gateway, module_worker, canary_listener, kind, source
) -> None:
    """GHSA-3f6c-7fw2-ppm4, CVE-2026-24779 (GHSA-qh4c-xf7m-gxfc) and its bypass CVE-2026-25960
    (GHSA-v359-jj2v-j536), vllm-mlx #320, CVE-2025-3777, vllm-mlx PR 490.
    """
    url = source.format(port=canary_listener.port)
    for value, stream in ((url, False), ({"url": url}, True)):
        content = [{"type": "text", "text": "x"}, {"type": kind, kind: value}]
        messages = [{"role": "user", "content": content}]
        response = module_gateway.chat(messages=messages, stream=stream)
        status, code, param = error_fields(response)
        assert (status, code) == (400, "invalid_value")
        assert response.headers["content-type"] == "application/json", "no stream has begun"
        assert (param or "").startswith("messages[0].content[1]")
    assert canary_listener.has_no_connections()
    assert not module_worker.requests


@pytest.mark.parametrize(
    ("size_px", "count"),
    [
        *(((0, 5), 1), ((5, 0), 1), ((0, 0), 1), ((2**31, 1), 1), ((1, 201), 1)),
        *(((30_000, 30_000), 1), ((8, 8), 5_000)),
    ],
)
def test_s37_s38_s39_image_counts_sizes_and_ratios_are_checked_before_decoding(
    module_gateway, module_worker, size_px, count
) -> None:
    """CVE-2026-22773, CVE-2026-34755 (GHSA-pq5c-rjhq-qp7p), CVE-2026-5497.

    Tests of the worker cover images of one pixel.
    """
    image = {"type": "image_url", "image_url": {"url": data_url(png_header(*size_px))}}
    response = module_gateway.chat(messages=[{"role": "user", "content": [image] * count}])
    assert error_fields(response)[:2] == (400, "invalid_value")
    assert not module_worker.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**9}, "n"),
        ({"n": 2**63}, "n"),
        ({"logprobs": True, "top_logprobs": 10**9}, "top_logprobs"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_completion_tokens": 10**400}, "max_tokens"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"logit_bias": {str(token): 1 for token in range(5000)}}, "logit_bias"),
        ({"thinking_budget": 2**31}, "thinking_budget"),
        ({"top_k": 2**40}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_embeds"}]}]}, None),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        (
            {"chat_template_kwargs": {"chat_template": "{{x}}"}},
            "chat_template_kwargs.chat_template",
        ),
        ({"tools": [TOOL] * 10_000}, "tools"),
        ({"guided_regex": "(a+)+" * 100_000}, "guided_regex"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_s41_s42_s43_s44_s49_values_that_would_crash_an_engine_are_rejected(
    module_gateway, module_worker, fields, param
) -> None:
    """CVE-2026-34756 (GHSA-3mwp-wvh9-7528), CVE-2024-8768, CVE-2025-62426, CVE-2025-48944,
    CVE-2025-62164."""
    status, code, error_param = error_fields(module_gateway.chat(**fields))
    assert (status, code) == (400, "invalid_value")
    assert param is None or error_param in {param, "max_completion_tokens"}
    empty = module_gateway.client.post("/v1/completions", json={"model": "demo", "prompt": ""})
    assert error_fields(empty) == (400, "invalid_value", "prompt")
    assert not module_worker.requests
