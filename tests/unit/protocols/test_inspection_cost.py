"""The time to inspect a body grows with its size, and not with a power of it."""

import contextlib
import copy
import time
from typing import Any

import pytest

from gateway.errors import RequestRefused
from gateway.protocols.messages import MessagesFormat
from gateway.protocols.openai import CHAT, InspectionContext, WireFormat
from gateway.protocols.responses import ResponsesFormat
from gateway.protocols.sealing import Sealer
from gateway.routing.prefix_keys import PrefixHasher
from gateway.routing.view import FleetView
from gateway.types import Caller
from policies.document import PolicyDocument
from tests.support.chat_bodies import user
from tests.support.images import data_url, png_header
from tests.support.policies import single_pool_policy

POLICY = PolicyDocument.model_validate(single_pool_policy())
CONTEXT = InspectionContext(POLICY, FleetView.of((), frozenset()))
HASHER = PrefixHasher(b"secret")
BASE = {"tools": {"input": "x"}}
SMALL, LARGE = 500, 8_000

USER, ANSWER = {"role": "user", "content": "x" * 20}, {"role": "assistant", "content": "y"}
SYSTEM, TEXT = {"role": "system", "content": "x"}, {"type": "text", "text": "x"}
PICTURE = {"type": "image_url", "image_url": {"url": data_url(png_header(8, 8))}}
CALL = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
FUNCTION = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


def responses() -> WireFormat:
    return ResponsesFormat("resp_1", Sealer(b"secret"), lambda: 0.0)


def messages() -> WireFormat:
    return MessagesFormat(Sealer(b"secret"))


def calls(count: int) -> list[dict[str, Any]]:
    ids = [f"c{index}" for index in range(count)]
    asked = {"role": "assistant", "tool_calls": [{**FUNCTION, "id": one} for one in ids]}
    return [asked, *({"role": "tool", "tool_call_id": one, "content": "r"} for one in ids)]


def tools(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "name": f"f{index}"} for index in range(count)]


def called(index: int) -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": f"c{index}", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": f"c{index}", "content": "r"}
    return [{"role": "assistant", "content": [use]}, user([result])]


@pytest.mark.parametrize(
    ("wire_format", "field", "build"),
    [
        (None, "messages", lambda n: [USER] * n),
        (None, "messages", lambda n: [USER, ANSWER] * (n // 2)),
        (None, "messages", lambda n: [*[SYSTEM] * n, USER]),
        (None, "messages", lambda n: [USER, SYSTEM] * (n // 2)),
        (None, "messages", lambda n: [user([TEXT] * n)]),
        (None, "messages", lambda n: [user([PICTURE, TEXT]), ANSWER] * (n // 2) + [USER]),
        (None, "messages", lambda n: [user([{"type": "new"}]), ANSWER] * (n // 2) + [USER]),
        (None, "messages", lambda n: [USER, *calls(n // 2)]),
        (responses, "tools", tools),
        (responses, "tools", lambda n: [{"type": "namespace", "name": "n", "tools": tools(n)}]),
        (responses, "input", lambda n: [USER] * n),
        (responses, "input", lambda n: [*[SYSTEM] * n, USER]),
        (responses, "input", lambda n: [*[ANSWER] * n, USER]),
        (responses, "input", lambda n: [*[CALL] * n, USER]),
        (responses, "input", lambda n: [*[{"type": "new_call"}] * n, USER]),
        (messages, "messages", lambda n: [USER] * n),
        (messages, "messages", lambda n: [user([TEXT] * n)]),
        (messages, "messages", lambda n: [one for at in range(n // 2) for one in called(at)]),
    ],
)
def test_c16_inspection_is_linear(wire_format, field, build) -> None:
    """One large body takes at most five times the CPU of the sixteen small ones of its parts."""

    def cpu_s(bodies: int, parts: int) -> float:
        body: dict[str, Any] = {"model": "m", **BASE.get(field, {}), field: build(parts)}
        if wire_format is messages:
            body["max_tokens"] = 1
        copies = [copy.deepcopy(body) for _ in range(bodies)]
        began_s = time.thread_time()
        for each in copies:
            made = CHAT if wire_format is None else wire_format()
            with contextlib.suppress(RequestRefused):
                HASHER.prefix_keys(made.inspect(each, CONTEXT), Caller(), POLICY.prefix)
        return time.thread_time() - began_s

    small_s = max(cpu_s(LARGE // SMALL, SMALL) for _ in range(2))
    assert min(cpu_s(1, LARGE) for _ in range(3)) <= 5 * small_s
