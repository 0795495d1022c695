"""Kinds of engines: one module each, which says all that the gateway knows of the kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from gateway.engines.base import Ask, EngineUnusable, HttpAnswer
from gateway.engines.llama_cpp import LlamaCpp
from gateway.engines.lmstudio import LmStudio
from gateway.engines.mlx_lm import MlxLm
from gateway.engines.mlx_vlm import MlxVlm
from gateway.engines.ollama import Ollama
from gateway.engines.omlx import Omlx
from gateway.engines.openai import OpenAIEngine
from gateway.engines.paceline import PacelineGateway
from gateway.engines.vllm_mlx import VllmMlx
from gateway.types import EngineKind

_CLASSES = (
    PacelineGateway,
    Omlx,
    LlamaCpp,
    Ollama,
    LmStudio,
    MlxVlm,
    MlxLm,
    VllmMlx,
    OpenAIEngine,
)
"""In the order in which an engine is asked: the last one accepts any list of models."""
KINDS: Mapping[str, type[OpenAIEngine]] = {one.kind: one for one in _CLASSES}
assert {"auto", *KINDS} == set(get_args(EngineKind))


async def detect(ask: Ask) -> type[OpenAIEngine]:
    """Return the kind of an engine; raise `EngineSilent`, or `EngineUnusable` if it is none.

    Each question is asked once. Redirects are answers like others, and no sign of any kind.
    """
    answers: dict[str, HttpAnswer] = {}
    for kind in _CLASSES:
        path = kind.sign.path
        if path not in answers:
            answers[path] = await ask(kind.sign)
        if kind.is_sign(answers[path]):
            return kind
    statuses = {answer.status for answer in answers.values()}
    if statuses & {401, 403}:
        raise EngineUnusable("The engine asks for an API key: name its environment variable.")
    if any(300 <= status < 400 for status in statuses):
        raise EngineUnusable("The server at this URL redirects; name the engine's own address.")
    raise EngineUnusable("The server at this URL is no engine that the gateway knows.")
