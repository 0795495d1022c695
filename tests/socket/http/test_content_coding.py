"""Coded bodies: each route decodes them within the bounds of a body, and says what is wrong."""

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
from backports import zstd

from paceline import content_coding
from tests.support.raw_client import raw_client, request_bytes
from tests.support.running_gateway import chat_body, status_and_code, wait_until

CHAT = "/v1/chat/completions"
PLAIN = json.dumps(chat_body()).encode()
LARGE = json.dumps(chat_body(user="word " * 200_000)).encode()


def bare_deflate(data: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(data) + coder.flush()


CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZip": gzip.compress,
    "deflate": zlib.compress,
    "deflate,": bare_deflate,
    "zstd": zstd.compress,
    "identity": bytes,
    "": bytes,
}


def refusal(response) -> tuple[int, str, str]:
    assert response.headers["content-type"] == "application/json"
    return (*status_and_code(response), response.json()["error"]["message"])


def post(gateway, content, coding, path=CHAT):
    return gateway.admin.post(path, content=content, headers={"content-encoding": coding})


@pytest.mark.parametrize("coding", CODERS)
@pytest.mark.parametrize("body", [PLAIN, LARGE], ids=["small", "large"])
def test_a_coded_body_is_read_as_the_plain_one(
    module_gateway, module_worker, coding, body, monkeypatch
) -> None:
    coded = CODERS[coding](body)
    assert post(module_gateway, coded, coding).status_code == 200
    chunks = (coded[begin : begin + 9000] for begin in range(0, len(coded), 9000))
    assert post(module_gateway, chunks, coding).status_code == 200, "chunked"
    monkeypatch.setattr(content_coding, "_STEP_BYTES", 7)
    assert post(module_gateway, CODERS[coding](PLAIN), coding).status_code == 200, "small steps"
    assert module_worker.requests[-1].body["messages"] == chat_body()["messages"]
    wait_until(lambda: module_gateway.memory_held_bytes() == 0)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"model": "demo", "prompt": "x"}),
        ("POST", "/v1/messages", {**chat_body(), "max_tokens": 9}),
        ("POST", "/v1/responses", {"model": "demo", "input": "x"}),
        ("POST", "/v1/responses/input_tokens", {"model": "demo", "input": "x"}),
        ("POST", "/v1/conversations", {"metadata": {"a": "b"}}),
        ("POST", "/v1/route/explain", chat_body()),
        ("POST", "/admin/v1/policy/validate", {"version": 1}),
    ],
)
def test_each_route_that_reads_a_body_decodes_it(module_gateway, method, path, body) -> None:
    for coding in ("gzip", "deflate", "zstd"):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        content = CODERS[coding](json.dumps(body).encode())
        response = module_gateway.admin.request(method, path, content=content, headers=headers)
        assert response.is_success, response.text
        refused = module_gateway.admin.request(
            method, path, content=content, headers={**headers, "content-encoding": "br"}
        )
        assert refused.status_code == 415
        assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, gzip", "aws-chunked", "x" * 300])
def test_another_coding_is_a_415_that_names_it(module_gateway, coding) -> None:
    status, code, message = refusal(post(module_gateway, gzip.compress(PLAIN), coding))
    assert (status, code) == (415, "unsupported_content_encoding")
    assert f"It is '{coding[:100]}'" in message
    assert all(name in message for name in ("gzip", "deflate", "zstd"))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_f39_a_stream_that_is_damaged_cut_or_goes_on_is_a_400_that_says_so(
    module_gateway, coding
) -> None:
    whole, held_bytes = CODERS[coding](PLAIN), module_gateway.memory_held_bytes()
    cases = {
        "is not valid": (b"hello, world", b"\0" + whole, PLAIN),
        "ends before its": (whole[:-1], whole[: len(whole) // 2], whole[:1]),
        "continues after its": (whole + b"\n", whole + whole, whole + bytes(100_000)),
    }
    for words, bodies in cases.items():
        for body in bodies:
            for content in (body, iter([body[:10], body[10:]]), iter([body[:-1], body[-1:]])):
                status, code, message = refusal(post(module_gateway, content, coding))
                assert (status, code) == (400, "invalid_json")
                assert f"{words} " in message
                assert coding in message
    wait_until(lambda: module_gateway.memory_held_bytes() == held_bytes)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd"])
def test_an_empty_body_is_empty_in_each_coding(module_gateway, coding) -> None:
    for content in (b"", CODERS[coding](b"")):
        assert post(module_gateway, content, coding, "/v1/conversations").status_code == 200


def zstd_bomb(blocks: int) -> bytes:
    """Return a frame of 128 KiB of spaces for each block, which takes four bytes."""
    block = (128 * 1024 << 3 | 0b010).to_bytes(3, "little") + b" "
    return b"\x28\xb5\x2f\xfd\0\x38" + block * blocks


BOMBS = {
    "gzip": gzip.compress(b" " * 3_000_000 + PLAIN),
    "deflate": zlib.compress(b" " * 3_000_000 + PLAIN),
    "zstd": zstd_bomb(8000),
}
"""The last one has a gigabyte, of which a step is decoded."""


@pytest.mark.parametrize("coding", BOMBS)
def test_f39_s35_a_bomb_is_cut_at_the_body_limit(make_gateway, worker, coding) -> None:
    gateway, bomb = make_gateway(worker, body_limit_bytes=200_000), BOMBS[coding]
    for path in (CHAT, "/v1/route/explain", "/admin/v1/keys"):
        for content in (bomb, iter([bomb[:10], bomb[10:]])):
            assert status_and_code(post(gateway, content, coding, path)) == (413, "body_too_large")
    assert not worker.requests


def test_s35_data_that_decode_to_nothing_are_bounded_too(make_gateway, worker) -> None:
    gateway = make_gateway(worker, body_limit_bytes=100_000)
    nothing = b"\0\0\0\xff\xff" * 50_000  # empty blocks
    answer = post(gateway, iter([nothing]), "deflate,")
    assert status_and_code(answer) == (413, "body_too_large")


def test_f26_a_coded_body_is_charged_as_it_is_decoded_and_sheds(make_gateway, worker) -> None:
    gateway = make_gateway(worker, memory_limit_bytes=4_000_000)
    coder = zlib.compressobj()
    begun = coder.compress(b" " * 600_000) + coder.flush(zlib.Z_SYNC_FLUSH)
    head, _, body = request_bytes(begun, path="/v1/conversations").partition(b"\r\n\r\n")
    head = head.replace(b"length: ", b"length: 1") + b"\r\ncontent-encoding: deflate\r\n\r\n"
    with raw_client(gateway) as client:
        client.send(head + body)
        wait_until(lambda: gateway.memory_held_bytes() >= 1_200_000)
    wait_until(lambda: gateway.memory_held_bytes() == 0)
    bomb = zlib.compress(b" " * 2_500_000)
    assert status_and_code(post(gateway, bomb, "deflate")) == (503, "gateway_overloaded")
    wait_until(lambda: gateway.memory_held_bytes() == 0)


def test_a_zstd_frame_with_a_huge_window_is_refused(module_gateway) -> None:
    coder = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    frame = coder.compress(PLAIN) + coder.flush()
    status, _, message = refusal(post(module_gateway, frame, "zstd"))
    assert (status, "window of more than 8 MiB" in message) == (400, True)
