"""Ask the models one question, and print the answer as it arrives."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from gateway.cli import CommandError
from gateway.cli.client import connect, file_problem, read_text
from gateway.cli.explain import BECAUSE
from paceline.request.content import PICTURE_LIMIT_BYTES, PictureInvalid, read_size
from paceline.terminal import printable

if TYPE_CHECKING:
    import httpx

# Every gateway has this alias of a model that it serves.
_ANY_MODEL = "default"
# The gateway has deadlines of its own, and reports them.
_TIMEOUT = (10.0, 660.0, 660.0, 660.0)
_EVENT_LIMIT_BYTES = 8 * 1024 * 1024
_LEAST_TOKENS = 16
"""Fewer tokens, after the first, do not show a speed."""
_LEAST_S = 1.0
"""Time that an answer must take to show a speed that its worker does not report."""
_SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_REASONS = {**BECAUSE, "policy": "the policy says so"}


def run(
    *,
    question: str | None,
    images: Sequence[str],
    model: str | None,
    temperature: float,
    url: str,
) -> int:
    """Print the answer to a question; on a terminal also where it ran, and how fast."""
    if question is None and sys.stdin.isatty():
        raise CommandError('a question is missing, as in: paceline ask "Count from 1 to 20."')
    if question is None or question == "-":
        question = read_text("-")
    if not question.strip():
        raise CommandError("the question is empty.")
    body = {
        "model": model or _ANY_MODEL,
        "messages": [{"role": "user", "content": _content(question, images)}],
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        content = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise CommandError("the question is not text in UTF-8.") from None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    started_s = time.monotonic()
    with connect(url).stream(
        "POST",
        "/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
        timeout=_TIMEOUT,
    ) as response:
        answer = _print_answer(response, started_s)
    if sys.stderr.isatty():
        headers = {**response.headers, **answer.late_headers}
        reason = headers.get("x-paceline-reason", "")
        why = _REASONS.get(reason, reason).format(temperature=temperature, choices=1)
        sys.stderr.write(printable(_summary(headers, why, answer)) + "\n")
    return 0


def _content(question: str, images: Sequence[str]) -> str | list[dict[str, Any]]:
    pictures = [{"type": "image_url", "image_url": {"url": _data_url(name)}} for name in images]
    return [*pictures, {"type": "text", "text": question}] if pictures else question


def _data_url(name: str) -> str:
    """Return the content of a picture file as a `data:` URL with the type of its content."""
    try:
        with Path(name).open("rb") as file:
            content = file.read(PICTURE_LIMIT_BYTES + 1)
    except OSError as error:
        raise CommandError(f"cannot read {name}: {file_problem(error)}.") from None
    if len(content) > PICTURE_LIMIT_BYTES:
        limit = PICTURE_LIMIT_BYTES // 1024**2
        raise CommandError(f"cannot send {name}: it is larger than {limit} MiB.")
    kinds = (kind for start, kind in _SIGNATURES.items() if content.startswith(start))
    url = f"data:image/{next(kinds, 'png')};base64,{base64.b64encode(content).decode()}"
    try:
        read_size(url)
    except PictureInvalid as invalid:
        raise CommandError(f"cannot send {name}: {invalid}") from None
    return url


@dataclass(slots=True)
class _Answer:
    """The facts about an answer that the end of a command reports."""

    first_token_s: float = 0.0
    """From the request to the first text; 0 before it."""
    last_token_s: float = 0.0
    tokens: int = 0
    token_s: float = 0.0
    """For each token after the first, as the worker counts and measures; 0 if it does not."""
    drafted: int = 0
    accepted: int = 0
    finish_reason: str = ""
    late_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers in the last chunk, of an answer that waited for a worker."""


def _print_answer(response: httpx.Response, started_s: float) -> _Answer:
    """Print each piece of text at once; raise `CommandError` for an incomplete answer.

    Reasoning is printed only on a terminal, where it looks different from the answer. So is the
    worker's progress before the answer: in a long prompt, or its place in the queue.
    """
    import httpx  # noqa: PLC0415  # as in `Gateway.stream`

    answer, last_text = _Answer(), "\n"
    reasoned = False
    waiting = Console(stderr=True).status("")
    try:
        for event in _events(response):
            if isinstance(event, str):
                if sys.stderr.isatty() and not answer.first_token_s:
                    waiting.update(Text(f"{printable(event).capitalize()} ..."))
                    waiting.start()
                continue
            text, reasoning = _read_event(event, answer)
            if text or reasoning:
                waiting.stop()
                answer.last_token_s = time.monotonic() - started_s
                answer.first_token_s = answer.first_token_s or answer.last_token_s
            if reasoning and sys.stdout.isatty():
                dim = Text(printable(reasoning.replace("\r", "")), style="dim")
                Console(highlight=False).print(dim, end="", soft_wrap=True)
                reasoned, last_text = True, reasoning
            if text:
                if reasoned:
                    text, reasoned = f"\n\n{text}", False
                # A terminal obeys control characters, and a pipe may end at one.
                sys.stdout.write(printable(text.replace("\r", "")))
                sys.stdout.flush()
                last_text = text
    except httpx.HTTPError:
        raise CommandError("the answer is incomplete: the gateway closed the connection.") from None
    finally:
        waiting.stop()
        if not last_text.endswith("\n"):
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.write("\n")
                sys.stdout.flush()
    if not answer.finish_reason:
        raise CommandError("the answer is incomplete: its end is missing.")
    return answer


def _events(response: httpx.Response) -> Iterator[Mapping[str, Any] | str]:
    """Yield the events, and the comments about what comes before the answer."""
    # `iter_lines` would also split at separators that JSON may contain.
    rest = b""
    for part in response.iter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _EVENT_LIMIT_BYTES:
            raise CommandError("the answer is incomplete: an event is too large.")
        for line in lines:
            if line.startswith((b": read ", b": queued ")):
                yield line[2:].decode(errors="replace")
            elif line.startswith(b"data:"):
                with contextlib.suppress(ValueError):  # [DONE]
                    yield json.loads(line.removeprefix(b"data:"))


def _read_event(event: object, answer: _Answer) -> tuple[str, str]:
    """Return the text and the reasoning of an event, and add its figures to the answer."""
    match event:
        case {"error": {"message": str(message)}}:
            raise CommandError(f"the answer is incomplete: {message}")
    match event:
        case {"headers": dict(headers)}:
            answer.late_headers = {name: str(value) for name, value in headers.items()}
    match event:
        case {"usage": {"completion_tokens": int(tokens)}}:
            answer.tokens = tokens
    match event:
        case {"metrics": {"mean_itl_ms": int() | float() as token_ms}}:
            answer.token_s = token_ms / 1000
    match event:
        case {"metrics": {"speculative_decoding": dict(counts)}}:
            drafted = counts.get("num_draft_tokens")
            accepted = counts.get("num_accepted_draft_tokens")
            if isinstance(drafted, int) and isinstance(accepted, int):
                answer.drafted, answer.accepted = drafted, accepted
    match event:
        case {"choices": [{"finish_reason": str(reason)}, *_]}:
            answer.finish_reason = reason
    match event:
        case {"choices": [{"delta": dict(delta)}, *_]}:
            both = delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")
            text, reasoning = (one if isinstance(one, str) else "" for one in both)
            return text, reasoning
    return "", ""


def _summary(headers: Mapping[str, str], why: str, answer: _Answer) -> str:
    """Return one line: where the answer ran and why, its speeds, its drafts."""
    facts = []
    if (worker := headers.get("x-paceline-worker")) and (pool := headers.get("x-paceline-pool")):
        facts.append(f"{pool} on {worker}, because {why}")
    if answer.first_token_s:
        facts.append(f"first token after {answer.first_token_s:.2f} s")
        facts.append(_speed(answer))
    if answer.drafted:
        share = answer.accepted / answer.drafted
        facts.append(f"{share:.0%} of {answer.drafted} drafted tokens accepted")
    if answer.finish_reason == "length":
        facts.append("stopped at the token limit")
    return "; ".join(facts)


def _speed(answer: _Answer) -> str:
    """Return the speed of the tokens after the first, by the worker's own time if reported."""
    more = answer.tokens - 1
    span_s = answer.token_s * more or answer.last_token_s - answer.first_token_s
    if more < _LEAST_TOKENS or span_s < (0 if answer.token_s else _LEAST_S) or not span_s:
        return "too short to measure the speed"
    return f"{more / span_s:.0f} tokens/s"
