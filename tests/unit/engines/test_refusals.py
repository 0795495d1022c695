"""Which errors of engines are the client's, and what the client is told."""

import json
from typing import Any

import pytest

from gateway import errors
from gateway.engines import KINDS
from gateway.engines.refusals import read_refusal
from gateway.protocols.messages import error_body

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "temperature": 1.0, "tools": TOOLS}
SCHEMA = {"response_format": {"type": "json_schema"}}
SECRET = "/Users/ann/models/demo and the prompt"


def refused(error: errors.GatewayError) -> tuple[int, str | None, str]:
    assert isinstance(error, errors.RefusedByWorker)
    return error.status, error.param, error.code


@pytest.mark.parametrize(
    ("status", "body", "shown", "param", "code"),
    [
        (400, {"detail": "Protected conversation exceeds the available context budget."},
         400, "messages", "context_length_exceeded"),
        (404, {"error": "Only 'text' content type is supported."},
         400, "messages", "unsupported_value"),
        (404, {"detail": "Not Found"}, 400, None, "endpoint_not_served"),
        (405, "Method Not Allowed", 400, None, "endpoint_not_served"),
        (422, {"detail": [{"loc": ["body", "temperature"], "msg": SECRET, "type": "x"}]},
         422, "temperature", "invalid_value"),
        (400, {"error": {"message": SECRET, "param": "temperature"}},
         400, "temperature", "invalid_value"),
        (400, {"error": "temperature must be of type float"}, 400, "temperature", "invalid_value"),
        (400, {"error": {"message": "qwen does not support tools"}},
         400, "tools", "unsupported_value"),
        (400, {"error": {"message": "Conversation roles must alternate user/assistant"}},
         400, "messages", "unsupported_value"),
        (400, SECRET, 400, None, "invalid_value"),
        (413, {"error": SECRET}, 413, None, "invalid_value"),
    ],
)  # fmt: skip
def test_an_error_of_the_client_keeps_its_class_and_gets_words_of_ours(
    status: int, body: object, shown: int, param: str | None, code: str
) -> None:
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    error = read_refusal(status, raw, CHAT)
    assert refused(error) == (shown, param, code)
    assert "Users" not in error.message
    assert "prompt and" not in error.message


@pytest.mark.parametrize(
    ("words", "prompt", "context"),
    [
        ("request (300004 tokens) exceeds the available context size (2048 tokens), try",
         300004, 2048),
        ("Prompt too long: 3001 tokens exceeds max context window of 262 tokens in /U", 3001, 262),
        ("This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
         "(4000 in the messages, 1000 in the completion).", 5000, 4096),
        ("This model's maximum context length is 32 tokens. However, your request has 40 input "
         "tokens. Please reduce the length of the input messages.", 40, 32),
        ("Trying to keep the first 5000 tokens when context the overflows. However, the model is "
         "loaded with context length of only 4096 tokens, which is not enough.", 5000, 4096),
    ],
)  # fmt: skip
def test_an_overflow_has_the_numbers_of_the_engine(words: str, prompt: int, context: int) -> None:
    """OpenAI's words, and those by which Claude Code shortens a conversation."""
    error = read_refusal(400, json.dumps({"error": {"message": words}}).encode(), CHAT)
    assert f"maximum context length is {context} tokens" in error.message
    assert f"resulted in {prompt} tokens" in error.message
    assert "context_length_exceeded" in error.message
    shown = json.loads(error_body(error))["error"]["message"]
    assert shown == f"prompt is too long: {prompt} tokens > {context} maximum"


@pytest.mark.parametrize(
    "words",
    [
        "greater than the context length",
        "the prompt exceeds the context of 4096 tokens",
        "the prompt of 9000 tokens exceeds the context",
        "4096 tokens are the context window of 8192; with its answer the prompt exceeds it",
        "the context length of 99999999999999999999 was exceeded by 100000000000000 tokens",
    ],
)
def test_an_overflow_without_both_numbers_has_none(words: str) -> None:
    """But the words by which LiteLLM and LangChain raise their own error."""
    error = read_refusal(400, json.dumps({"error": words}).encode(), CHAT)
    assert error.code == "context_length_exceeded"
    assert "This model's maximum context length is" in error.message
    assert "context_length_exceeded" in error.message
    assert not any(char.isdigit() for char in error.message)
    shown = json.loads(error_body(error))["error"]["message"]
    assert shown == "prompt is too long: it exceeds the context of the model"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, {"error": "bad key"}),
        (403, {"error": "bad key"}),
        (402, {"error": "no credit"}),
        (500, {"error": "Failed to process image"}),
        (404, {"error": "no such model: /Users/me/x"}),
        (404, {"error": {"message": 'model "demo" not found, try pulling it first'}}),
        (404, {"error": "404 Client Error. Repository Not Found for url: https://x"}),
        (302, ""),
        (200, {"error": "x"}),
    ],
)
def test_an_error_of_the_engine_or_of_its_admin_is_no_clients(status: int, body: object) -> None:
    error = read_refusal(status, json.dumps(body).encode(), CHAT)
    assert isinstance(error, errors.WorkerFailed)


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
@pytest.mark.parametrize(
    ("words", "fields", "param"),
    [
        ("Error rendering prompt with jinja template: 'x' is undefined", CHAT, "messages"),
        ("Conversation roles must alternate user/assistant", CHAT, "messages"),
        ("Failed to convert the JSON schema to a grammar", CHAT, "tools"),
        ("Failed to convert the JSON schema to a grammar", CHAT | SCHEMA, "response_format"),
        ("Generation failed: [metal_kernel] No Metal back-end.", CHAT | SCHEMA, "response_format"),
        ("invalid grammar", {"prompt": "x", "guided_grammar": "a"}, "guided_grammar"),
    ],
)
def test_a_fault_of_template_or_grammar_is_the_clients_whatever_the_status(
    status: int, words: str, fields: dict[str, Any], param: str
) -> None:
    error = read_refusal(status, json.dumps({"error": words}).encode(), fields)
    assert refused(error)[:2] == (400 if status in (404, 500, 503) else status, param)


def test_an_error_names_no_field_that_the_request_has_not() -> None:
    plain = {"model": "demo", "messages": HELLO}
    assert isinstance(read_refusal(500, b'{"error": "grammar"}', plain), errors.WorkerFailed)
    for error in ({"error": "no tools"}, {"error": {"message": "?", "param": "tools[0].x"}}):
        assert refused(read_refusal(400, json.dumps(error).encode(), plain))[1] is None
    body = {"prompt": "x", "model": "demo"}
    assert refused(read_refusal(400, b'{"error": "prompt is too long"}', body))[1] == "prompt"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_survives_any_answer(kind: str) -> None:
    engine = KINDS[kind]()
    for body in (b"", b"\xff", b"[]", b"null", b'{"error": []}', b'{"detail": [[]]}', b"7"):
        for status in (200, 302, 400, 404, 422, 500, 599):
            assert isinstance(engine.refusal(status, body, CHAT), errors.GatewayError)


@pytest.mark.parametrize(
    ("kind", "status", "body", "param"),
    [
        # As seen at 0.7.10; a stream has the same words in its first event, and is refused.
        ("mlx-vlm", 500, "Structured response_format is not supported.", "response_format"),
        ("mlx-vlm", 500, "Unable to detect audio format from bytes", "messages"),
        ("mlx-vlm", 500, "`top_k` has to be an integer in the (0, 1536] interval", "top_k"),
        # As seen at 0.6.0 on Linux: without a word to a schema that it cannot compile.
        ("vllm-mlx", 500, "Internal Server Error", "response_format"),
        # As seen at 0.32.2: to arguments of an earlier tool call that are no JSON, and to others.
        ("mlx-lm", 404, '{"error": "Expecting value: line 1 column 1 (char 0)"}', "messages"),
        ("mlx-lm", 404, '{"error": "list index out of range"}', None),
    ],
)
def test_a_kind_has_answers_of_its_own_to_mistakes_of_clients(kind, status, body, param) -> None:
    engine, asked = KINDS[kind](), {**CHAT, **SCHEMA, "top_k": 9999}
    if kind == "mlx-vlm":
        body = json.dumps({"detail": f"Generation failed: {body}"})
    error = engine.refusal(status, body.encode(), asked)
    assert refused(error)[:2] == (400, param)
    arguments = "The arguments of tool calls in 'messages' must be JSON objects."
    assert (error.message == arguments) is ("Expecting" in body)
    other = b'{"error": "Repository Not Found: no Metal"}'
    assert isinstance(engine.refusal(status, other, CHAT), errors.WorkerFailed)
