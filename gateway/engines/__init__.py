"""Kinds of engines: the properties of each, and the answers that identify it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import get_args

from gateway.engines.base import Ask, EngineUnusable, HttpAnswer, Question
from gateway.engines.llama_cpp import LlamaCpp
from gateway.engines.lmstudio import OLDER_MODELS, LmStudio
from gateway.engines.mlx import MlxLm, MlxVlm, VllmMlx
from gateway.engines.ollama import Ollama
from gateway.engines.omlx import Omlx
from gateway.engines.openai import MODELS, OpenAIEngine
from gateway.engines.paceline import PacelineGateway
from gateway.types import EngineKind

Sign = Callable[[HttpAnswer], bool]


def _owner(name: str) -> Sign:
    return lambda answer: any(one.get("owned_by") == name for one in answer.objects())


def _fields(*names: str) -> Sign:
    return lambda answer: answer.object().keys() >= set(names)


def _by_library(answer: HttpAnswer) -> bool:
    """Return whether the standard library's server answers with a state of health."""
    try:
        status = json.loads(answer.text)
    except ValueError:
        return False
    by_library = answer.headers.get("server", "").startswith("BaseHTTP/")
    return by_library and status in ({"status": "ok"}, {"status": "unavailable"})


def _by_llama_cpp(answer: HttpAnswer) -> bool:
    return answer.headers.get("server") == "llama.cpp" or _owner("llamacpp")(answer)


_SIGNS: tuple[tuple[type[OpenAIEngine], Question, Sign], ...] = (
    (PacelineGateway, MODELS, _owner("paceline")),
    (Omlx, MODELS, _owner("omlx")),
    (LlamaCpp, MODELS, _by_llama_cpp),
    (Ollama, Ollama.health, lambda answer: answer.object().keys() == {"version"}),
    (
        LmStudio,
        OLDER_MODELS,
        lambda answer: any("compatibility_type" in one for one in answer.objects()),
    ),
    (MlxVlm, MlxVlm.health, _fields("loaded_tool_parser", "apc_enabled")),
    (MlxLm, MlxLm.health, _by_library),
    (VllmMlx, VllmMlx.health, _fields("num_running", "num_waiting", "uptime_s")),
    (OpenAIEngine, MODELS, lambda answer: isinstance(answer.object().get("data"), list)),
)
"""A question and the answer of only this kind, in the order of asking."""
KINDS: Mapping[str, type[OpenAIEngine]] = {one.kind: one for one, _, _ in _SIGNS}
assert {"auto", *KINDS} == set(get_args(EngineKind))


async def detect(ask: Ask) -> type[OpenAIEngine]:
    """Return the kind of an engine; raise `EngineSilent`, or `EngineUnusable` if it is unknown.

    Each question is asked once. Redirects are answers like others, and identify no kind.
    """
    answers: dict[str, HttpAnswer] = {}
    for kind, question, is_sign in _SIGNS:
        if question.path not in answers:
            answers[question.path] = await ask(question)
        if is_sign(answers[question.path]):
            return kind
    statuses = {answer.status for answer in answers.values()}
    if statuses & {401, 403}:
        raise EngineUnusable("The engine requires an API key: name its environment variable.")
    if any(300 <= status < 400 for status in statuses):
        raise EngineUnusable("The server at this URL redirects. Use the engine's own address.")
    raise EngineUnusable("The gateway does not recognise the server at this URL as an engine.")
