"""The errors of engines: who is at fault, and the client's message.

Engines word and shape their errors in many ways: OpenAI's object, FastAPI's `detail`, a plain text.
They quote prompts, paths and libraries, so a client gets words of the gateway and the name of the
field at fault, which is read from the error but never copied from it. So does the log, for some
quote the key that the gateway has sent.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from pydantic_core import from_json

from gateway import errors
from gateway.errors import is_plain_name
from paceline.request.wires import CONSTRAINT_FIELDS

log = logging.getLogger(__name__)

_TEXT_CHARS = 4096
# The gateway's own key, or its account: no client can mend that.
_OF_THE_GATEWAY = frozenset((401, 402, 403, 407))
_UNSERVED = frozenset((404, 405, 415, 501))
# LiteLLM looks for the first words, LangChain for the last.
OVERFLOW_MESSAGE = (
    "This model's maximum context length is exceeded: the prompt has too many tokens. "
    f"({errors.CONTEXT_OVERFLOW})"
)
_OVERFLOW_COUNTS = (
    "This model's maximum context length is {context} tokens. However, your prompt resulted in "
    f"{{prompt}} tokens. Please shorten it. ({errors.CONTEXT_OVERFLOW})"
)
_CONTEXT_COUNT = re.compile(r"(?:context|n_ctx)[^0-9.]{0,40}([0-9]{1,12})\b", re.IGNORECASE)
_TOKEN_COUNT = re.compile(r"\b([0-9]{1,12})(?= [a-z ]{0,20}tokens?\b)", re.IGNORECASE)
_UNSUPPORTED = "unsupported_value"
_ABSENT: tuple[object, ...] = (None, [], {}, "")
_CONSTRAINTS = (*CONSTRAINT_FIELDS, "tools")
"""Fields that may have a schema or a grammar."""


class Phrase(NamedTuple):
    """The words of engines for one fault, and the message that the client gets instead."""

    words: str
    """A pattern, in any case."""
    message: str
    param: str
    code: str = _UNSUPPORTED

    def found_in(self, text: str) -> bool:
        """Return whether a text has the words."""
        return re.search(self.words, text, re.IGNORECASE) is not None


GRAMMAR = Phrase(
    # The last one: off Apple silicon, the grammars of MLX engines have no kernel.
    r"json.?schema|response_format|grammar|structured.output|guided_|\[metal_kernel\]",
    "The engine does not accept this schema or grammar.",
    "response_format",
)
TEMPLATE = Phrase(
    r"chat.?template|jinja|roles must alternate|conversation roles|TemplateError|UndefinedError",
    "The model's chat template does not accept these messages.",
    "messages",
)
_WHATEVER_STATUS = (GRAMMAR, TEMPLATE)
"""Faults of a request that engines also report as faults of their own."""
_PHRASES = (
    Phrase(
        r"context (length|size|window|budget)|n_ctx|maximum context|available context|"
        r"(prompt|input|request)[^.]{0,60}(too long|too large|exceeds?\b)|"
        r"exceeds?[^.]{0,40}context",
        OVERFLOW_MESSAGE,
        "messages",
        errors.CONTEXT_OVERFLOW,
    ),
    Phrase(
        r"\bimages?\b|image_url|\bvision\b|multimodal|multi-modal|mmproj|only 'text' content|"
        r"\baudio\b|\bvideos?\b",
        "The engine does not accept such media with this model.",
        "messages",
    ),
    GRAMMAR,
    Phrase(r"logprobs", "The engine returns no log-probabilities here.", "logprobs"),
    Phrase(
        r"does not support tools|tool_choice|tool.?call|\btools?\b",
        "The engine does not accept these tools with this model.",
        "tools",
    ),
    TEMPLATE,
)
_MODEL_GONE = re.compile(
    r"model[^.]{0,300}(not found|not loaded|does not exist|unknown|no such|not available|invalid)|"
    r"(no such|unknown|invalid|failed to load|error loading|not found)[^.]{0,40}model|"
    r"repo(sitory)? (id|not found)|404 client error|huggingface",
    re.IGNORECASE,
)


def read_refusal(
    status: int, body: bytes, fields: Mapping[str, Any], phrases: Sequence[Phrase] = ()
) -> errors.GatewayError:
    """Return the error for an answer with another status than 200, or for an error in a stream.

    `fields` are those of the request, `phrases` those of the engine.
    """
    text, param = _read(body)
    of_client = 400 <= status < 500 or status == HTTPStatus.NOT_IMPLEMENTED
    if status >= 500 and any(
        one.found_in(text) and _asked_by(one.param, fields) for one in _WHATEVER_STATUS
    ):
        of_client, status = True, HTTPStatus.BAD_REQUEST
    # The gateway asks for models that the engine lists, so one that is gone is no client's fault.
    if not of_client or status in _OF_THE_GATEWAY or _MODEL_GONE.search(text):
        return failed(status, text)
    log.info("engine.refused status=%d phrase=%s chars=%d", status, _phrase_of(text), len(text))
    shown = HTTPStatus.BAD_REQUEST if status in _UNSERVED else HTTPStatus(status)
    message, param, code = _words(status, text, param, fields, phrases)
    return errors.RefusedByWorker(shown, message, param=param, code=code)


def _words(
    status: int, text: str, param: str | None, fields: Mapping[str, Any], phrases: Sequence[Phrase]
) -> tuple[str, str | None, str]:
    """Return the message, the field and the code for a fault of the client."""
    for one in (*phrases, *_PHRASES):
        if not one.found_in(text) or (asked := _asked_by(one.param, fields)) is None:
            continue
        message = one.message
        if one.code == errors.CONTEXT_OVERFLOW:
            found = _CONTEXT_COUNT.search(text)
            context = int(found[1]) if found else 0
            prompt = max(map(int, _TOKEN_COUNT.findall(text)), default=0)
            if 0 < context < prompt:
                message = _OVERFLOW_COUNTS.format(context=context, prompt=prompt)
        return message, asked, one.code
    param = param if param and re.split(r"[.\[]", param)[0] in fields else None
    if status in _UNSERVED and param is None:
        return "The engine does not serve this kind of request.", None, "endpoint_not_served"
    param = param or _named(text, fields)
    what = f"the value of '{param}'" if param else "this request"
    return f"The engine does not accept {what}.", param, "invalid_value"


def failed(status: int, text: str) -> errors.WorkerFailed:
    """Return the error of a worker that failed, and log the known facts about it."""
    log.warning("worker.failed status=%d phrase=%s chars=%d", status, _phrase_of(text), len(text))
    return errors.WorkerFailed()


def _phrase_of(text: str) -> str:
    """Name the fault in a text, for the log."""
    if _MODEL_GONE.search(text):
        return "model"
    known = (one for one in _PHRASES if one.found_in(text))
    return next((one.param if one.code == _UNSUPPORTED else one.code for one in known), "-")


def _read(body: bytes) -> tuple[str, str | None]:
    """Return the text of an error, and the field that it names."""
    try:
        text = answer = from_json(body)
    except ValueError:
        return body[:_TEXT_CHARS].decode(errors="replace"), None
    param = None
    if isinstance(answer, dict):
        text = answer.get("error", answer.get("detail", answer.get("message", "")))
        match text:
            case dict() as error:
                text, param = error.get("message", error.get("detail", "")), error.get("param")
            case [dict() as first, *_]:  # FastAPI's list of invalid fields
                steps = first.get("loc")
                steps = steps if isinstance(steps, list) else []
                names = (one for one in steps if isinstance(one, str) and one != "body")
                text, param = first.get("msg", ""), next(names, None)
    named = isinstance(param, str) and is_plain_name(param)
    return str(text)[:_TEXT_CHARS], param if named else None


def _named(text: str, fields: Mapping[str, Any]) -> str | None:
    """Return the longest name of a field of the request that stands in the text."""
    words = set(re.findall(r"[a-z_]+", text.lower()))
    names = [name for name in fields if name in words and name not in ("model", "stream", "stop")]
    return max(names, key=len, default=None)


def _asked_by(param: str, fields: Mapping[str, Any]) -> str | None:
    """Return the field of a request that the engine refuses; None without one."""
    names = {"messages": ("messages", "prompt"), "response_format": _CONSTRAINTS}
    return next(
        (name for name in names.get(param, (param,)) if fields.get(name) not in _ABSENT), None
    )
